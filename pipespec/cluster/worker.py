"""A worker's life: it holds a rank in one epoch after another, and keeps its weights meanwhile."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from pipespec.cluster import build
from pipespec.cluster.deployment import ControllerAddress, Deployment
from pipespec.cluster.heartbeat import Heartbeat
from pipespec.cluster.memory import device_of, model_of, require_memory
from pipespec.cluster.rank_assignment import RankAssignment
from pipespec.cluster.supervisor import WORKER
from pipespec.config.hosts import Host
from pipespec.config.schema import GLOO, NCCL
from pipespec.controller.membership import Membership
from pipespec.engine.checkpoint import inspect
from pipespec.engine.model import ModelSlice
from pipespec.engine.stored.gguf import is_gguf
from pipespec.engine.tensor_parallel import Seat
from pipespec.errors import ConfigError, NotProven, RankFailed, StaleEpoch, Unreachable
from pipespec.system.waiting import spins
from pipespec.transport.distributed import (
    MEET_S,
    DistributedTransport,
    Meeting,
    host_meeting,
    join_meeting,
)
from pipespec.transport.group import MemberGroup, nccl_serves

# Seconds between two looks at whether all ranks are there.
LOOK_S = 0.5
# How much longer a worker waits for Redis than for whoever watches it: a host that is cut off is
# replaced before its workers end.
LONGER_S = 15.0

log = logging.getLogger(__name__)


def run_worker(deployment: Deployment, where: ControllerAddress, hosts: Mapping[str, Host]) -> None:
    """The entrypoint of every worker; `hosts` are its own and the others', by worker.

    Returns when the head says stop, or the cluster is over. Raises Unreachable when Redis is
    gone for good, and whatever is wrong with this worker rather than with its neighbours.
    """
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    worker = os.environ[WORKER]
    here = on_this_host(deployment, hosts[worker])
    weights, mids = Weights(), Weights()
    number = 0
    with Heartbeat(
        where.url,
        where.namespace,
        worker,
        patience_s=deployment.config.cluster.patience_s + LONGER_S,
    ) as heartbeat:
        while True:
            epoch = heartbeat.next(number)
            number = epoch.number
            if not epoch.assignment:
                return
            assignment = RankAssignment.decode(epoch.assignment)
            place = assignment.place_of(worker)
            if place is None:
                log.info("epoch %d: spare", number)
                continue
            rank, member = place
            devices = list(map(deployment.device_of, assignment.workers))
            devices[rank] = deployment.device_of(worker)
            sizes = tuple(len(assignment.members(each)) for each in range(len(devices)))
            mine = replace(here, layers=assignment.layers, devices=tuple(devices), sizes=sizes)
            model = mid = None
            try:
                epoch_where = replace(where, epoch=number)
                plain = heartbeat.plain()
                if plain:
                    mine = mine.made_plain()
                # Whoever started local ones has asked, but for the form that was hoped for.
                if not weights.loaded and (plain or not hosts[worker].local):
                    require_memory(mine, [rank], followers=False)
                places = [
                    (hosts[each].name, deployment.device_of(each)) for each in assignment.everyone
                ]
                sharing = places.count((hosts[worker].name, devices[rank]))
                members = assignment.members(rank)
                if mine.mid is not None:
                    places.append((hosts[assignment.workers[0]].name, mine.mid_device))
                if rank:
                    mids.drop()
                model = weights.of(mine, rank, sharing, member=member, size=len(members))
                if rank == 0 and member == 0 and mine.mid is not None:
                    mid = mids.of(mine, rank, places.count(places[-1]), mid=True)
                log.info("epoch %d: rank %d of %d", number, rank, mine.num_ranks)
                if len(members) == 1:
                    serve(mine, epoch_where, rank, model, mid, assignment, hosts, heartbeat)
                    return
                assert model is not None
                with (
                    gathered(mine, epoch_where, rank, members, member, heartbeat) as group,
                    heartbeat.guard(number, group.abort),
                ):
                    if member:
                        build.serve_beside(model, group)
                        return
                    with build.leading(model, group) as slots:
                        serve(
                            mine,
                            epoch_where,
                            rank,
                            model,
                            mid,
                            assignment,
                            hosts,
                            heartbeat,
                            slots,
                            group.abort,
                        )
                return
            except NotProven as error:
                if here.config.model.keep_quantized == "yes":
                    raise
                log.info("epoch %d ended: %s", number, error.fault)
                heartbeat.make_plain(number, f"{error.fault}; all weights are made plain")
            except (RankFailed, StaleEpoch, Unreachable) as error:
                log.info("epoch %d ended: %s", number, error)
                heartbeat.suspect(number, str(error))


def on_this_host(deployment: Deployment, host: Host) -> Deployment:
    """The deployment with the checkpoints as they lie on this host. Raises ConfigError."""

    def here(path: Path, given: str | None, kind: str) -> Path:
        found = Path(given).expanduser() if given else path
        if not (found.is_dir() or (is_gguf(found) and found.is_file())):
            what = "file" if is_gguf(found) else "folder"
            raise ConfigError(
                f"Host {host.name} has no {what} {found}; put the {kind} model there, or name its "
                f"{what} as {kind} of that host in the hosts file."
            )
        return found

    folder = here(Path(deployment.target.path), host.target, "target")
    if str(folder) != str(deployment.target.path):
        target = inspect(str(folder))
        if target.kind != deployment.target.kind:
            raise ConfigError(
                f"Host {host.name} has another target in {folder} than the other hosts "
                f"({target.kind}, not {deployment.target.kind}); put the same there."
            )
        deployment = replace(deployment, target=target)
    for kind, info in deployment.models[1:]:
        if (given := getattr(host, kind)) is not None:
            own = inspect(str(here(Path(info.path), given, kind)))
            deployment = deployment.with_model(kind, own)
    return deployment


class Weights:
    """A model that this worker holds, or its part of one, kept from one epoch to the next."""

    def __init__(self) -> None:
        self._what: tuple[object, ...] | None = None
        self._model: ModelSlice | None = None

    @property
    def loaded(self) -> bool:
        """Whether anything was ever loaded: the device may then keep what is free."""
        return self._what is not None

    def of(
        self,
        deployment: Deployment,
        rank: int,
        sharing: int,
        *,
        mid: bool = False,
        member: int = 0,
        size: int = 1,
    ) -> ModelSlice | None:
        """What a rank needs (`mid`: for the mid-size model beside it), one of `sharing` on its
        device; loaded unless it is here already. Of a rank with `size` members this one's part."""
        layers = deployment.layers[rank - 1] if rank else None
        device = device_of(deployment, rank, mid=mid)
        info = model_of(deployment, rank, mid=mid)
        held = None if info is None else deployment.held(info)
        share = (member, size)
        what = (rank > 0, layers, device, deployment.num_ranks, deployment.dtype, held, share)
        if what != self._what:
            self.drop()  # first: the device may not hold both
            seat = Seat(member, size) if size > 1 else None
            self._model = build.load_model(deployment, rank, sharing, mid=mid, seat=seat)
            self._what = what
        return self._model

    def drop(self) -> None:
        """Hold nothing."""
        if self._model is not None:
            self._model = self._what = None
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # for what is measured to be free


