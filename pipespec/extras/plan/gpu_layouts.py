"""Which layers which GPU would hold, and how fast that would be, from a model's config alone."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from pipespec.errors import ConfigError
from pipespec.extras.emulation.link import EmulatedLink
from pipespec.extras.emulation.machine import TimeCurve
from pipespec.extras.plan.advice import PlannedLayout
from pipespec.extras.plan.hardware import GPU, MAX_GPUS
from pipespec.extras.plan.model_shape import ITEM, ModelShape, published
from pipespec.extras.plan.pipeline_times import NO_HOP, Machine
from pipespec.extras.plan.simulation import level_equation
from pipespec.extras.plan.stored_weights import WEIGHTS
from pipespec.system.sizes import size_text

# Rows for which times are computed; those between are interpolated.
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
# Layers are divided so that stages take as long as each other with so many rows.
USUAL_ROWS = 16
# Assumed: nodes of a draft round, and what a round takes on the host; without a model that is all.
DRAFT_NODES, ROUND_MS = 16, 0.5
# What a layer takes beside reading and arithmetic: attention to a text of 2048 tokens, small
# operations, and the gaps between the kernels of a CUDA graph. Fitted to a stage of a 70B and
# rounds of a 1B and an 8B on an H200, without torch.compile (docs/gpus.md), which alone would give
# .23, .16 and .18; assumed of other GPUs.
LAYER_MS = 0.18
# Of the layouts on fewer GPUs than all, so many that an estimate calls the fastest are simulated.
FEWER = 5
# A draft has at most such a share of the target's parameters, to be advised.
SMALLER = 0.25
# A context below this is no remedy.
LEAST_CONTEXT = 512
# What JSON says of a stage beside its GPU and times.
DESCRIBED = ("layers", "weight_bytes", "kv_bytes", "state_bytes")
GIB = 2**30


@dataclass(frozen=True)
class PlannedStage:
    """A GPU with layers of the target; bytes of weights, of KV of the whole context, and of running
    states with their tree nodes."""

    gpu: GPU
    layers: int
    weight_bytes: float
    kv_bytes: float
    state_bytes: float
    times: TimeCurve

    def in_words(self) -> tuple[str, str]:
        kept = size_text(self.kv_bytes + self.state_bytes)
        held = f"{self.layers} layers on {self.gpu.name}, {size_text(self.weight_bytes)} of weights"
        times = ", ".join(f"{self.times.ms(rows):.1f}" for rows in (1, 16, 64))
        return f"{held} and {kept} of KV and running states", f"{times} ms for 1, 16 and 64 rows"


@dataclass(frozen=True)
class PlannedModel:
    """The target or the draft as GPUs have it.

    Attributes:
        weights: of its layers, one of WEIGHTS; "": as they are stored.
        context: tokens of all requests together.
        nodes: tree nodes whose entries a layer with a running state keeps.
    """

    shape: ModelShape
    weights: str
    context: int
    nodes: int = 0

    @property
    def kept_bytes(self) -> tuple[float, float]:
        """Of KV, and of running states, in a layer."""
        return self.shape.kv_bytes(self.context), self.shape.state_bytes(self.nodes)

    @property
    def num_bytes(self) -> float:
        """On one GPU."""
        return self.shape.num_bytes(self.weights) + self.shape.num_layers * sum(self.kept_bytes)

    def ends(self, place: int, last: int) -> float:
        """Bytes of embedding and LM head on a stage, which are one if it has both and they are
        tied."""
        matrices = (place == 0) + (place == last)
        return self.shape.head_bytes * (min(matrices, 1) if self.shape.tied else matrices)

    def ms(self, gpu: GPU, layers: int, rows: int, *, has_head: bool) -> float:
        shape = self.shape
        read = layers * shape.read_bytes(self.weights, rows) + has_head * shape.head_bytes
        flops = layers * shape.layer_flops(rows) + has_head * shape.head_flops(rows)
        return gpu.ms(read, flops) + layers * LAYER_MS

    def stage(self, gpu: GPU, layers: int, place: int, last: int) -> PlannedStage:
        weights = layers * self.shape.layer_bytes(self.weights) + self.ends(place, last)
        kv, states = (layers * each for each in self.kept_bytes)
        times = ((rows, self.ms(gpu, layers, rows, has_head=place == last)) for rows in ROWS)
        return PlannedStage(gpu, layers, weights, kv, states, TimeCurve(tuple(times)))


@dataclass(frozen=True)
class PlannedCluster:
    """A target on GPUs, in the order of its layers, and the GPU of the draft."""

    stages: tuple[PlannedStage, ...]
    draft: GPU | None
    machine: Machine

    @property
    def gpus(self) -> list[GPU]:
        own = [] if self.draft is None else [self.draft]
        return own + [stage.gpu for stage in self.stages]

    @property
    def label(self) -> str:
        kinds = Counter(stage.gpu.name for stage in self.stages)
        own = "" if self.draft is None else f"{self.draft.name} + "
        return own + ", ".join(f"{count} x {name}" for name, count in kinds.items())

    def layout(self, settings: tuple[str, ...] = ()) -> PlannedLayout:
        settings = (f"cluster.stages={len(self.stages)}", *settings)
        return PlannedLayout(self.label, self.machine, len(self.gpus), settings)

    def left_out(self, gpus: Sequence[GPU]) -> dict[str, int]:
        """How many GPUs of which kind are not used: with them a token takes longer."""
        unused = Counter(gpu.name for gpu in gpus) - Counter(gpu.name for gpu in self.gpus)
        return dict(unused)

    def sentences(self, draft: PlannedModel | None, gpus: Sequence[GPU]) -> Iterator[str]:
        """Where the layers are: a line for each run of ranks that hold the same."""
        if draft is not None and self.draft is not None:
            held = size_text(draft.shape.num_bytes(draft.weights))
            round_ms = f"{self.machine.round_ms(1):.1f} ms a round"
            yield f"Rank 0: the draft on {self.draft.name}, {held}, {round_ms}."
        first = 1
        for (held, times), run in groupby(self.stages, PlannedStage.in_words):
            last = first + len(list(run)) - 1
            ranks = f"Ranks {first} to {last}" if last > first else f"Rank {first}"
            yield f"{ranks}: {held}; {times}."
            first = last + 1
        if left := self.left_out(gpus):
            unused, count = ", ".join(f"{n} x {name}" for name, n in left.items()), len(self.gpus)
            yield (
                f"Use {count} GPU{'s' * (count > 1)}; the others ({unused}) add nothing: with more "
                "stages a token takes as long, or longer."
            )

    def described(self, gpus: Sequence[GPU]) -> dict[str, Any]:
        return {
            "draft_gpu": None if self.draft is None else self.draft.name,
            "draft_ms": self.machine.round_ms(1),
            "stages": [
                {
                    "gpu": stage.gpu.name,
                    **{name: getattr(stage, name) for name in DESCRIBED},
                    "stage_ms": [f"{rows}:{ms:.4g}" for rows, ms in stage.times.points],
                }
                for stage in self.stages
            ],
            "left_out": self.left_out(gpus),
        }


def clusters(
    target: PlannedModel,
    draft: PlannedModel | None,
    gpus: Sequence[GPU],
    link: EmulatedLink | None,
    proposer_ms: float = 0.0,
) -> list[PlannedCluster]:
    """The target on all GPUs but that of the draft and on each smaller number of them, for each
    kind of GPU that could be the draft's; without a `link` messages take no time. A round without
    a draft takes `proposer_ms`. Raises ConfigError if the models do not fit."""
    places = list(_draft_gpus(draft, gpus))
    if draft is not None and not places:
        smaller = fewer_bits(draft, lambda each: any(_draft_gpus(each, gpus)))
        raise ConfigError(
            f"The draft {draft.shape.name} needs a GPU of its own with room for "
            f"{draft.num_bytes / GIB:.1f} GiB, beside those of the target, and there is none (that "
            "both share one is not planned, but can be run); give more or larger GPUs, "
            f"{f'--draft-weights {smaller}, ' if smaller else ''}or proposer=suffix instead of "
            "model.draft."
        )
    hop = _hop(target.shape, link)
    found = []
    for own, rest in places:
        draft_ms = proposer_ms if draft is None or own is None else round_ms(draft, own)
        for stages in _pipelines(target, rest):
            machine = Machine(tuple(stage.times for stage in stages), hop, draft_ms)
            found.append(PlannedCluster(stages, own, machine))
    if not found:
        raise ConfigError(_no_room(target, draft, gpus))
    return found


def promising(found: Sequence[PlannedCluster], proposed: float) -> list[PlannedCluster]:
    """The layouts that use the most GPUs, and the others that may be fast: those with the least
    time of a step over the tokens per step of `level` (docs/planning.md), of which a draft has
    `proposed` such a share."""
    most = max(len(cluster.gpus) for cluster in found)

    def estimated_ms(cluster: PlannedCluster) -> float:
        machine = cluster.machine
        step_ms = max(*machine.full_ms(USUAL_ROWS), machine.round_ms(USUAL_ROWS))
        return step_ms / level_equation(proposed, machine.num_stages)

    all_gpus = [each for each in found if len(each.gpus) == most]
    fewer = [each for each in found if len(each.gpus) < most]
    return all_gpus + sorted(fewer, key=estimated_ms)[:FEWER]


def fits(target: PlannedModel, draft: PlannedModel | None, gpus: Sequence[GPU]) -> bool:
    """Whether the target has room beside the draft, if there is one."""
    return any(any(_pipelines(target, rest)) for _, rest in _draft_gpus(draft, gpus))


def draft_that_fits(target: PlannedModel, gpus: Sequence[GPU]) -> str | None:
    """The smallest published model of the target's family that has room on a GPU of its own."""
    family = target.shape.name.partition("-")[0]
    for each in sorted(published().values(), key=lambda each: each.parameters):
        alike = each.name.startswith(f"{family}-") and each.vocab_size == target.shape.vocab_size
        small = each.parameters <= SMALLER * target.shape.parameters and not each.undecoded
        if alike and small and fits(target, replace(target, shape=each, weights=""), gpus):
            return each.name
    return None


