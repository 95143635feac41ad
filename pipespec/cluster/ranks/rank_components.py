"""Makes the components of a rank from a deployment: models, proposer, settings of its loop."""

from __future__ import annotations

import gc
import logging
import math
import os
import platform
from collections.abc import Callable
from typing import Any

import torch

from pipespec.cluster.deployment import memory
from pipespec.cluster.deployment.deployment import Deployment, quantization_of
from pipespec.config.schema import STATE_INTERVAL, Config
from pipespec.core import Request
from pipespec.engine.attention.select import AUTO, SDPA
from pipespec.engine.checkpoint import tokenizer
from pipespec.engine.checkpoint.partial_checkpoint import fetch_parts
from pipespec.engine.formats.slice_tensors import parts_of
from pipespec.engine.inspection.inspection import CheckpointInfo
from pipespec.engine.precision import KV_PLAIN
from pipespec.engine.slice import speedups
from pipespec.engine.slice.head_slice import HeadSlice, load_head
from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.engine.slice.runner import SliceRunner
from pipespec.engine.tensor_parallel.tp_member import TPMember
from pipespec.head.kept_states import KeptStates
from pipespec.head.proposer import Proposer
from pipespec.head.proposers.draft_head import DraftHeadProposer
from pipespec.head.proposers.draft_model import DraftModelProposer
from pipespec.head.proposers.parallel import ParallelDraft
from pipespec.head.proposers.token_map import token_map
from pipespec.head.scheduler_types import SchedulerConfig
from pipespec.head.sequence import StopCheck
from pipespec.placement.measurements import draft_slots
from pipespec.system import heap
from pipespec.system.device_copy import on_device
from pipespec.system.versions import package_version
from pipespec.text import FinalText

log = logging.getLogger(__name__)


def load_model(
    deployment: Deployment, rank: int, sharing: int = 1, *, part: TPMember | None = None
) -> ModelSlice | None:
    """Load a stage's part of the target, or at rank 0 the draft model. None: it has no model.
    `sharing` models, this one included, share the device's free memory. `part`: what to load, of a
    rank that several workers compute."""
    info = memory.model_of(deployment, rank)
    if info is None:
        return None
    device = deployment.devices[rank]
    slots = memory.kv_slots(deployment, rank, memory.share_bytes(device, sharing))
    name = quantization_of(deployment.name_of(info))
    held = deployment.weight_format(info)
    info.require_quantizer(f"model.{name}", getattr(deployment.config.model, name))
    settings = deployment.config.model
    layers = memory.layers_of(deployment, info, rank)
    how: dict[str, Any] = {
        "dtype": getattr(torch, deployment.dtype_of(info)),
        "device": device,
        "num_slots": slots,
        "attention": settings.attention,
        "kv_dtype": settings.kv_dtype,
        "context": deployment.longest,
    }
    # In a later epoch, and on a host that was started by hand, some parts may be lacking.
    if info.head is not None:
        fetch_parts(info.path, info.head.parts)
        fetch_parts(deployment.target.path, info.head.target_parts)
        model: ModelSlice = load_head(info.path, info.head, deployment.target.path, **how)
    else:
        fetch_parts(info.path, parts_of(layers, info.num_layers, tied=info.tied))
        how |= {"quantization": held, "parallel": part}
        if deployment.head is not None:
            how["taps"] = deployment.head.taps
        model = ModelSlice.load(info.path, layers, **how)
    for each in (*model.earlier, model):
        if settings.compile:
            speedups.compile_slice(each)
        else:
            # Weights that count as used are freed as they are packed.
            mapped = memory.weight_bytes(deployment, info, rank) == 0
            room = memory.share_bytes(device, sharing)
            room -= memory.recurrent_bytes(deployment, info, rank)
            speedups.use_fastest_products(each, room if mapped else math.inf)
        any_attention = settings.attention == AUTO and settings.kv_dtype == KV_PLAIN
        if each.device.type == "cuda" and any_attention:
            speedups.autotune(each, settings.graph_rows)
        elif each.device.type == "cuda" and each.attention != SDPA:
            speedups.capture_graphs(each, settings.graph_rows)
    if model.device.type == "cuda":
        speedups.capture_head(model, settings.graph_rows)
    for sentence in dict.fromkeys(why for each in (*model.earlier, model) for why in each.refused):
        log.warning(sentence)
    heap.release()  # what loading and self-tests have freed
    return model


class Weights:
    """A model or a part of one that this worker has loaded, kept from one epoch to the next."""

    def __init__(self) -> None:
        self._loaded: tuple[object, ...] | None = None
        self._model: ModelSlice | None = None

    @property
    def loaded(self) -> bool:
        """Whether a model was ever loaded. The device may then keep memory that is free."""
        return self._loaded is not None

    def of(
        self, deployment: Deployment, rank: int, sharing: int, *, member: int = 0, size: int = 1
    ) -> ModelSlice | None:
        """The model of a rank, loaded unless it is the one in memory: the part `member` of a rank
        that `size` workers compute. `sharing`: models on its device, this one included."""
        layers = deployment.layers[rank - 1] if rank else None
        device = deployment.devices[rank]
        info = memory.model_of(deployment, rank)
        held = None if info is None else deployment.weight_format(info)
        taps = None if deployment.head is None else deployment.head.taps
        key = (rank > 0, layers, device, deployment.dtype, held, member, size, taps)
        # More ranks have more draft tokens in flight, for which the pool may be too small.
        least = 0 if info is None else memory.least_slots(deployment, rank).total()
        if key != self._loaded or (self._model is not None and self._model.num_slots < least):
            self.drop()  # first: the device may not hold both
            part = TPMember(member, size) if size > 1 else None
            with on_device(device):
                self._model = load_model(deployment, rank, sharing, part=part)
            self._loaded = key
        return self._model

    def drop(self) -> None:
        if self._model is not None:
            self._model = self._loaded = None
            if torch.cuda.is_initialized():  # before free memory is measured
                gc.collect()  # graphs and compiled slices refer to the model, which has them
                torch.cuda.empty_cache()


