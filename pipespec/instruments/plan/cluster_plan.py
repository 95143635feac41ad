"""`pipespec plan --gpus`: a cluster for a model, from names alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipespec.errors import ConfigError
from pipespec.head.policies.policy import SpeculationPolicy
from pipespec.instruments.emulation.link import EmulatedLink
from pipespec.instruments.emulation.synthetic_proposer import Accuracy
from pipespec.instruments.plan.hardware import GPU
from pipespec.instruments.plan.member_share import MemberShare, member_share
from pipespec.instruments.plan.model_shape import WEIGHT_BYTES, ModelShape, find
from pipespec.instruments.plan.simulation import level_equation, simulate
from pipespec.instruments.plan.sizing import SUM_MS, USUAL_ROWS, PlannedCluster, clusters
from pipespec.limits import MAX_COUNT, MAX_MS, check_number, check_whole, suggest

# ASSUMED accuracies of a smaller model of the same family, from a poor one to a good one; the
# shares of 32 and 8 candidates are SpecPipe's (Fig. 7) of a 1B and an 8B.
RANGE = (
    Accuracy({1: 0.6, 32: 0.97}, 0.8),
    Accuracy({1: 0.74, 32: 0.99}, 0.8),
    Accuracy({1: 0.85, 8: 0.99}, 0.8),
)
SPREAD = 0.8
# Layouts are compared with so many tokens: those on all GPUs, and of those on fewer so many that
# an estimate calls the fastest. Of those that take at most so many times as long as the fastest,
# that with the most GPUs is the best, as it has room for more.
COMPARED, FEWER, EQUAL = 300, 5, 1.05
# The draft's best so many are what the estimate counts as proposed.
PROPOSED = 8
# Batches of draft tokens whose entries a stage with running states holds, for each rank
# (`rank_needs.slots_by_setting`).
BATCHES = 2


# Where the target and the draft are, and what a GPU of a group has.
Layout = tuple[PlannedCluster, MemberShare]


@dataclass(frozen=True)
class PlanRequest:
    """What to plan.

    Attributes:
        curve, spread: the draft's accuracy; without them it is RANGE.
        members: GPUs of a stage; of several numbers the one that decodes fastest is taken.
        sum_ms: what a group takes to add up for the layers that one of its GPUs would have alone;
            None: ASSUMED.
    """

    target: str
    draft: str | None
    gpus: tuple[GPU, ...]
    link: EmulatedLink | None
    weights: str = "bfloat16"
    context: int = 8192
    curve: Sequence[str] = ()
    spread: float | None = None
    members: Sequence[int] = (1,)
    sum_ms: float | None = None

    def accuracies(self) -> tuple[Accuracy, ...]:
        """Raises ConfigError."""
        if not self.curve:
            return RANGE
        spread = SPREAD if self.spread is None else self.spread
        return (Accuracy.parse(list(self.curve), spread),)

    def sum_ms_of_layer(self, num_layers: int) -> float:
        """What a group takes to add up for a layer. Raises ConfigError."""
        if self.sum_ms is None:
            return SUM_MS
        check_number("sum_ms", self.sum_ms, 0, MAX_MS)
        of_target = len(self.gpus) - (self.draft is not None)
        return self.sum_ms * of_target / num_layers


@dataclass(frozen=True)
class Predicted:
    """The time between tokens with a draft whose first choice is right so often."""

    top1: float
    tbt_ms: float


@dataclass(frozen=True)
class ClusterPlan:
    """The best layout of the models on the GPUs, and what it would do."""

    target: ModelShape
    draft: ModelShape | None
    cluster: PlannedCluster
    share: MemberShare
    predicted: tuple[Predicted, ...]

    gpus: tuple[GPU, ...]

    @property
    def plain_ms(self) -> float:
        """Between tokens without speculation."""
        return self.cluster.machine.plain_tbt_ms

    @property
    def left_out(self) -> dict[str, int]:
        """How many GPUs of which kind are not used: with them a token takes longer."""
        unused = Counter(gpu.name for gpu in self.gpus)
        unused.subtract(gpu.name for gpu in self.cluster.gpus)
        return {name: count for name, count in unused.items() if count}

    def described(self) -> dict[str, Any]:
        """As JSON values."""
        draft = self.cluster.draft
        return {
            "target": asdict(self.target) | {"parameters": self.target.parameters},
            "draft": None if self.draft is None else asdict(self.draft),
            "draft_gpu": None if draft is None else draft.name,
            "draft_ms": self.cluster.machine.round_ms(1),
            "stages": [
                {
                    "gpu": stage.gpu.name,
                    "gpus": stage.members,
                    "layers": stage.layers,
                    "weight_bytes": stage.weight_bytes,
                    "repeated_bytes": stage.repeated_bytes,
                    "kv_bytes": stage.kv_bytes,
                    "state_bytes": stage.state_bytes,
                    "stage_ms": [f"{rows}:{ms:.4g}" for rows, ms in stage.times.points],
                }
                for stage in self.cluster.stages
            ],
            "plain_tbt_ms": self.plain_ms,
            "left_out": self.left_out,
            "predictions": [asdict(each) for each in self.predicted],
        }


def plan(
    asked: PlanRequest, policy: SpeculationPolicy, *, num_tokens: int, seed: int = 0
) -> ClusterPlan:
    """The layout that decodes fastest with `policy`, by simulation. Raises ConfigError if the
    models do not fit, ModelError if one of them is not known."""
    check_whole("context", asked.context, 1, MAX_COUNT)
    if asked.weights not in WEIGHT_BYTES:
        listed = list(WEIGHT_BYTES)
        raise ConfigError(f"--weights is {asked.weights!r}, but {suggest(asked.weights, listed)}.")
    accuracies = asked.accuracies()
    target = find(asked.target)
    draft = None if asked.draft is None else find(asked.draft)
    nodes = BATCHES * len(asked.gpus) * policy.max_rows
    found = _clusters(asked, target, draft, nodes)

    def tbt_ms(cluster: PlannedCluster, accuracy: Accuracy, tokens: int) -> float:
        ran = simulate(
            policy, cluster.machine, accuracy, rounds="auto", num_tokens=tokens, seed=seed
        )
        return ran.ms / ran.tokens

    if draft is None:
        best, share = _best(found, [each.machine.plain_tbt_ms for each, _ in found])
        return ClusterPlan(target, None, best, share, (), asked.gpus)
    usual, few = accuracies[len(accuracies) // 2], min(num_tokens, COMPARED)
    found = _promising(found, usual.hit_rate(PROPOSED))
    best, share = found[0]
    if len(found) > 1:
        best, share = _best(found, [tbt_ms(each, usual, few) for each, _ in found])
    predicted = tuple(
        Predicted(each.hit_rate(1), tbt_ms(best, each, num_tokens)) for each in accuracies
    )
    return ClusterPlan(target, draft, best, share, predicted, asked.gpus)


def _promising(found: Sequence[Layout], proposed: float) -> list[Layout]:
    """The layouts that use the most GPUs, and the others that may be fast: those with the least
    time of a step over the tokens per step of `level` (docs/planning.md)."""
    most = max(len(cluster.gpus) for cluster, _ in found)

    def estimated_ms(layout: Layout) -> float:
        machine = layout[0].machine
        step_ms = max(*machine.full_ms(USUAL_ROWS), machine.round_ms(USUAL_ROWS))
        return step_ms / level_equation(proposed, machine.num_stages)

    all_gpus = [each for each in found if len(each[0].gpus) == most]
    fewer = [each for each in found if len(each[0].gpus) < most]
    return all_gpus + sorted(fewer, key=estimated_ms)[:FEWER]


def _best(found: Sequence[Layout], times_ms: Sequence[float]) -> Layout:
    """Of the layouts that are about as fast as the fastest, the one with the most GPUs."""
    most_ms = EQUAL * min(times_ms)
    equal = [(each, ms) for each, ms in zip(found, times_ms, strict=True) if ms <= most_ms]
    return min(equal, key=lambda pair: (-len(pair[0][0].gpus), pair[1]))[0]


def _clusters(
    asked: PlanRequest, target: ModelShape, draft: ModelShape | None, nodes: int
) -> list[Layout]:
    """All layouts with groups of one of the sizes asked for, each with what a GPU of a group has.
    Raises ConfigError if none fits."""
    found: list[Layout] = []
    refused = []
    for size in dict.fromkeys(asked.members):
        check_whole("tensor_parallel", size, 1, len(asked.gpus))
        share = member_share(asked.target, target, size)
        try:
            layouts = clusters(
                target,
                draft,
                asked.gpus,
                asked.link,
                weights=asked.weights,
                context=asked.context,
                nodes=nodes,
                share=share,
                sum_ms=asked.sum_ms_of_layer(target.num_layers),
                fewer=True,
            )
        except ConfigError as error:
            refused.append(error)
        else:
            found += [(layout, share) for layout in layouts]
    if not found:
        raise refused[0]
    return found