def round_ms(draft: PlannedModel, gpu: GPU) -> float:
    """A draft round, in milliseconds."""
    return draft.ms(gpu, draft.shape.num_layers, DRAFT_NODES, has_head=True) + ROUND_MS


def _draft_gpus(
    draft: PlannedModel | None, gpus: Sequence[GPU]
) -> Iterator[tuple[GPU | None, list[GPU]]]:
    """Each kind of GPU that has room for the draft, and the others."""
    if draft is None:
        yield None, list(gpus)
        return
    for name in dict.fromkeys(gpu.name for gpu in gpus):
        place = next(i for i, gpu in enumerate(gpus) if gpu.name == name)
        rest = [*gpus[:place], *gpus[place + 1 :]]
        if rest and draft.num_bytes <= gpus[place].usable_bytes:
            yield gpus[place], rest


def _pipelines(target: PlannedModel, gpus: Sequence[GPU]) -> Iterator[tuple[PlannedStage, ...]]:
    """The stages on all GPUs, and on each smaller number: the fastest, or if these have no room the
    largest. GPUs keep their order."""
    places = range(len(gpus))
    speed = {gpu: target.ms(gpu, 1, USUAL_ROWS, has_head=False) for gpu in gpus}
    fastest = sorted(places, key=lambda place: speed[gpus[place]])
    largest = sorted(places, key=lambda place: -gpus[place].usable_bytes)
    for count in range(len(gpus), 0, -1):
        for order in (fastest, largest):
            chosen = [gpus[place] for place in sorted(order[:count])]
            split = _split(target, chosen)
            if split is not None:
                yield tuple(
                    target.stage(gpu, layers, place, count - 1)
                    for place, (gpu, layers) in enumerate(zip(chosen, split, strict=True))
                )
                break


