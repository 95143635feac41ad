"""Which layers which GPU would hold, and how fast that would be, from a model's config alone.

Times are those of reading weights and of arithmetic (`hardware`) and what a layer takes beside, so
they are ASSUMED, and so is the accuracy of the draft. What a plan is for is the difference between
clusters, and what does not fit; `pipespec plan --profile` takes measured times. A stage is a GPU,
or a tensor-parallel group of equal ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pipespec.errors import ConfigError
from pipespec.instruments.emulation.link import EmulatedLink
from pipespec.instruments.emulation.machine import TimeCurve
from pipespec.instruments.plan.hardware import GPU
from pipespec.instruments.plan.member_share import MemberShare, whole_model
from pipespec.instruments.plan.model_shape import ITEM, WEIGHT_BYTES, ModelShape
from pipespec.instruments.plan.pipeline_times import Machine

# Rows for which times are computed; those between are interpolated.
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
# Layers are divided so that stages take as long as each other with so many rows.
USUAL_ROWS = 16
# ASSUMED: nodes of a draft round, and what a round takes on the host.
DRAFT_NODES, ROUND_MS = 16, 0.5
# What a layer takes beside reading and arithmetic: attention to a text of 2048 tokens, small
# operations, and the gaps between the kernels of a CUDA graph. Fitted to a stage of a 70B and
# rounds of a 1B and an 8B on an H200, without torch.compile (docs/gpus.md), which alone would give
# .23, .16 and .18; ASSUMED of other GPUs.
LAYER_MS = 0.18
# ASSUMED: what the GPUs of a group take to add up a layer's two sums. Four with NVLink take 12.0
# and 15.3 us (SwiftSpec, Table 3).
SUM_MS = 0.0273
GIB = 2**30


@dataclass(frozen=True)
class PlannedStage:
    """A GPU, or so many equal ones, with layers of the target.

    Attributes:
        weight_bytes, kv_bytes, state_bytes: of weights, of KV of the whole context, and of running
            states with their tree nodes, on each of the GPUs at most.
        repeated_bytes: of the weights, those that all GPUs of the stage have.
    """

    gpu: GPU
    layers: int
    weight_bytes: float
    kv_bytes: float
    state_bytes: float
    times: TimeCurve
    members: int = 1
    repeated_bytes: float = 0.0


@dataclass(frozen=True)
class Target:
    """The target as its GPUs have it.

    Attributes:
        weights: of its layers, one of WEIGHT_BYTES.
        context: tokens of all requests together.
        nodes: tree nodes whose entries a layer with a running state keeps.
        share: what a GPU of a group has.
        sum_ms: what such a group takes to add up, for a layer.
    """

    shape: ModelShape
    weights: str
    context: int
    nodes: int
    share: MemberShare
    sum_ms: float

    @property
    def layer_bytes(self) -> float:
        """Of a layer's weights on each GPU."""
        return self.share.layer_bytes(self.weights)

    @property
    def kv_bytes(self) -> float:
        """Of K and V in a layer on each GPU."""
        return self.shape.kv_bytes(self.context) * self.share.kv

    @property
    def state_bytes(self) -> int:
        """Of the running states of a layer, which every GPU has."""
        return self.shape.state_bytes(self.nodes)

    def ends(self, place: int, last: int) -> float:
        """Bytes of embedding and LM head on each GPU of a stage."""
        return self.shape.head_bytes * self.share.vocabulary * ((place == 0) + (place == last))

    def times(self, gpu: GPU, layers: int, *, has_head: bool) -> TimeCurve:
        """Of a stage with so many layers, by rows."""
        shape, share = self.shape, self.share
        of_layer, of_head = share.of_layer(shape), has_head * share.vocabulary

        def ms(rows: int) -> float:
            read = layers * of_layer * shape.read_bytes(self.weights, rows)
            read += of_head * shape.head_bytes
            flops = layers * of_layer * shape.layer_flops(rows) + of_head * shape.head_flops(rows)
            return gpu.ms(read, flops) + layers * (LAYER_MS + self.sum_ms)

        return TimeCurve(tuple((rows, ms(rows)) for rows in ROWS))

    def stage(self, gpu: GPU, layers: int, place: int, last: int) -> PlannedStage:
        """A GPU, or a group of them, with so many layers."""
        return PlannedStage(
            gpu,
            layers,
            layers * self.layer_bytes + self.ends(place, last),
            layers * self.kv_bytes,
            layers * self.state_bytes,
            self.times(gpu, layers, has_head=place == last),
            self.share.size,
            layers * self.share.repeated_bytes(self.weights),
        )


