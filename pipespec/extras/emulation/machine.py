"""Emulated machines: ranks held to the times of another machine after their real computation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pipespec.errors import ConfigError
from pipespec.limits import MAX_COUNT, MAX_MS, check_number, check_whole
from pipespec.settings import check_settings, setting
from pipespec.timing.clock import StepClock, wait_until

MAX_SCALE = 1e3
# Rows for which the times of a mixture of experts are computed.
EXPERT_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass(frozen=True)
class TimeCurve:
    """Milliseconds that a stage takes for a batch of so many rows, `(rows, ms)` by rising rows.

    Between the points the time is linear; below the first it is constant; above the last it
    goes on as steeply as between the last two. Raises ConfigError.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        rows = [rows for rows, _ in self.points]
        if not rows or rows != sorted(set(rows)) or rows[0] < 1:
            raise ConfigError(
                f"A stage's times are given for {rows} rows, but must be for rising numbers from 1."
            )
        for _, ms in self.points:
            check_number("A stage's time in ms", ms, 0, MAX_MS)
        check_whole("The last number of rows with a stage's time", rows[-1], 1, MAX_COUNT)

    @classmethod
    def parse(cls, points: object, name: str = "stage_ms") -> TimeCurve:
        """A curve from its points, a list or "1:37.8 64:41"; a time alone is that of one row.
        `name`: of the setting."""
        texts = points if isinstance(points, list | tuple) else str(points).split()
        try:
            return cls(tuple(point(str(text)) for text in texts))
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error

    def ms(self, rows: int) -> float:
        """No rows take no time."""
        if rows == 0:
            return 0.0
        last, most = self.points[-1]
        if rows > last and len(self.points) > 1:
            earlier, less = self.points[-2]
            return most + (rows - last) * (most - less) / (last - earlier)
        counts, times = np.array(self.points, float).T
        return float(np.interp(rows, counts, times))


def with_experts(
    curve: TimeCurve, experts: int, chosen: int, share: float, overlap: float = 0.0
) -> TimeCurve:
    """The times of a stage whose layers are mixtures of experts (`experts_read`), from those if all
    rows chose the same; `share`: of the time of one row that its experts take. Raises ConfigError.
    """
    check_whole("The number of experts", experts, 1, MAX_COUNT)
    check_whole("The number of experts that a row chooses", chosen, 1, experts)
    check_number("The share of its time that a row's experts take", share, 0, 1)
    check_number("The overlap of the experts of rows", overlap, 0, 1)

    def ms(rows: int) -> float:
        read = experts_read(rows, experts, chosen, overlap) / chosen  # in those of one row
        return curve.ms(rows) + share * curve.ms(1) * (read - 1)

    return TimeCurve(tuple((rows, ms(rows)) for rows in EXPERT_ROWS))


def experts_read(rows: float, experts: int, chosen: int, overlap: float = 0.0) -> float:
    """How many experts of a layer a batch reads.

    w rows that choose k of E experts independently read E (1 - (1 - k / E)^w). Rows of a text
    choose more alike: they read as many as rows^(1 - overlap) independent ones. That is not
    derived, but fits what stages count.
    """
    return experts * (1 - (1 - chosen / experts) ** rows ** (1 - overlap))


def all_with_experts(
    curves: tuple[TimeCurve, ...], name: str, values: Sequence[float]
) -> tuple[TimeCurve, ...]:
    """`with_experts` of each, with the values of the setting `name`; none: the model is dense."""
    match values:
        case []:
            return curves
        case [experts, chosen, share, *rest] if len(rest) < 2 and experts % 1 == chosen % 1 == 0:
            return tuple(with_experts(c, int(experts), int(chosen), share, *rest) for c in curves)
    raise ConfigError(
        f"{name} is {list(values)}, but must be how many there are, how many a row chooses, their "
        "share of its time and, if known, how much alike rows choose, as in 256,8,0.9 or "
        "256,8,0.9,0.3."
    )


