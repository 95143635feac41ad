"""`pipespec plan --gpus`: a cluster for a model, from names alone."""

from __future__ import annotations

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
from pipespec.instruments.plan.simulation import simulate
from pipespec.instruments.plan.sizing import SUM_MS, PlannedCluster, clusters
from pipespec.limits import MAX_COUNT, MAX_MS, check_number, check_whole, suggest

# ASSUMED accuracies of a smaller model of the same family, from a poor one to a good one; the
# shares of 32 and 8 candidates are SpecPipe's (Fig. 7) of a 1B and an 8B.
RANGE = (
    Accuracy({1: 0.6, 32: 0.97}, 0.8),
    Accuracy({1: 0.74, 32: 0.99}, 0.8),
    Accuracy({1: 0.85, 8: 0.99}, 0.8),
)
SPREAD = 0.8
# Layouts are compared with so many tokens.
COMPARED = 300
# Batches of draft tokens whose entries a stage with running states holds, for each rank
# (`rank_needs.slots_by_setting`).
BATCHES = 2


@dataclass(frozen=True)
class Asked:
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

    @property
    def plain_ms(self) -> float:
        """Between tokens without speculation."""
        return self.cluster.machine.plain_tbt_ms

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
            "predictions": [asdict(each) for each in self.predicted],
        }


def plan(asked: Asked, policy: SpeculationPolicy, *, num_tokens: int, seed: int = 0) -> ClusterPlan:
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
        best, share = min(found, key=lambda each: each[0].machine.plain_tbt_ms)
        return ClusterPlan(target, None, best, share, ())
    usual = accuracies[len(accuracies) // 2]
    best, share = found[0]
    if len(found) > 1:
        few = min(num_tokens, COMPARED)
        best, share = min(found, key=lambda each: tbt_ms(each[0], usual, few))
    predicted = tuple(
        Predicted(each.hit_rate(1), tbt_ms(best, each, num_tokens)) for each in accuracies
    )
    return ClusterPlan(target, draft, best, share, predicted)


def _clusters(
    asked: Asked, target: ModelShape, draft: ModelShape | None, nodes: int
) -> list[tuple[PlannedCluster, MemberShare]]:
    """All layouts with groups of one of the sizes asked for, each with what a GPU of a group has.
    Raises ConfigError if none fits."""
    found: list[tuple[PlannedCluster, MemberShare]] = []
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
            )
        except ConfigError as error:
            refused.append(error)
        else:
            found += [(layout, share) for layout in layouts]
    if not found:
        raise refused[0]
    return found
