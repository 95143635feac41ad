"""A rank that a worker holds in one epoch, and the meeting of those that compute it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import PrefixStore

from pipespec.cluster.deployment.deployment import ControllerAddress, Deployment
from pipespec.cluster.deployment.rank_assignment import RankAssignment
from pipespec.cluster.ranks.heartbeat import Heartbeat
from pipespec.config.schema import AUTO
from pipespec.controller.membership import LinkAddressTable, Membership
from pipespec.system.cores import SHARES_CORES, CoreShares, num_cores, share_cores
from pipespec.system.liveness import MEETING_S, Waiting, progress
from pipespec.transport.distributed import FOREVER
from pipespec.transport.rendezvous_store import RendezvousStore
from pipespec.transport.tp_group import TPProcessGroup, can_use_nccl
from pipespec.transport.transport_settings import GLOO

# Seconds between two checks whether all workers have joined.
LOOK_S = 0.5


@dataclass(frozen=True)
class HeldRank:
    """A rank in one epoch, for a worker of that rank. `deployment` has the layers and devices of
    this epoch, and the paths of this host. `member`: which of the rank's workers this one is; 0
    leads."""

    deployment: Deployment
    where: ControllerAddress
    rank: int
    member: int
    assignment: RankAssignment
    heartbeat: Heartbeat

    @property
    def members(self) -> tuple[str, ...]:
        return self.assignment.members(self.rank)

    def num_models_on(self, device: str) -> int:
        """How many models and parts of models are on a device of this worker's host in this epoch:
        one of each worker."""
        here = self._host, device
        return sum(self._place(each) == here for each in self.assignment.everyone)

    def core_shares(self) -> CoreShares:
        """The shares of the ranks of this worker's host in its cores, in this epoch."""
        if (stated := self._stated_threads) is not None:
            return CoreShares(stated, stated)

        def on_this_cpu(worker: str) -> bool:
            return self._place(worker) == (self._host, "cpu")

        stages = range(1, self.deployment.num_ranks)
        num_stages = sum(
            on_this_cpu(each) for rank in stages for each in self.assignment.members(rank)
        )
        has_head = any(map(on_this_cpu, self.assignment.members(0)))
        return share_cores(num_cores(), num_stages, has_head=has_head)

    @property
    def most_threads(self) -> int:
        """Threads of a rank that finds the others of its host waiting."""
        return self._stated_threads or num_cores()

    @property
    def _stated_threads(self) -> int | None:
        threads = self.deployment.config.cluster.threads
        if threads == AUTO:
            return None if SHARES_CORES in os.environ else torch.get_num_threads()
        return int(threads)

    @property
    def _host(self) -> str:
        return self._place(self.members[self.member])[0]

    def _place(self, worker: str) -> tuple[str, str]:
        return worker.rpartition("/")[0], self.deployment.device_of(worker)


@contextmanager
def meeting_store(held: HeldRank) -> Iterator[RendezvousStore]:
    """The store in Redis for addresses; it stays open, as NCCL reads it at its first message."""
    where = held.where
    with LinkAddressTable(where.url, where.namespace, where.epoch) as table:
        yield RendezvousStore(table, lambda: held.heartbeat.check(where.epoch))


@contextmanager
def tp_group(held: HeldRank) -> Iterator[TPProcessGroup]:
    """The workers that compute a rank on one host, once all of them have loaded their parts."""
    members, member, where = held.members, held.member, held.where
    assert len({worker.rpartition("/")[0] for worker in members}) == 1, f"{members} on one host"
    first = f"member/{held.rank}/first"
    with meeting_store(held) as store:
        progress.begin(MEETING_S)
        with Membership(where.url, where.namespace) as shared, Waiting():
            if member:
                shared.follow(where.epoch, members[member])
                store.wait([first], FOREVER)
            else:
                while not shared.await_followers(where.epoch, members[1:], LOOK_S):
                    held.heartbeat.check(where.epoch)
                store.set(first, "")
        devices = [*map(held.deployment.device_of, members)]
        transport = held.deployment.config.transport
        nccl = can_use_nccl(devices) and transport.backend != GLOO
        yield TPProcessGroup(
            PrefixStore(f"member/{held.rank}", store),
            member,
            len(members),
            devices[member] if nccl else None,
        )