def serve(
    deployment: Deployment,
    where: ControllerAddress,
    rank: int,
    model: ModelSlice | None,
    mid: ModelSlice | None,
    assignment: RankAssignment,
    hosts: Mapping[str, Host],
    heartbeat: Heartbeat,
    num_slots: int | None = None,
    abort: Callable[[], None] = lambda: None,
) -> None:
    """Hold a rank for one epoch, with so many of the model's KV slots; `abort` ends what else it
    may wait for then."""

    scheduling = deployment.config.scheduler

    def connect() -> DistributedTransport:
        with Membership(where.url, where.namespace) as shared:
            while len(shared.attached(where.epoch)) < deployment.num_ranks:
                heartbeat.check(where.epoch)
                shared.await_attached(where.epoch, deployment.num_ranks, LOOK_S)
            meeting = meet(shared)
        try:
            return DistributedTransport.connect(
                deployment.devices,
                meeting=meeting,
                rank=rank,
                nccl=transport.backend == NCCL,
                spins=spinning,
                epoch=where.epoch,
                secret=where.secret,
                max_rows=deployment.max_rows,
                max_released=scheduling.max_num_seqs,
                max_kept=scheduling.max_num_seqs + scheduling.max_retained,
                hidden_size=deployment.target.hidden_size,
                dtype=getattr(torch, deployment.dtype),
            )
        except BaseException:
            meeting.close()
            raise

    def meet(shared: Membership) -> Meeting:
        if rank == 0:
            # Nothing listens for ranks that share a machine.
            alone = len({hosts[worker].name for worker in assignment.workers}) == 1
            address = None if alone else assignment.address
            meeting = host_meeting(address, deployment.config.transport.port)
            shared.invite(where.epoch, meeting.place)
            return meeting
        began = time.monotonic()
        while (place := shared.meeting(where.epoch, LOOK_S)) is None:
            heartbeat.check(where.epoch)
            if time.monotonic() - began > MEET_S:
                raise RankFailed(f"The head did not say within {MEET_S:g} s where to meet.")
        return join_meeting(place)

    def guard(alarm: Callable[[], None]) -> AbstractContextManager[None]:
        def both() -> None:
            alarm()
            abort()

        return heartbeat.guard(where.epoch, both)

    transport = deployment.config.transport
    names = [hosts[worker].name for worker in assignment.everyone]
    spinning = spins(transport.wait, names.count(names[rank]))
    build.serve(
        deployment,
        where,
        rank,
        model,
        mid,
        connect,
        guard,
        spins=spinning,
        num_slots=num_slots,
    )


@contextmanager
def gathered(
    deployment: Deployment,
    where: ControllerAddress,
    rank: int,
    members: Sequence[str],
    member: int,
    heartbeat: Heartbeat,
) -> Iterator[MemberGroup]:
    """Those who compute a rank together, once all of them have loaded. They are of one host, so
    nothing listens."""
    with Membership(where.url, where.namespace) as shared:
        if member:
            shared.follow(where.epoch, members[member])
            while (place := shared.gathering(where.epoch, rank, LOOK_S)) is None:
                heartbeat.check(where.epoch)
            meeting = join_meeting(place)
        else:
            while not shared.await_followers(where.epoch, members[1:], LOOK_S):
                heartbeat.check(where.epoch)
            meeting = host_meeting()
            shared.invite_followers(where.epoch, rank, meeting.place)
    try:
        own = nccl_serves([*map(deployment.device_of, members)])
        nccl = own and deployment.config.transport.backend != GLOO
        device = deployment.device_of(members[member]) if nccl else None
        yield MemberGroup(meeting.store, member, len(members), device)
    finally:
        meeting.close()
