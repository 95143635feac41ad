"""What a rank does in one epoch: its links, and the loop of the head or of a stage over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from pipespec.cluster.deployment import memory
from pipespec.cluster.deployment.deployment import ControllerAddress, Deployment
from pipespec.cluster.ranks import rank_components
from pipespec.controller.rank_controller import Controller
from pipespec.engine.ggml import compute
from pipespec.engine.llguidance_backend import Grammars
from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.engine.slice.runner import SliceRunner
from pipespec.head.decoding_modes import LearntSteps
from pipespec.head.head_loop import HeadLoop, HeadSettings
from pipespec.head.in_flight import MOST_IN_FLIGHT
from pipespec.head.proposers.calibration import (
    CalibratedProposer,
    calibrations_of,
    restore_calibrations,
)
from pipespec.head.proposers.draft_head import DraftHeadProposer
from pipespec.head.scheduler import Scheduler
from pipespec.stage.profile_run import profile_run
from pipespec.stage.stage_loop import StageLoop, StageSettings
from pipespec.system.fair_thread import FairThread
from pipespec.system.liveness import LATE_S, progress
from pipespec.system.result_cache import load_cached, store_cached
from pipespec.system.versions import own_version
from pipespec.timing.batch_times import RowTimes
from pipespec.timing.trace import Timeline
from pipespec.transport.distributed import DistributedTransport
from pipespec.transport.transport import LinkKind, Transport

# The folders of what was learnt of steps (`LearntSteps`), and of how often the proposers are right,
# in the user's cache folder.
STEP_TIMES, CALIBRATIONS = "step_times", "calibrations"


def connect_links(
    deployment: Deployment,
    where: ControllerAddress,
    rank: int,
    store: Store,
    *,
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
    grammars: Grammars | None,
    *,
    num_slots: int | None = None,
) -> Iterator[tuple[Controller, Callable[[Transport], None]]]:
    """Join the controller as a rank whose models are loaded; leave it with the block. Yields it,
    and what runs the loop of the head or of a stage over its links, until the head says stop. The
    rank may use `num_slots` KV slots of the model; None: all."""
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
        computing=None if model is None else {**model.describe(), "version": own_version()},
    ) as controller:

        def run_loop(transport: Transport) -> None:
            # A verdict travels from the last stage to the head's machine, and from there to the
            # rank's.
            delay_ms = config.emulate_link.latency_ms * config.emulate.scale * (2 if rank else 1)
            transport = config.emulate_link.delayed(transport, config.emulate.scale)
            if not rank:
                assert grammars is not None
                _run_head(deployment, runner, controller, transport, delay_ms, grammars)
                return
            assert runner is not None
            attention = runner.model.attention
            begin, masks = (grammars.begin, grammars.masks) if grammars else (None, FairThread())
            settings = StageSettings(
                num_stages, delay_ms, config.emulate, attention, begin, masks, compute.share_cores
            )
            timeline = Timeline(record=config.trace is not None)
            stage = StageLoop(runner, transport, controller, settings, timeline, times)
            with progress.part(LATE_S):
                stage.run_until_stop()

        yield controller, run_loop


def _run_head(
    deployment: Deployment,
    runner: SliceRunner | None,
    controller: Controller,
    transport: Transport,
    delay_ms: float,
    grammars: Grammars,
) -> None:
    config = deployment.config
    kv_tokens = controller.kv_tokens(deployment.num_ranks - 1)
    proposer = rank_components.make_proposer(deployment, runner)
    scheduling = rank_components.scheduler_config(deployment, kv_tokens)
    scheduler = Scheduler(scheduling)
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
        long_links=delay_ms > 0 or len(deployment.hosts) > 1,
    )
    if rank_components.measures_steps(config):
        of = scheduling.num_stages, scheduling.overlap, scheduling.rounds
        scheduler.learn(LearntSteps(*of, load_cached(STEP_TIMES, key)))
        restore_calibrations(calibrations, load_cached(CALIBRATIONS, of_proposer))
    timeline = Timeline(record=config.trace is not None)
    head = HeadLoop(scheduler, proposer, transport, controller, settings, timeline)
    with progress.part(LATE_S):
        head.run_until_done()


def _receive_features(returns: Transport, head: DraftHeadProposer) -> bool:
    """Take what the last stage returns with a verdict; whether it is the last."""
    returned = returns.recv()
    head.add_features(returned)
    return returned.stop
