"""A rank that a worker holds in one epoch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pipespec.cluster.deployment.deployment import ControllerAddress, Deployment
from pipespec.cluster.deployment.rank_assignment import RankAssignment
from pipespec.cluster.ranks.heartbeat import Heartbeat
from pipespec.config.cluster import AUTO
from pipespec.config.hosts import Host
from pipespec.system.cores import SHARES_CORES, CoreShares, num_cores, share_cores


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
    hosts: Mapping[str, Host]
    heartbeat: Heartbeat

    @property
    def members(self) -> tuple[str, ...]:
        return self.assignment.members(self.rank)

    def num_models_on(self, device: str) -> int:
        """How many models and parts of models are on a device of this worker's host in this epoch:
        one of each worker, and the mid-size one of the head."""
        host = self.hosts[self.members[self.member]].name
        of_workers = sum(self._place(each) == (host, device) for each in self.assignment.everyone)
        head, *_ = self.assignment.members(0)
        has_mid = self.deployment.mid is not None and self.hosts[head].name == host
        return of_workers + (has_mid and self.deployment.devices[0] == device)

    def core_shares(self) -> CoreShares:
        """The shares of the ranks of this worker's host in its cores, in this epoch."""
        here = self.hosts[self.members[self.member]].name

        def on_this_cpu(worker: str) -> bool:
            return self._place(worker) == (here, "cpu")

        stages = range(1, self.deployment.num_ranks)
        num_stages = sum(
            on_this_cpu(each) for rank in stages for each in self.assignment.members(rank)
        )
        has_head = any(map(on_this_cpu, self.assignment.members(0)))
        if self._stated_threads is None:
            return share_cores(num_cores(), num_stages, has_head=has_head)
        return CoreShares(self._stated_threads, self._stated_threads)

    @property
    def most_threads(self) -> int:
        """Threads of a rank that finds the others of its host waiting, as stages do while one batch
        at a time is in the pipeline."""
        return self._stated_threads or num_cores()

    @property
    def _stated_threads(self) -> int | None:
        threads = self.deployment.config.cluster.threads
        if threads == AUTO:
            return None if SHARES_CORES in os.environ else torch.get_num_threads()
        return int(threads)

    def _place(self, worker: str) -> tuple[str, str]:
        return self.hosts[worker].name, self.deployment.device_of(worker)