def point(text: str) -> tuple[int, float]:
    """A point of a time curve, "64:41"; a time alone is that of one row. Raises ConfigError."""
    rows, _, ms = text.rpartition(":")
    try:
        return int(rows or 1), float(ms)
    except ValueError as error:
        raise ConfigError(f"{text!r} is no time of a stage; write ROWS:MS, as in 64:41.") from error


@dataclass(frozen=True)
class EmulatedMachine(StepClock):
    """How long stages and draft last at least.

    On a machine with few cores a longer time base (`scale`) leaves more room for the real
    computation; reported times are divided by it.
    """

    stage_ms: Any = setting(
        0.0,
        "Least time of a stage's step, by its rows as in '1:37.8 64:41', for all stages or as a "
        "list with one entry for each; 0 is as fast as it goes.",
        "ms",
        kind=float | str | list[str],
    )
    experts: list[float] = setting(
        [],
        "For a mixture of experts: how many a layer has, how many of them a row chooses, their "
        "share of the time of one row and, if known, how much alike rows choose, from 0 "
        "(independently) to 1 (the same); stage_ms is then the time if all rows chose the same.",
    )
    draft_ms: Any = setting(
        0.0,
        "Least time of a draft round, by its nodes as in '1:9 64:12'; 0 is as fast as it goes.",
        "ms",
        kind=float | str,
    )
    jitter_ms: float = setting(
        0.0,
        "Mean of a random delay of every step of a stage, exponentially distributed.",
        "ms",
        limits=(0, MAX_MS),
    )
    scale: float = setting(
        1.0,
        "Multiplies every emulated time, so that a slow machine can keep up; reported times are "
        "divided by it.",
        limits=(0, MAX_SCALE),
        above=True,
    )

    def __post_init__(self) -> None:
        check_settings("emulate", self)
        if not self.curves:
            raise ConfigError("emulate.stage_ms is an empty list; give one time, or one per stage.")
        _ = self.draft  # raises now, before any rank starts

    @cached_property
    def curves(self) -> tuple[TimeCurve, ...]:
        """One for all stages, or one per stage."""
        entries = self.stage_ms if isinstance(self.stage_ms, list) else [self.stage_ms]
        curves = tuple(TimeCurve.parse(entry, "emulate.stage_ms") for entry in entries)
        return all_with_experts(curves, "emulate.experts", self.experts)

    @cached_property
    def draft(self) -> TimeCurve:
        """Of a draft round, by the nodes that it expands."""
        return TimeCurve.parse(self.draft_ms, "emulate.draft_ms")

    def check(self, num_stages: int) -> None:
        """Raise ConfigError unless there is a time for every stage."""
        if len(self.curves) not in (1, num_stages):
            raise ConfigError(
                f"emulate.stage_ms has times of {len(self.curves)} stages, but "
                f"cluster.stages is {num_stages}."
            )

    def __bool__(self) -> bool:
        slow = any(ms for curve in (*self.curves, self.draft) for _, ms in curve.points)
        return slow or self.jitter_ms > 0

    def wait_for_draft_round(self, start_ns: int, nodes: int) -> bool:
        return wait_until(start_ns, self.draft.ms(max(nodes, 1)) * self.scale)

    def wait_for_stage(self, start_ns: int, rank: int, step: int, rows: int) -> bool:
        return wait_until(start_ns, self.min_stage_ms(rank, step, rows))

    def min_stage_ms(self, rank: int, step: int, rows: int) -> float:
        """Milliseconds of a stage's step, jitter included; no rows take no time."""
        if not rows:
            return 0.0
        ms = self.curves[(rank - 1) % len(self.curves)].ms(rows)
        if self.jitter_ms:
            ms += random.Random(f"{rank}:{step}").expovariate(1 / self.jitter_ms)
        return ms * self.scale
