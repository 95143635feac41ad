"""How the devices of a host are divided between the draft and the target, from their times.

SwiftSpec (arXiv 2506.11309, 3.1) gives x of k devices to the target and k - x to the draft, each a
tensor-parallel group. A larger group makes steps or draft rounds shorter, and the other one longer;
which division is best also depends on how good the draft is. So each is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from pipespec.errors import ConfigError
from pipespec.head.policies.draft_rounds import AUTO
from pipespec.head.policies.policy import SpeculationPolicy
from pipespec.instruments.emulation.machine import TimeCurve
from pipespec.instruments.emulation.synthetic_proposer import Accuracy
from pipespec.instruments.plan.pipeline_times import Machine
from pipespec.instruments.plan.simulation import simulate

# All divisions are compared with this share of the tokens, and the best few with all.
FIRST_SHARE, KEPT = 0.2, 4


@dataclass(frozen=True)
class Division:
    """So many devices for the draft, and so many stages of so many devices each."""

    draft: int
    stages: int
    members: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the groups, the draft's first."""
        return (self.draft, *(self.members for _ in range(self.stages)))


@dataclass(frozen=True)
class PredictedDivision:
    """A division with its times, and the time between tokens that the simulation predicts."""

    division: Division
    machine: Machine
    tbt_ms: float


def divisions(count: int, *, one_stage: bool = False) -> Iterator[Division]:
    """All ways to use `count` devices, of which every stage has as many as the others.

    Args:
        one_stage: only those whose target is one group.
    """
    for draft in range(1, count):
        left = count - draft
        for members in range(1, left + 1):
            if left % members == 0 and (members == left or not one_stage):
                yield Division(draft, left // members, members)


def predict_divisions(
    candidates: Iterable[Division],
    machine_of: Callable[[Division], Machine | None],
    policy: SpeculationPolicy,
    accuracy: Accuracy,
    *,
    num_tokens: int,
    seed: int = 0,
) -> list[PredictedDivision]:
    """The divisions, the fastest first.

    Args:
        machine_of: the times of a division; None: it does not fit.
    """
    machines = {each: made for each in candidates if (made := machine_of(each)) is not None}

    def predicted(division: Division, tokens: int) -> PredictedDivision:
        ran = simulate(
            policy, machines[division], accuracy, rounds=AUTO, num_tokens=tokens, seed=seed
        )
        return PredictedDivision(division, machines[division], ran.tbt_ms)

    def tbt_ms(each: PredictedDivision) -> float:
        return each.tbt_ms

    few = max(1, int(FIRST_SHARE * num_tokens))
    first = sorted((predicted(each, few) for each in machines), key=tbt_ms)
    best = sorted((predicted(each.division, num_tokens) for each in first[:KEPT]), key=tbt_ms)
    return [*best, *first[KEPT:]]


def machine_by_devices(
    target_ms: Mapping[int, float], draft_ms: Mapping[int, float], division: Division
) -> Machine:
    """The times of a division whose target is one group, from those of groups of some sizes.

    Between the given sizes they are interpolated. Raises ConfigError for a size beyond them.
    """
    stage_ms = _interpolated("--target-group-ms", target_ms, division.members)
    round_ms = _interpolated("--draft-group-ms", draft_ms, division.draft)
    return Machine((TimeCurve(((1, stage_ms),)),), draft_ms=round_ms)


def _interpolated(option: str, times: Mapping[int, float], devices: int) -> float:
    sizes = sorted(times)
    if not sizes[0] <= devices <= sizes[-1]:
        raise ConfigError(
            f"{option} has times of {sizes[0]} to {sizes[-1]} devices, but {devices} are to be "
            "planned; give times of as few and of as many."
        )
    return float(np.interp(devices, sizes, [times[size] for size in sizes]))