def _split(target: PlannedModel, gpus: Sequence[GPU]) -> list[int] | None:
    """Layers of each stage, so that the slowest takes as little time as possible; None: no room."""
    last, num_layers = len(gpus) - 1, target.shape.num_layers
    layer_bytes = target.shape.layer_bytes(target.weights) + sum(target.kept_bytes)
    room = [
        int((gpu.usable_bytes - target.ends(i, last)) // layer_bytes) for i, gpu in enumerate(gpus)
    ]
    if last >= num_layers or min(room) < 1 or sum(room) < num_layers:
        return None
    layers = [1] * len(gpus)

    def longer_ms(place: int) -> float:
        return target.ms(gpus[place], layers[place] + 1, USUAL_ROWS, has_head=place == last)

    for _ in range(num_layers - len(gpus)):
        fit = [place for place, most in enumerate(room) if layers[place] < most]
        layers[min(fit, key=longer_ms)] += 1
    return layers


def _hop(target: ModelShape, link: EmulatedLink | None) -> TimeCurve:
    """Between two stages, by rows of hidden states in bfloat16."""
    if link is None:
        return NO_HOP
    of_rows = replace(link, row_bytes=target.hidden_size * ITEM)
    return TimeCurve(tuple((rows, of_rows.ms(rows)) for rows in (1, ROWS[-1])))


def fewer_bits(model: PlannedModel, fits: Callable[[PlannedModel], bool]) -> str | None:
    """The weights of the most bits, but of fewer than now, with which a model fits."""
    now = model.shape.layer_bytes(model.weights)
    smaller = (name for name in WEIGHTS if model.shape.layer_bytes(name) < now)
    return next((name for name in smaller if fits(replace(model, weights=name))), None)


def _no_room(target: PlannedModel, draft: PlannedModel | None, gpus: Sequence[GPU]) -> str:
    """What does not fit, by how much, and what would make it fit."""
    shape, context = target.shape, target.context
    needed = shape.num_layers * shape.layer_bytes(target.weights) + 2 * shape.head_bytes
    kv, states = (shape.num_layers * each for each in target.kept_bytes)
    places = [rest for _, rest in _draft_gpus(draft, gpus)]
    usable, count = max((sum(gpu.usable_bytes for gpu in rest), len(rest)) for rest in places)
    missing = needed + kv + states - usable

    beside = "" if draft is None else " beside the draft's"
    said = (
        f"{shape.name} does not fit: it takes {needed / GIB:.1f} GiB with "
        f"{target.weights or 'its own'} weights and {kv / GIB:.1f} GiB for {context} tokens of "
        f"context{f' and {states / GIB:.1f} GiB of running states' if states else ''}, and there "
        f"is room for {usable / GIB:.1f} GiB on {count} GPU{'s' * (count > 1)}{beside}"
    )
    whole = ", but not in whole layers, one or more on each"
    said += f": {missing / GIB:.1f} GiB are missing" if missing > 0 else whole
    remedies = []

    def too_long(tokens: int) -> bool:
        return not fits(replace(target, context=tokens), draft, gpus)

    if (shorter := bisect_left(range(context), True, key=too_long)) > LEAST_CONTEXT:
        remedies.append(f"--context {shorter - 1}")
    if smaller := fewer_bits(target, lambda each: fits(each, draft, gpus)):
        remedies.append(f"--weights {smaller}")
    if draft is not None and fits(target, None, gpus):
        remedies.append("proposer=suffix instead of the draft")
    for gpu in dict.fromkeys(gpus):
        numbers = range(1, MAX_GPUS - len(gpus) + 1)
        more = next((n for n in numbers if fits(target, draft, [*gpus, *[gpu] * n])), None)
        remedies += [f"{more} more {gpu.name}"] if more else []
    would = f"{' or '.join(remedies)} would fit" if remedies else "more or larger GPUs are needed"
    return f"{said}; {would}."