@dataclass(frozen=True)
class PlannedCluster:
    """A target on GPUs, in the order of its layers, and the GPU of the draft."""

    stages: tuple[PlannedStage, ...]
    draft: GPU | None
    machine: Machine

    @property
    def gpus(self) -> list[GPU]:
        """All that it uses, the draft's first."""
        own = [] if self.draft is None else [self.draft]
        return own + [stage.gpu for stage in self.stages for _ in range(stage.members)]


def clusters(
    target: ModelShape,
    draft: ModelShape | None,
    gpus: Sequence[GPU],
    link: EmulatedLink | None,
    *,
    weights: str,
    context: int,
    nodes: int = 0,
    share: MemberShare | None = None,
    sum_ms: float = 0.0,
    fewer: bool = False,
) -> list[PlannedCluster]:
    """The target on all GPUs but that of the draft, one for each kind of GPU that could be that.

    Args:
        fewer: also on each smaller number of them.
        link: between the GPUs; None: messages take no time.
        weights: of the target's layers, one of WEIGHT_BYTES; the draft's are bfloat16.
        context: tokens of all requests together.
        nodes: tree nodes whose entries a layer with a running state keeps.
        share: what each GPU of a group has of the target; None: each GPU is a stage.
        sum_ms: what a group takes to add up, for a layer.

    Raises ConfigError if the models do not fit.
    """
    share = share or whole_model(target)
    placed = Target(target, weights, context, nodes, share, sum_ms if share.size > 1 else 0.0)
    found, divisible = [], False
    places = list(_draft_gpus(draft, gpus, context, nodes))
    if draft is not None and not places:
        raise ConfigError(
            f"The draft {draft.name} needs a GPU of its own with room for "
            f"{_draft_bytes(draft, context, nodes) / GIB:.1f} GiB, beside those of the target, and "
            "there is none (that both share one is not planned, but can be run); give more or "
            "larger GPUs, or leave model.draft out."
        )
    for own, rest in places:
        groups = _groups(rest, share.size)
        divisible = divisible or groups is not None
        draft_ms = 0.0 if draft is None or own is None else round_ms(draft, own)
        if groups is None:
            continue
        for stages in _pipelines(placed, groups, fewer=fewer):
            curves = tuple(stage.times for stage in stages)
            machine = Machine(curves, _hop(target, link), draft_ms)
            found.append(PlannedCluster(stages, own, machine))
    if not found and not divisible:
        beside = "" if draft is None else " beside the draft's"
        raise ConfigError(
            f"The GPUs{beside} cannot be divided into groups of {share.size} equal ones, in their "
            "order; give others, or another --tensor-parallel."
        )
    if not found:
        raise ConfigError(_no_room(placed, draft, gpus))
    return found


def round_ms(draft: ModelShape, gpu: GPU) -> float:
    """A draft round, in milliseconds."""
    read = draft.num_layers * draft.read_bytes("bfloat16", DRAFT_NODES) + draft.head_bytes
    flops = draft.num_layers * draft.layer_flops(DRAFT_NODES) + draft.head_flops(DRAFT_NODES)
    return gpu.ms(read, flops) + draft.num_layers * LAYER_MS + ROUND_MS


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


def _groups(gpus: Sequence[GPU], size: int) -> list[GPU] | None:
    """The GPU of each group of `size` equal ones that follow each other; None: there are others."""
    found = [gpus[first : first + size] for first in range(0, len(gpus), size)]
    equal = all(len(group) == size and len(set(group)) == 1 for group in found)
    return [group[0] for group in found] if equal else None


