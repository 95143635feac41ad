"""A member's life: it holds a rank in one epoch after another, and keeps its weights meanwhile."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from pipespec.cluster import build, deployment
from pipespec.cluster.heartbeat import Heartbeat
from pipespec.cluster.memory import require_memory
from pipespec.cluster.rank_assignment import RankAssignment
from pipespec.cluster.supervisor import MEMBER
from pipespec.config.hosts import Box
from pipespec.controller.members import Membership
from pipespec.engine.checkpoint import inspect
from pipespec.engine.model import ModelSlice
from pipespec.errors import ConfigError, RankFailed, StaleEpoch, Unreachable
from pipespec.transport.distributed import (
    MEET_S,
    DistributedTransport,
    Meeting,
    choose_backend,
    host_meeting,
    join_meeting,
)

# Seconds between two looks at whether all ranks are there.
LOOK_S = 0.5
# How much longer a member waits for Redis than for whoever watches it: a box that is cut off is
# replaced before its members end.
LONGER_S = 15.0

log = logging.getLogger(__name__)


def run_member(
    plan: deployment.Plan, where: deployment.ControllerAddress, boxes: Mapping[str, Box]
) -> None:
    """The entrypoint of every member; `boxes` are its own and the others', by member.

    Returns when the head says stop, or the cluster is over. Raises Unreachable when Redis is
    gone for good, and whatever is wrong with this member rather than with its neighbours.
    """
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    member = os.environ[MEMBER]
    here = on_this_box(plan, boxes[member])
    weights = Weights()
    number = 0
    with Heartbeat(
        where.url, where.namespace, member, patience_s=plan.config.cluster.patience_s + LONGER_S
    ) as heartbeat:
        while True:
            epoch = heartbeat.next(number)
            number = epoch.number
            if not epoch.plan:
                return
            assignment = RankAssignment.decode(epoch.plan)
            rank = assignment.rank_of(member)
            if rank is None:
                log.info("epoch %d: spare", number)
                continue
            devices = tuple(map(plan.device_of, assignment.members))
            mine = replace(here, layers=assignment.layers, devices=devices)
            model = None
            try:
                epoch_where = replace(where, epoch=number)
                if not (weights.loaded or boxes[member].local):  # whoever started these has asked
                    require_memory(mine, [rank])
                model = weights.of(mine, rank)
                log.info("epoch %d: rank %d of %d", number, rank, mine.num_ranks)
                serve(mine, epoch_where, rank, model, assignment, boxes, heartbeat)
                return
            except (RankFailed, StaleEpoch, Unreachable) as error:
                log.info("epoch %d ended: %s", number, error)
                heartbeat.suspect(number, str(error))


def on_this_box(plan: deployment.Plan, box: Box) -> deployment.Plan:
    """The plan with the checkpoints as they lie on this box. Raises ConfigError."""

    def here(path: Path, given: str | None, kind: str) -> Path:
        found = Path(given).expanduser() if given else path
        if not found.is_dir():
            raise ConfigError(
                f"Box {box.name} has no folder {found}; put the {kind} model there, or name its "
                f"folder as {kind} of that box in the hosts file."
            )
        return found

    folder = here(Path(plan.target.path), box.target, "target")
    if str(folder) != str(plan.target.path):
        target = inspect(str(folder))
        if target.kind != plan.target.kind:
            raise ConfigError(
                f"Box {box.name} has another target in {folder} than the other boxes "
                f"({target.kind}, not {plan.target.kind}); put the same there."
            )
        plan = replace(plan, target=target)
    if plan.draft is not None and box.draft is not None:
        plan = replace(plan, draft=inspect(str(here(Path(plan.draft.path), box.draft, "draft"))))
    return plan


class Weights:
    """The part of a model that this member holds, kept from one epoch to the next."""

    def __init__(self) -> None:
        self._what: tuple[object, ...] | None = None
        self._model: ModelSlice | None = None

    @property
    def loaded(self) -> bool:
        """Whether anything was ever loaded: the device may then keep what is free."""
        return self._what is not None

    def of(self, plan: deployment.Plan, rank: int) -> ModelSlice | None:
        """What a rank needs; loaded unless it is here already."""
        layers = plan.layers[rank - 1] if rank else None
        what = (rank > 0, layers, plan.devices[rank], plan.num_ranks, plan.dtype)
        if what != self._what:
            # Freed first: the device may not hold both.
            self._model = None
            self._model = build.load_model(plan, rank)
            self._what = what
        return self._model


def serve(
    plan: deployment.Plan,
    where: deployment.ControllerAddress,
    rank: int,
    model: ModelSlice | None,
    assignment: RankAssignment,
    boxes: Mapping[str, Box],
    heartbeat: Heartbeat,
) -> None:
    """Hold a rank for one epoch."""

    def connect() -> DistributedTransport:
        with Membership(where.url, where.namespace) as shared:
            while len(shared.attached(where.epoch)) < plan.num_ranks:
                heartbeat.check(where.epoch)
                shared.await_attached(where.epoch, plan.num_ranks, LOOK_S)
            meeting = meet(shared)
        try:
            return DistributedTransport.connect(
                plan.devices,
                meeting=meeting,
                rank=rank,
                backend=backend,
                epoch=where.epoch,
                secret=where.secret,
                max_rows=plan.max_rows,
                hidden_size=plan.target.hidden_size,
                dtype=getattr(torch, plan.dtype),
            )
        except BaseException:
            meeting.close()
            raise

    def meet(shared: Membership) -> Meeting:
        if rank == 0:
            # Nothing listens for ranks that share a machine.
            alone = len({boxes[member].name for member in assignment.members}) == 1
            address = None if alone else assignment.address
            meeting = host_meeting(address, plan.config.transport.port)
            shared.invite(where.epoch, meeting.place)
            return meeting
        began = time.monotonic()
        while (place := shared.meeting(where.epoch, LOOK_S)) is None:
            heartbeat.check(where.epoch)
            if time.monotonic() - began > MEET_S:
                raise RankFailed(f"The head did not say within {MEET_S:g} s where to meet.")
        return join_meeting(place)

    backend = plan.config.transport.backend
    if backend == "auto":
        backend = choose_backend(
            plan.devices, [boxes[member].name for member in assignment.members]
        )
    build.serve(
        plan, where, rank, model, connect, lambda alarm: heartbeat.guard(where.epoch, alarm)
    )
