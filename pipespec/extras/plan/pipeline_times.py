"""How long the stages, the draft and the links of a planned pipeline take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipespec.errors import ConfigError
from pipespec.extras.emulation.machine import TimeCurve
from pipespec.limits import MAX_MS, check_number

NO_HOP = TimeCurve(((1, 0.0),))


@dataclass(frozen=True)
class Machine:
    """The stages, the draft and the links of a pipeline. Raises ConfigError.

    Attributes:
        stages: the times of each; those of a group count as one stage, with their sum.
        hop: from the end of a stage's computation to the start of the next one's, by the rows that
            it sends on; the verdict's way is that of one row.
        draft_ms: of a draft round, for any nodes or by the nodes that it expands.
        overlap: the draft works while the stages compute, else while they wait.
    """

    stages: tuple[TimeCurve, ...]
    hop: TimeCurve = NO_HOP
    draft_ms: float | TimeCurve = 0.0
    overlap: bool = True

    def __post_init__(self) -> None:
        if not self.stages:
            raise ConfigError("A pipeline without stages cannot be planned; give 1 or more.")
        if not isinstance(self.draft_ms, TimeCurve):
            check_number("draft_ms", self.draft_ms, 0, MAX_MS)

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def plain_tbt_ms(self) -> float:
        """Time between tokens of plain pipeline parallelism: one row goes through every stage."""
        return sum(curve.ms(1) + self.hop.ms(1) for curve in self.stages)

    def stage_ms(self, rows: Sequence[int]) -> list[float]:
        return [curve.ms(count) for curve, count in zip(self.stages, rows, strict=True)]

    def round_ms(self, nodes: int) -> float:
        if isinstance(self.draft_ms, TimeCurve):
            return self.draft_ms.ms(max(nodes, 1))
        return self.draft_ms

    def hop_ms(self, rows: Sequence[int]) -> list[float]:
        """The time after each stage in a step until what it sends has arrived, by its rows; the
        last one sends a verdict."""
        return [*(self.hop.ms(count) for count in rows[:-1]), self.hop.ms(min(rows[-1], 1))]

    def full_ms(self, rows: int) -> list[float]:
        """The time of each stage and of the hop after it, where all have batches of so many
        rows."""
        counts = [rows] * self.num_stages
        return [*map(sum, zip(self.stage_ms(counts), self.hop_ms(counts), strict=True))]