def _pipelines(
    target: Target, gpus: Sequence[GPU], *, fewer: bool
) -> Iterator[tuple[PlannedStage, ...]]:
    """The stages on all GPUs, and with `fewer` on each smaller number: the fastest, or if these
    have no room the largest. GPUs keep their order."""

    def layer_ms(gpu: GPU) -> float:
        return target.times(gpu, 1, has_head=False).ms(USUAL_ROWS)

    places = range(len(gpus))
    fastest = sorted(places, key=lambda place: layer_ms(gpus[place]))
    largest = sorted(places, key=lambda place: -gpus[place].usable_bytes)
    least = 1 if fewer else len(gpus)
    for count in range(len(gpus), least - 1, -1):
        for order in (fastest, largest):
            chosen = [gpus[place] for place in sorted(order[:count])]
            split = _split(target, chosen)
            if split is not None:
                yield tuple(
                    target.stage(gpu, layers, place, count - 1)
                    for place, (gpu, layers) in enumerate(zip(chosen, split, strict=True))
                )
                break


def _split(target: Target, gpus: Sequence[GPU]) -> list[int] | None:
    """Layers of each stage, so that the slowest takes as little time as possible; None: no room."""
    last, num_layers = len(gpus) - 1, target.shape.num_layers
    per_layer = target.layer_bytes + target.kv_bytes + target.state_bytes
    room = [
        int((gpu.usable_bytes - target.ends(i, last)) // per_layer) for i, gpu in enumerate(gpus)
    ]
    if last >= num_layers or min(room) < 1 or sum(room) < num_layers:
        return None
    layers = [1] * len(gpus)

    def longer_ms(place: int) -> float:
        times = target.times(gpus[place], layers[place] + 1, has_head=place == last)
        return times.ms(USUAL_ROWS)

    for _ in range(num_layers - len(gpus)):
        fit = [place for place, most in enumerate(room) if layers[place] < most]
        layers[min(fit, key=longer_ms)] += 1
    return layers


def _hop(target: ModelShape, link: EmulatedLink | None) -> TimeCurve:
    """Between two stages, by rows of hidden states in bfloat16."""
    if link is None:
        return TimeCurve(((1, 0.0),))
    ms = link.gbit_per_s and target.hidden_size * ITEM * 8 / (link.gbit_per_s * 1e6)
    return TimeCurve(tuple((rows, link.latency_ms + rows * ms) for rows in (1, ROWS[-1])))


def _no_room(target: Target, draft: ModelShape | None, gpus: Sequence[GPU]) -> str:
    """What does not fit, by how much, and what would make it fit."""
    beside = "" if draft is None else " beside the draft's"
    shape, size, context, nodes = target.shape, target.share.size, target.context, target.nodes
    ends = 2 * shape.head_bytes * target.share.vocabulary
    needed = size * (shape.num_layers * target.layer_bytes + ends)
    kv = size * shape.num_layers * target.kv_bytes
    states = size * shape.num_layers * target.state_bytes
    places = [rest for _, rest in _draft_gpus(draft, gpus, context, nodes)]
    usable, count = max(
        (sum(gpu.usable_bytes for gpu in rest), len(rest)) for rest in places if _groups(rest, size)
    )
    missing = needed + kv + states - usable
    divided = f" in groups of {size} GPUs" if size > 1 else ""
    said = (
        f"{shape.name} does not fit: it takes {needed / GIB:.1f} GiB with {target.weights} weights "
        f"and {kv / GIB:.1f} GiB for {context} tokens of context"
        f"{f' and {states / GIB:.1f} GiB of running states' if states else ''}{divided}, and there "
        f"is room for {usable / GIB:.1f} GiB on {count} GPU{'s' * (count > 1)}{beside}"
    )
    if missing > 0:
        said += f": {missing / GIB:.1f} GiB are missing"
    else:
        said += ", but not in whole layers, one or more on each"
    for smaller in WEIGHT_BYTES:
        if WEIGHT_BYTES[smaller] < WEIGHT_BYTES[target.weights] and any(
            (groups := _groups(rest, size)) and _split(replace(target, weights=smaller), groups)
            for rest in places
        ):
            return f"{said}; --weights {smaller} would fit."
    return f"{said}; give more GPUs, or a smaller --context."
