"""Which layers which GPU would hold, and how fast that would be, from a model's config alone.

Times are those of reading weights and of arithmetic (`hardware`), so they are ASSUMED, and so is
the accuracy of the draft. What a plan is for is the difference between clusters, and what does not
fit; `pipespec plan --profile` takes measured times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipespec.errors import ConfigError
from pipespec.instruments.emulation.link import EmulatedLink
from pipespec.instruments.emulation.machine import TimeCurve
from pipespec.instruments.plan.hardware import GPU
from pipespec.instruments.plan.model_shape import ITEM, WEIGHT_BYTES, ModelShape
from pipespec.instruments.plan.pipeline_times import Machine

# Rows for which times are computed; those between are interpolated.
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
# Layers are divided so that stages take as long as each other with so many rows.
USUAL_ROWS = 16
# ASSUMED: nodes of a draft round, what a round takes on the host, and a layer for its launches.
DRAFT_NODES, ROUND_MS, LAUNCH_MS = 16, 0.5, 0.02
GIB = 2**30


@dataclass(frozen=True)
class PlannedStage:
    """A GPU with layers of the target. Bytes of weights, of KV of the whole context, and of running
    states with their tree nodes."""

    gpu: GPU
    layers: int
    weight_bytes: float
    kv_bytes: float
    state_bytes: float
    times: TimeCurve


@dataclass(frozen=True)
class PlannedCluster:
    """A target on GPUs, in the order of its layers, and the GPU of the draft."""

    stages: tuple[PlannedStage, ...]
    draft: GPU | None
    machine: Machine


def clusters(
    target: ModelShape,
    draft: ModelShape | None,
    gpus: Sequence[GPU],
    link: EmulatedLink | None,
    *,
    weights: str,
    context: int,
    nodes: int = 0,
) -> list[PlannedCluster]:
    """The target on all GPUs but that of the draft, one for each kind of GPU that could be that.

    Args:
        link: between the GPUs; None: messages take no time.
        weights: of the target's layers, one of WEIGHT_BYTES; the draft's are bfloat16.
        context: tokens of all requests together.
        nodes: tree nodes whose entries a layer with a running state keeps.

    Raises ConfigError if the models do not fit.
    """
    found = []
    for own, rest in _draft_gpus(draft, gpus, context, nodes):
        split = _split(target, rest, weights, context, nodes)
        if split is None:
            continue
        last = len(split) - 1
        stages = tuple(
            PlannedStage(
                gpu,
                layers,
                layers * target.layer_bytes(weights) + _ends(target, place, last),
                layers * target.kv_bytes(context),
                layers * target.state_bytes(nodes),
                _times(target, gpu, layers, weights, has_head=place == last),
            )
            for place, (gpu, layers) in enumerate(zip(rest, split, strict=True))
        )
        hop = _hop(target, link)
        draft_ms = 0.0 if draft is None or own is None else round_ms(draft, own)
        curves = tuple(stage.times for stage in stages)
        found.append(PlannedCluster(stages, own, Machine(curves, hop, draft_ms)))
    if not found:
        raise ConfigError(_no_room(target, draft, gpus, weights, context, nodes))
    return found


def round_ms(draft: ModelShape, gpu: GPU) -> float:
    """A draft round, in milliseconds."""
    read = draft.num_layers * draft.read_bytes("bfloat16", DRAFT_NODES) + draft.head_bytes
    flops = draft.num_layers * draft.layer_flops(DRAFT_NODES) + draft.head_flops(DRAFT_NODES)
    return gpu.ms(read, flops) + draft.num_layers * LAUNCH_MS + ROUND_MS


def _draft_gpus(
    draft: ModelShape | None, gpus: Sequence[GPU], context: int, nodes: int
) -> Iterator[tuple[GPU | None, list[GPU]]]:
    """Each kind of GPU that has room for the draft, and the others."""
    if draft is None:
        yield None, list(gpus)
        return
    for name in dict.fromkeys(gpu.name for gpu in gpus):
        place = next(i for i, gpu in enumerate(gpus) if gpu.name == name)
        rest = [*gpus[:place], *gpus[place + 1 :]]
        if rest and _draft_bytes(draft, context, nodes) <= gpus[place].usable_bytes:
            yield gpus[place], rest


def _draft_bytes(draft: ModelShape, context: int, nodes: int) -> float:
    kept = draft.kv_bytes(context) + draft.state_bytes(nodes)
    return draft.parameters * ITEM + draft.num_layers * kept


def _ends(target: ModelShape, place: int, last: int) -> float:
    """Bytes of embedding and LM head on a stage."""
    return target.head_bytes * ((place == 0) + (place == last))


def _split(
    target: ModelShape, gpus: Sequence[GPU], weights: str, context: int, nodes: int
) -> list[int] | None:
    """Layers of each GPU, so that the slowest takes as little time as possible; None: no room."""
    last = len(gpus) - 1
    kept = target.kv_bytes(context) + target.state_bytes(nodes)
    per_layer = target.layer_bytes(weights) + kept
    room = [
        int((gpu.usable_bytes - _ends(target, i, last)) // per_layer) for i, gpu in enumerate(gpus)
    ]
    if last >= target.num_layers or min(room) < 1 or sum(room) < target.num_layers:
        return None
    layers = [1] * len(gpus)

    def longer_ms(place: int) -> float:
        times = _times(target, gpus[place], layers[place] + 1, weights, has_head=place == last)
        return times.ms(USUAL_ROWS)

    for _ in range(target.num_layers - len(gpus)):
        fit = [place for place, most in enumerate(room) if layers[place] < most]
        layers[min(fit, key=longer_ms)] += 1
    return layers


def _times(target: ModelShape, gpu: GPU, layers: int, weights: str, *, has_head: bool) -> TimeCurve:
    def ms(rows: int) -> float:
        read = layers * target.read_bytes(weights, rows) + has_head * target.head_bytes
        flops = layers * target.layer_flops(rows) + has_head * target.head_flops(rows)
        return gpu.ms(read, flops)

    return TimeCurve(tuple((rows, ms(rows)) for rows in ROWS))


def _hop(target: ModelShape, link: EmulatedLink | None) -> TimeCurve:
    """Between two stages, by rows of hidden states in bfloat16."""
    if link is None:
        return TimeCurve(((1, 0.0),))
    ms = link.gbit_per_s and target.hidden_size * ITEM * 8 / (link.gbit_per_s * 1e6)
    return TimeCurve(tuple((rows, link.latency_ms + rows * ms) for rows in (1, ROWS[-1])))


def _no_room(
    target: ModelShape,
    draft: ModelShape | None,
    gpus: Sequence[GPU],
    weights: str,
    context: int,
    nodes: int,
) -> str:
    """What does not fit, and what would make it fit."""
    beside = "" if draft is None else f", one of which {draft.name} takes,"
    needed = target.num_layers * target.layer_bytes(weights) + 2 * target.head_bytes
    kv = target.num_layers * target.kv_bytes(context)
    states = target.num_layers * target.state_bytes(nodes)
    usable = sum(gpu.usable_bytes for gpu in gpus)
    said = (
        f"{target.name} does not fit: it takes {needed / GIB:.1f} GiB with {weights} weights and "
        f"{kv / GIB:.1f} GiB for {context} tokens of context"
        f"{f' and {states / GIB:.1f} GiB of running states' if states else ''}, and these "
        f"{len(gpus)} GPUs{beside} "
        f"have room for {usable / GIB:.1f} GiB"
    )
    for smaller in WEIGHT_BYTES:
        if WEIGHT_BYTES[smaller] < WEIGHT_BYTES[weights] and any(
            _split(target, rest, smaller, context, nodes)
            for _, rest in _draft_gpus(draft, gpus, context, nodes)
        ):
            return f"{said}; --weights {smaller} would fit."
    return f"{said}; give more GPUs, or a smaller --context."