def num_profiled_rows(config: Config) -> int:
    """The largest number of rows for which a stage profiles its batches before the first request.
    It is that of the largest batch if requests run concurrently, so that prefill need not slow down
    running requests to measure it; else that of draft tokens, if a policy needs their cost."""
    if config.scheduler.max_num_seqs > 1:
        return config.max_rows
    needed = any(each.row_cost is None for each in config.policies)
    return config.fed_rows if needed else 0


def scheduler_config(deployment: Deployment, kv_tokens: int) -> SchedulerConfig:
    """The settings of the scheduler. Every rank has KV slots for `kv_tokens` tokens of text."""
    config = deployment.config
    overlap = {"yes": True, "no": False, "auto": None}[config.proposer.overlap]
    one_batch = config.proposer.needs_head
    if one_batch:
        overlap = False
    elif overlap is None and not measures_steps(config):
        overlap = True  # emulated hosts have a device for each rank
    for_drafts = draft_slots(config, num_ranks=deployment.num_ranks, head=False)
    return SchedulerConfig(
        policy=config.policy,
        num_stages=1 if one_batch else len(deployment.layers),
        rounds=config.proposer.rounds,
        prefill_chunk=config.decode.prefill_chunk,
        context_limit=deployment.context,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_rows=config.max_rows,
        num_slots=kv_tokens + for_drafts,
        max_retained=deployment.max_retained,
        kept_states=None if deployment.target.recurrent is None else deployment.kept_states,
        state_interval=STATE_INTERVAL,
        overlap=overlap,
        one_batch=one_batch,
        request_policies=config.request_policies,
    )


def measures_steps(config: Config) -> bool:
    """Whether what steps take is learnt as they run. Emulated times are stated."""
    return not config.emulate and any(each.refills for each in config.policies)


def calibrations_key(deployment: Deployment) -> list[Any]:
    """What it depends on how often the proposers are right, on this machine."""
    return [
        *(package_version("pipespec"), platform.node(), str(deployment.dtype)),
        [[name, str(info.path), info.storage.quantization] for name, info in deployment.models],
        str(deployment.config.proposer),
    ]


def step_times_key(deployment: Deployment) -> list[Any]:
    """What the times of steps depend on. Policies, prompts and lengths are not part of it."""
    config = deployment.config
    processors = platform.machine(), platform.processor(), os.cpu_count()
    return [
        *calibrations_key(deployment),
        *(torch.__version__, processors, os.environ.get("OMP_NUM_THREADS")),
        [list(map(str, deployment.layers)), deployment.devices, deployment.sizes],
        [host.name for host in deployment.hosts],
        *map(str, (config.cluster.threads, config.transport, config.emulate_link)),
    ]


def make_draft(deployment: Deployment, runner: SliceRunner | None) -> DraftModelProposer | None:
    """The draft model or draft head in `runner`, if there is one."""
    if deployment.draft is None:
        return None
    assert runner is not None
    if deployment.head is None:
        return draft_proposer(deployment, deployment.draft, runner, deployment.parallel)
    assert isinstance(runner.model, HeadSlice)
    chunk, retained = deployment.config.decode.prefill_chunk, deployment.max_retained
    vocabulary = deployment.target.vocab_size
    return DraftHeadProposer(runner, runner.model, chunk, vocabulary, retained)


def make_proposer(deployment: Deployment, runner: SliceRunner | None) -> Proposer:
    """The proposer of the draft in `runner`."""
    draft, target = make_draft(deployment, runner), deployment.target

    def encode(text: str) -> list[int]:
        return tokenizer.load(target.path).encode(text, add_special_tokens=False)

    return deployment.config.proposer.make(draft, target.vocab_size, encode)


def draft_proposer(
    deployment: Deployment,
    info: CheckpointInfo,
    runner: SliceRunner,
    parallel: ParallelDraft | None = None,
) -> DraftModelProposer:
    config, states = deployment.config, None
    if info.recurrent is not None:
        budget = deployment.kept_states_of(info, deployment.sizes[0])
        states = KeptStates(budget, STATE_INTERVAL)
    return DraftModelProposer(
        runner,
        config.decode.prefill_chunk,
        min(deployment.target.vocab_size, info.vocab_size),
        max_retained=config.scheduler.max_retained,
        states=states,
        parallel=parallel,
        tokens=token_map(deployment.target, info),
    )


def stop_check(deployment: Deployment) -> Callable[[Request], StopCheck]:
    def make(request: Request) -> StopCheck:
        if not request.stop:
            return lambda token: False
        found = tokenizer.load(deployment.target.path)
        text = FinalText(found, request.prompt, request.stop, request.sampling.min_tokens)
        return text.completes

    return make
