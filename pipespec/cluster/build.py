"""From a deployment to the running objects of a rank: only here parts are wired together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from pipespec.cluster import memory
from pipespec.cluster.deployment import ControllerAddress, Deployment, quantization_of
from pipespec.config.schema import Config
from pipespec.controller.client import Controller
from pipespec.core import Request
from pipespec.engine import tokenizer
from pipespec.engine.attention.choose import AUTO, SDPA
from pipespec.engine.checkpoint import CheckpointInfo
from pipespec.engine.following import CallGroup, Leader, agree, follow
from pipespec.engine.grammar import Grammars
from pipespec.engine.model import ModelSlice
from pipespec.engine.runner import SliceRunner
from pipespec.engine.tensor_parallel import Seat
from pipespec.engine.tuning import tune
from pipespec.head.loop import HeadLoop, HeadSettings
from pipespec.head.scheduler import Scheduler
from pipespec.head.sequence import StopCheck
from pipespec.head.source.beside import Beside
from pipespec.head.source.draft_model import DraftModelSource
from pipespec.head.source.parallel import Parallel
from pipespec.head.source.protocol import Cascading, TokenSource
from pipespec.head.work import SchedulerConfig
from pipespec.planning.placement import guess_slots
from pipespec.row_times import RowTimes
from pipespec.stage.loop import StageLoop, StageSettings
from pipespec.stage.profile import profile
from pipespec.text import StopChecker
from pipespec.trace import Timeline
from pipespec.transport.paced import PacedTransport
from pipespec.transport.protocol import Transport

log = logging.getLogger(__name__)


def load_model(
    deployment: Deployment,
    rank: int,
    sharing: int = 1,
    *,
    mid: bool = False,
    seat: Seat | None = None,
) -> ModelSlice | None:
    """The rank's part of the target, or at rank 0 the whole draft, or (`mid`) the whole mid-size
    model beside it, if there is one.

    `sharing` models are on its device, this one included: each takes its part of what is free.
    `seat`: which part of the rank's layers, where several workers compute them.
    """
    info = memory.model_of(deployment, rank, mid=mid)
    if info is None:
        return None
    device = memory.device_of(deployment, rank, mid=mid)
    slots = memory.kv_slots(deployment, rank, memory.share_bytes(device, sharing), mid=mid)
    name = quantization_of(deployment.name_of(info))
    info.require_quantizer(f"model.{name}", getattr(deployment.config.model, name))
    settings = deployment.config.model
    model = ModelSlice.load(
        info.path,
        memory.layers_of(deployment, info, rank),
        dtype=getattr(torch, deployment.dtype_of(info)),
        quantization=deployment.held(info),
        device=device,
        num_slots=slots,
        attention=settings.attention,
        group=seat,
    )
    if settings.compile:
        model.compile()
    if model.device.type == "cuda" and settings.attention == AUTO:
        tune(model, settings.graph_rows)
    elif model.device.type == "cuda" and model.attention != SDPA:
        model.record(settings.graph_rows)
    for sentence in model.refused:
        log.warning("rank %d: %s", rank, sentence)
    return model


def serve(
    deployment: Deployment,
    where: ControllerAddress,
    rank: int,
    model: ModelSlice | None,
    mid: ModelSlice | None,
    connect: Callable[[], Transport],
    guard: Callable[[Callable[[], None]], AbstractContextManager[None]] = lambda _: nullcontext(),
    *,
    spins: bool = False,
    num_slots: int | None = None,
) -> None:
    """Run the loop of a rank until the head says stop.

    `model` and, at the head of a cascade, `mid` are what was loaded. `connect` joins the rank to
    its neighbours; `guard` is what may end the links meanwhile; `spins`: see
    `pipespec.system.waiting`. `num_slots` of the model's KV slots are used, None: all.
    """
    config = deployment.config
    # Word from the last stage goes to the head's machine, and from there to the rank's.
    delay_ms = config.link.latency_ms * config.pace.scale * (2 if rank else 1)
    timeline = Timeline(record=config.trace is not None)
    runner = tokens = None
    if model is not None:
        runner = SliceRunner(model, num_slots or model.num_slots)
        tokens = memory.kv_tokens(deployment, rank, runner.slots.num_slots)
    times = RowTimes()
    # Who decides tokens, and who guesses them, know grammars.
    grammars = None
    if rank in (0, deployment.layout.last):
        target = deployment.target
        grammars = Grammars(lambda: tokenizer.load(target.path), target.vocab_size, target.eos)
        grammars.warm()
    compile_grammar = None if grammars is None else grammars.begin
    if rank and (most := profiled_rows(config)):
        assert runner is not None
        last = rank == deployment.layout.last
        times = profile(runner, most, lambda rows: config.pace.of_stage(rank, 0, rows), last=last)
    # Joining the controller tells whoever waits that this rank has loaded its model.
    with Controller(
        where.url,
        namespace=where.namespace,
        epoch=where.epoch,
        rank=rank,
        kv_tokens=tokens,
        row_times=times.measured(),
        spins=spins,
        computing=None if model is None else model.outcome(),
    ) as controller:
        link = inner = connect()
        beside: Beside | None = None
        if config.link:
            link = PacedTransport(inner, config.link, config.pace.scale)
        try:
            with guard(inner.abort):
                if rank:
                    assert runner is not None
                    settings = StageSettings(
                        deployment.layout,
                        config.pace,
                        delay_ms,
                        runner.model.attention,
                        compile_grammar,
                    )
                    StageLoop(runner, link, controller, settings, timeline, times).run()
                else:
                    tokens = controller.kv_tokens(deployment.num_ranks - 1)
                    beside = make_beside(deployment, mid)
                    HeadLoop(
                        Scheduler(scheduler_config(deployment, tokens)),
                        make_source(deployment, runner),
                        link,
                        controller,
                        HeadSettings(
                            deployment.layout,
                            stop_check(deployment),
                            config.pace,
                            delay_ms,
                            compile_grammar,
                        ),
                        timeline,
                        beside,
                    ).run()
        finally:
            if beside is not None:
                beside.close()
            link.close()
            if grammars is not None:
                grammars.close()


@contextmanager
def leading(model: ModelSlice, group: CallGroup) -> Iterator[int]:
    """Have the other members of a stage compute what its first one does within the block; how many
    KV slots all of them have."""
    assert isinstance(model.group, Seat)
    with model.group.meet(group):
        leader = Leader(group)
        slots = agree(model, group)
        model.lead(leader)
        try:
            yield slots
            leader.end()
        finally:
            model.lead(None)


def serve_beside(model: ModelSlice, group: CallGroup) -> None:
    """Compute what the first member of a stage does, until it says stop."""
    assert isinstance(model.group, Seat)
    with model.group.meet(group):
        agree(model, group)
        follow(model, group)


def profiled_rows(config: Config) -> int:
    """Up to how many rows a stage measures its batches before it has any: as many as any batch
    has where prompts may be read beside running answers, so that these need not be slowed down to
    find out; else as many as are guessed, if a policy asks what they cost."""
    if config.scheduler.max_num_seqs > 1:
        return config.max_rows
    asked = any(each.row_cost is None for each in config.policies)
    return config.fed_rows if asked else 0


def scheduler_config(deployment: Deployment, kv_tokens: int) -> SchedulerConfig:
    """What the head decides by; every rank has KV slots for `kv_tokens` tokens of text."""
    config = deployment.config
    guesses = guess_slots(config, num_ranks=deployment.num_ranks, head=False)
    return SchedulerConfig(
        policy=config.feed,
        num_steps=deployment.layout.num_steps,
        rounds=config.source.rounds,
        prefill_chunk=config.decode.prefill_chunk,
        context_limit=deployment.context,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_rows=config.max_rows,
        num_slots=kv_tokens + guesses,
        mid_rows=config.mid_rows,
        max_retained=config.scheduler.max_retained,
        ways=config.ways,
    )


def make_source(deployment: Deployment, runner: SliceRunner | None) -> TokenSource:
    """The source of guesses; `runner` holds the draft model, where there is one."""
    draft = None
    if deployment.draft is not None:
        assert runner is not None
        draft = draft_source(deployment, deployment.draft, runner, deployment.parallel)
    target = deployment.target

    def encode(text: str) -> list[int]:
        return tokenizer.load(target.path).encode(text, add_special_tokens=False)

    return deployment.config.source.make(draft, target.vocab_size, encode)


def draft_source(
    deployment: Deployment,
    info: CheckpointInfo,
    runner: SliceRunner,
    parallel: Parallel | None = None,
) -> DraftModelSource:
    """A whole model that guesses."""
    config = deployment.config
    return DraftModelSource(
        runner,
        config.decode.prefill_chunk,
        min(deployment.target.vocab_size, info.vocab_size),
        foresight=config.source.foresight,
        max_retained=config.scheduler.max_retained,
        parallel=parallel,
    )


def make_beside(deployment: Deployment, model: ModelSlice | None) -> Beside | None:
    """The mid-size model of a cascade in a thread beside the head; `model`: the real one, where
    there is one."""
    config = deployment.config
    if not isinstance(config.source, Cascading) or not config.mid_rows:
        return None
    mid = None
    if deployment.mid is not None:
        assert model is not None
        runner = SliceRunner(model, model.num_slots)
        mid = draft_source(deployment, deployment.mid, runner)
    source = config.source.make_mid(mid, deployment.target.vocab_size)
    return Beside(source, config.pace.of_mid)


def stop_check(deployment: Deployment) -> Callable[[Request], StopCheck]:
    """What watches the text of a request for its stop strings."""

    def never(_: int) -> bool:
        return False

    def make(request: Request) -> StopCheck:
        if not request.stop:
            return never
        return StopChecker(
            tokenizer.load(deployment.target.path),
            request.stop,
            request.prompt,
            request.sampling.min_tokens,
        )

    return make
