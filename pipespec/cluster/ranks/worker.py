"""The process of a worker: it computes a rank in one epoch after another, and keeps its weights.
`run_worker` waits for an epoch, loads what its assignment needs and calls `run_rank`, which joins
the controller and the neighbours and runs the loop of the head or of a stage."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from pipespec.cluster.deployment import memory
from pipespec.cluster.deployment.deployment import ControllerAddress, Deployment
from pipespec.cluster.deployment.rank_assignment import RankAssignment
from pipespec.cluster.processes.forked_workers import WORKER
from pipespec.cluster.ranks import rank_components
from pipespec.cluster.ranks.heartbeat import Heartbeat, why_ended
from pipespec.cluster.ranks.held_rank import LOOK_S, HeldRank, meeting_store, tp_group
from pipespec.cluster.ranks.rank_components import Weights
from pipespec.cluster.weights.plan import on_this_host, parts_of_rank
from pipespec.controller.lua_scripts import ScriptsLost
from pipespec.controller.membership import Membership
from pipespec.controller.rank_controller import Controller
from pipespec.engine.checkpoint import tokenizer
from pipespec.engine.ggml import compute
from pipespec.engine.llguidance_backend import Grammars, require_installed
from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.engine.slice.runner import SliceRunner
from pipespec.engine.tensor_parallel.tp_member import follow_tp_leader, leading_tp_group
from pipespec.errors import ControllerError, RankFailed, StaleEpoch, Unreachable
from pipespec.head.decoding_modes import LearntSteps
from pipespec.head.head_loop import HeadLoop, HeadSettings
from pipespec.head.in_flight import MOST_IN_FLIGHT
from pipespec.head.proposers.calibration import (
    CalibratedProposer,
    calibrations_of,
    restore_calibrations,
)
from pipespec.head.proposers.cascade import CascadeProposer
from pipespec.head.proposers.draft_head import DraftHeadProposer
from pipespec.head.scheduler import Scheduler
from pipespec.stage.profile_run import profile_run
from pipespec.stage.stage_loop import StageLoop, StageSettings
from pipespec.system.cores import Spinner, make_spinner
from pipespec.system.device_copy import make_current
from pipespec.system.fair_thread import FairThread
from pipespec.system.liveness import LATE_S, LOADING_S, MEETING_S, Waiting, progress
from pipespec.system.result_cache import load_cached, store_cached
from pipespec.system.versions import own_version
from pipespec.timing.batch_times import RowTimes
from pipespec.timing.trace import Timeline
from pipespec.transport.distributed import DistributedTransport
from pipespec.transport.tp_group import TPProcessGroup
from pipespec.transport.transport import LinkKind, Transport
from pipespec.transport.transport_settings import NCCL

# How much longer a worker waits for Redis than the recovery waits for the worker: a host that is
# cut off is replaced before its workers end.
LONGER_S = 15.0
# The folders of what was learnt of steps (`LearntSteps`), and of how often the proposers are right,
# in the user's cache folder.
STEP_TIMES, CALIBRATIONS = "step_times", "calibrations"

log = logging.getLogger(__name__)


def run_worker(deployment: Deployment, where: ControllerAddress) -> None:
    """Run ranks until the head stops the cluster: the entrypoint of every worker. Raises
    Unreachable if Redis stays away, and PipespecError if something is wrong with this worker rather
    than with its neighbours."""
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    worker = os.environ[WORKER]
    host = deployment.host_of(worker)
    here = on_this_host(deployment, host)
    known = deployment
    weights, mid_weights = Weights(), Weights()
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
            mine = replace(mine, target=here.target, draft=here.draft, mid=here.mid)
            try:
                if mine.config.decode.form is not None and rank in (0, len(mine.layers)):
                    require_installed(f"{mine.config.decode.form} on this host")
                # The launcher has checked its own host.
                if not weights.loaded and not host.local:
                    memory.require_memory(mine, [rank], followers=False)
                of_epoch = replace(where, epoch=number)
                held = HeldRank(mine, of_epoch, rank, member, assignment, heartbeat)
                run_rank(held, weights, mid_weights)
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


def run_rank(held: HeldRank, weights: Weights, mid_weights: Weights) -> None:
    deployment, rank, member = held.deployment, held.rank, held.member
    if deployment.devices[rank] == "cpu":
        shares = held.core_shares()
        torch.set_num_threads(shares.stage if rank else shares.head)
        compute.use_threads(held.most_threads)
    make_current(deployment.devices[rank])
    if rank:
        mid_weights.drop()
    with rank_grammars(deployment, rank, member) as grammars:
        sharing = held.num_models_on(deployment.devices[rank])
        model = weights.of(deployment, rank, sharing, member=member, size=len(held.members))
        mid = None
        if rank == 0 and member == 0 and deployment.mid is not None:
            sharing = held.num_models_on(deployment.devices[0])
            mid = mid_weights.of(deployment, rank, sharing, mid=True)
        if len(held.members) == 1:
            join_and_run(held, model, mid, grammars)
            return
        assert model is not None
        with tp_group(held) as group, held.heartbeat.aborting(held.where.epoch, group.abort):
            progress.begin(LOADING_S)
            if member:
                follow_tp_leader(model, group)
                return
            with leading_tp_group(model, group) as num_slots:
                join_and_run(held, model, mid, grammars, group, num_slots)


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
    mid: ModelSlice | None,
    grammars: Grammars | None,
    group: TPProcessGroup | None = None,
    num_slots: int | None = None,
) -> None:
    """Join the controller and the neighbours, and run the loop of a rank. `group`: of the workers
    that compute it, aborted with the links. It may use `num_slots` KV slots of the model; None:
    all."""
    deployment, where = held.deployment, held.where
    links = held.assignment.links(deployment.config.transport.seal)
    hosts = [worker.rpartition("/")[0] for worker in held.assignment.everyone]
    spinner = make_spinner(deployment.config.transport.wait, hosts.count(hosts[held.rank]))
    wanted = deployment.config.transport.backend
    with (
        meeting_store(held) as store,
        join_rank(
            deployment,
            where,
            held.rank,
            model,
            mid,
            grammars,
            spinner=spinner,
            num_slots=num_slots,
        ) as run_loop,
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
            # NCCL is for one host, and workers of others may have joined since the cluster started.
            nccl=wanted == NCCL and all(link.local for link in links[1:]),
            spinner=spinner,
            returned=held.assignment.return_link(deployment.config.transport.seal),
        )
        aborted = (transport.abort, *([] if group is None else [group.abort]))
        with closing(transport), held.heartbeat.aborting(where.epoch, *aborted):
            try:
                run_loop(transport)
            except RankFailed as error:
                # Before the links close, as the neighbours would report that first.
                held.heartbeat.suspect(where.epoch, str(error))
                raise


def connect_links(
    deployment: Deployment,
    where: ControllerAddress,
    rank: int,
    store: Store,
    *,
    spinner: Spinner | None = None,
    returned: LinkKind = LinkKind(),  # noqa: B008 - it is frozen
    **how: Any,
) -> DistributedTransport:
    """The links of a rank to its neighbours, as `DistributedTransport` makes them, and the one from
    the last rank to the head, `returned` of its kind, where a draft head needs one."""
    scheduling, last = deployment.config.scheduler, len(deployment.layers)
    common: dict[str, Any] = {
        "epoch": where.epoch,
        "secret": where.secret,
        "max_rows": deployment.config.max_rows,
        "dtype": getattr(torch, deployment.dtype),
        "spinner": spinner,
    }
    taps = () if deployment.head is None else deployment.head.taps
    transport = DistributedTransport(
        deployment.devices,
        store=store,
        rank=rank,
        max_finished=scheduling.max_num_seqs,
        max_retained=scheduling.max_num_seqs + deployment.max_retained,
        max_kept=deployment.kept_states,
        max_columns=deployment.target.hidden_size * (1 + len(taps)),
        window=MOST_IN_FLIGHT,
        **common,
        **how,
    )
    if deployment.features and rank in (0, last):
        try:
            transport.returns = DistributedTransport(
                [deployment.devices[last], deployment.devices[0]],
                store=PrefixStore("returns", store),
                rank=1 if rank == 0 else 0,
                links=[returned],
                max_columns=deployment.features,
                names=(last, 0),
                **common,
            )
        except BaseException:
            transport.close()
            raise
    return transport


@contextmanager
def join_rank(
    deployment: Deployment,
    where: ControllerAddress,
    rank: int,
    model: ModelSlice | None,
    mid: ModelSlice | None,
    grammars: Grammars | None,
    *,
    spinner: Spinner | None = None,
    num_slots: int | None = None,
) -> Iterator[Callable[[Transport], None]]:
    """Join the controller as a rank whose models are loaded; leave it with the block. Yields what
    runs the loop of the head or of a stage over its links, until the head says stop. The rank may
    use `num_slots` KV slots of the model; None: all."""
    config, num_stages = deployment.config, len(deployment.layers)
    runner = tokens = None
    if model is not None:
        runner = SliceRunner(model, num_slots or model.num_slots)
        tokens = memory.kv_tokens(deployment, rank, runner.slots.num_slots)
    times = RowTimes()
    if rank and (most := rank_components.num_profiled_rows(config)):
        assert runner is not None
        times = profile_run(
            runner,
            most,
            lambda rows: config.emulate.min_stage_ms(rank, 0, rows),
            last=rank == num_stages,
        )
    # The launcher and the other ranks learn from this that the models are loaded.
    with Controller(
        where.url,
        namespace=where.namespace,
        epoch=where.epoch,
        rank=rank,
        kv_tokens=tokens,
        row_times=times.measured(),
        spinner=spinner,
        computing=None if model is None else {**model.describe(), "version": own_version()},
    ) as controller:

        def run_loop(transport: Transport) -> None:
            # A verdict travels from the last stage to the head's machine, and from there to the
            # rank's.
            delay_ms = config.emulate_link.latency_ms * config.emulate.scale * (2 if rank else 1)
            transport = config.emulate_link.delayed(transport, config.emulate.scale)
            if not rank:
                assert grammars is not None
                _run_head(deployment, runner, mid, controller, transport, delay_ms, grammars)
                return
            assert runner is not None
            attention = runner.model.attention
            begin, masks = (grammars.begin, grammars.masks) if grammars else (None, FairThread())
            settings = StageSettings(
                num_stages, delay_ms, config.emulate, attention, begin, masks, compute.share_cores
            )
            timeline = Timeline(record=config.trace is not None)
            returns = transport.returns
            stage = StageLoop(runner, transport, controller, settings, timeline, times, returns)
            with progress.part(LATE_S):
                stage.run_until_stop()

        yield run_loop


def _run_head(
    deployment: Deployment,
    runner: SliceRunner | None,
    mid: ModelSlice | None,
    controller: Controller,
    transport: Transport,
    delay_ms: float,
    grammars: Grammars,
) -> None:
    config = deployment.config
    kv_tokens = controller.kv_tokens(deployment.num_ranks - 1)
    proposer = rank_components.make_proposer(deployment, runner, mid)
    scorer = proposer if isinstance(proposer, CascadeProposer) else None
    scheduling = rank_components.scheduler_config(deployment, kv_tokens)
    scheduler = Scheduler(scheduling, scorer)
    key = rank_components.step_times_key(deployment)
    of_proposer = rank_components.calibrations_key(deployment)
    calibrations = [*calibrations_of(proposer)]

    def keep_learnt(steps: dict[str, Any]) -> None:
        store_cached(STEP_TIMES, key, steps)
        store_cached(CALIBRATIONS, of_proposer, [each.stored() for each in calibrations])

    receive_features = None
    if (returns := transport.returns) is not None:
        assert isinstance(proposer, CalibratedProposer)
        assert isinstance(proposer.proposer, DraftHeadProposer)
        receive_features = partial(_receive_features, returns, proposer.proposer)
    settings = HeadSettings(
        len(deployment.layers),
        rank_components.stop_check(deployment),
        delay_ms,
        config.emulate,
        grammars.begin,
        grammars.masks,
        keep_learnt=keep_learnt,
        receive_features=receive_features,
    )
    if rank_components.measures_steps(config):
        of = scheduling.num_stages, scheduling.overlap, scheduling.rounds
        scheduler.learn(LearntSteps(*of, load_cached(STEP_TIMES, key)))
        restore_calibrations(calibrations, load_cached(CALIBRATIONS, of_proposer))
    timeline = Timeline(record=config.trace is not None)
    head = HeadLoop(scheduler, proposer, transport, controller, settings, timeline)
    with nullcontext() if scorer is None else closing(scorer), progress.part(LATE_S):
        head.run_until_done()


def _receive_features(returns: Transport, head: DraftHeadProposer) -> bool:
    """Take what the last stage returns with a verdict; whether it is the last."""
    returned = returns.recv()
    head.add_features(returned)
    return returned.stop
