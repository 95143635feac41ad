"""The process of a worker: it computes a rank in one epoch after another, and keeps its weights.
`run_worker` waits for an epoch, loads what its assignment needs and calls `run_rank`, which joins
the controller and the neighbours and runs the loop of the head or of a stage."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace

import torch

from pipespec.cluster.deployment import memory
from pipespec.cluster.deployment.deployment import ControllerAddress, Deployment
from pipespec.cluster.deployment.rank_assignment import RankAssignment
from pipespec.cluster.processes.forked_workers import WORKER
from pipespec.cluster.ranks.heartbeat import Heartbeat, why_ended
from pipespec.cluster.ranks.held_rank import LOOK_S, HeldRank, meeting_store, tp_group
from pipespec.cluster.ranks.rank_components import Weights
from pipespec.cluster.ranks.rank_loop import connect_links, join_rank
from pipespec.cluster.weights.plan import on_this_host, parts_of_rank
from pipespec.controller.lua_scripts import ScriptsLost
from pipespec.controller.membership import Membership
from pipespec.engine.checkpoint import tokenizer
from pipespec.engine.ggml import compute
from pipespec.engine.llguidance_backend import Grammars, require_installed
from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.engine.tensor_parallel.tp_member import follow_tp_leader, leading_tp_group
from pipespec.errors import ControllerError, RankFailed, StaleEpoch, Unreachable
from pipespec.system.device_copy import make_current
from pipespec.system.liveness import LOADING_S, MEETING_S, Waiting, progress
from pipespec.transport.tp_group import TPProcessGroup

# How much longer a worker waits for Redis than the recovery waits for the worker: a host that is
# cut off is replaced before its workers end.
LONGER_S = 15.0

log = logging.getLogger(__name__)


def run_worker(deployment: Deployment, where: ControllerAddress) -> None:
    """Run ranks until the head stops the cluster: the entrypoint of every worker. Raises
    Unreachable if Redis stays away, and PipespecError if something is wrong with this worker rather
    than with its neighbours."""
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    worker = os.environ[WORKER]
    host = deployment.host_of(worker)
    if host.local:
        where = replace(where, url=where.local_url)
    here = on_this_host(deployment, host)
    known = deployment
    weights = Weights()
    number = 0
    with Heartbeat(
        where.url,
        where.namespace,
        worker,
        patience_s=deployment.config.cluster.patience_s + LONGER_S,
        by_hand=host.by_hand,
    ) as heartbeat:
        while True:
            progress.begin(LOADING_S)
            epoch = heartbeat.next(number)
            number = epoch.number
            if not epoch.assignment:
                return
            assignment = RankAssignment.decode(epoch.assignment)
            place = assignment.place_of(worker)
            say_place("spare" if place is None else f"rank {place[0]}")
            log.info("epoch %d begins, for %d ranks", number, len(assignment.workers))
            if place is None:
                continue
            rank, member = place
            if assignment.joined != known.joined:
                known = deployment.knowing(assignment.joined)
            devices = list(map(known.device_of, assignment.workers))
            devices[rank] = known.device_of(worker)
            sizes = tuple(len(assignment.members(each)) for each in range(len(devices)))
            mine = replace(known, layers=assignment.layers, devices=tuple(devices), sizes=sizes)
            if not host.shares_caches:  # it may have got others than for the first epoch
                here = on_this_host(mine, host, parts_of_rank(mine, rank))
            mine = replace(mine, target=here.target, draft=here.draft)
            try:
                if mine.config.decode.form is not None and rank in (0, len(mine.layers)):
                    require_installed(f"{mine.config.decode.form} on this host")
                # The launcher has checked its own host.
                if not weights.loaded and not host.local:
                    memory.require_memory(mine, [rank], followers=False)
                of_epoch = replace(where, epoch=number)
                held = HeldRank(mine, of_epoch, rank, member, assignment, heartbeat)
                run_rank(held, weights)
                return
            except (RankFailed, StaleEpoch, Unreachable, ScriptsLost) as error:
                heartbeat.suspect(number, str(error))
                following = None
                with suppress(ControllerError):  # else the loop raises it
                    following = heartbeat.next(number)
                log.info("epoch %d ended: %s", number, why_ended(error, assignment, following))


def say_place(place: str) -> None:
    """Begin each line that is logged with the place of this worker in its epoch. The launcher is in
    the next epoch when it reads the last lines of one, so it cannot say that."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(logging.Formatter(f"{place}: %(message)s"))


def run_rank(held: HeldRank, weights: Weights) -> None:
    deployment, rank, member = held.deployment, held.rank, held.member
    if deployment.devices[rank] == "cpu":
        shares = held.core_shares()
        torch.set_num_threads(shares.stage if rank else shares.head)
        compute.use_threads(held.most_threads)
    make_current(deployment.devices[rank])
    with rank_grammars(deployment, rank, member) as grammars:
        sharing = held.num_models_on(deployment.devices[rank])
        model = weights.of(deployment, rank, sharing, member=member, size=len(held.members))
        if len(held.members) == 1:
            join_and_run(held, model, grammars)
            return
        assert model is not None
        with tp_group(held) as group, held.heartbeat.aborting(held.where.epoch, group.abort):
            progress.begin(LOADING_S)
            if member:
                follow_tp_leader(model, group)
                return
            with leading_tp_group(model, group) as num_slots:
                join_and_run(held, model, grammars, group, num_slots)


@contextmanager
def rank_grammars(deployment: Deployment, rank: int, member: int = 0) -> Iterator[Grammars | None]:
    """What compiles grammars on a rank that proposes or decides tokens, None on others. It reads
    the vocabulary, a second and 130 MB of a large one, for the first request that has a grammar, or
    beside the loading of weights if the settings have one."""
    if member or rank not in (0, len(deployment.layers)):
        yield None
        return
    target = deployment.target
    grammars = Grammars(lambda: tokenizer.load(target.path), target.vocab_size, target.eos)
    with closing(grammars):
        if deployment.config.decode.form is not None:
            grammars.warm()
        yield grammars


def join_and_run(
    held: HeldRank,
    model: ModelSlice | None,
    grammars: Grammars | None,
    group: TPProcessGroup | None = None,
    num_slots: int | None = None,
) -> None:
    """Join the controller and the neighbours, and run the loop of a rank. `group`: of the workers
    that compute it, aborted with the links. It may use `num_slots` KV slots of the model; None:
    all."""
    deployment, where = held.deployment, held.where
    links = held.assignment.links(deployment.config.transport.seal)
    with (
        meeting_store(held) as store,
        join_rank(deployment, where, held.rank, model, grammars, num_slots=num_slots) as (
            controller,
            run_loop,
        ),
    ):
        progress.begin(MEETING_S)
        with Membership(where.url, where.namespace) as shared, Waiting():
            count = deployment.num_ranks
            while len(shared.await_attached(where.epoch, count, LOOK_S)) < count:
                held.heartbeat.check(where.epoch)
        transport = connect_links(
            deployment,
            where,
            held.rank,
            store,
            links=links,
            returned=held.assignment.return_link(deployment.config.transport.seal),
        )
        aborted = (transport.abort, *([] if group is None else [group.abort]))
        aborting = held.heartbeat.aborting(where.epoch, *aborted, look=controller.look)
        with closing(transport), aborting:
            try:
                run_loop(transport)
            except RankFailed as error:
                # Before the links close, as the neighbours would report that first.
                held.heartbeat.suspect(where.epoch, str(error))
                raise
