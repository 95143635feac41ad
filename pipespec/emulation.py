"""Emulated machines: ranks held to the times of another machine after their real computation.

It exists so that nine processes on two cores can show what the runtime does on nine GPUs.
Results under a pace are emulated and are labelled so everywhere. A rank that needs longer than
its pace over-runs it; over-runs are counted and shown, never hidden.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipespec.clock import monotonic_ns
from pipespec.errors import ConfigError
from pipespec.limits import MAX_COUNT, MAX_MS, check_number, check_whole

MAX_SCALE = 1e3
MAX_GBIT = 1e6
SLOWEST_GBIT = 1e-3
MAX_ROW_BYTES = 2**24


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
    def parse(cls, text: str) -> TimeCurve:
        """A curve from its points, as in "1:37.8 64:41"; a time alone is that of one row."""
        return cls(tuple(point(part) for part in text.split()))

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


def mean(curves: Sequence[TimeCurve], more: float = 0.0) -> TimeCurve:
    """The mean of several curves, and so many milliseconds more for any rows."""
    rows = sorted({count for curve in curves for count, _ in curve.points})
    if any(len(curve.points) > 1 for curve in curves):
        rows.append(rows[-1] + 1)  # beyond their ends they may go on otherwise
    return TimeCurve(
        tuple((n, sum(curve.ms(n) for curve in curves) / len(curves) + more) for n in rows)
    )


def point(text: str) -> tuple[int, float]:
    """A point of a time curve, "64:41"; a time alone is that of one row. Raises ConfigError."""
    rows, _, ms = text.rpartition(":")
    try:
        return int(rows or 1), float(ms)
    except ValueError as error:
        raise ConfigError(f"{text!r} is no time of a stage; write ROWS:MS, as in 64:41.") from error


@dataclass(frozen=True)
class Pace:
    """How long stages and draft last at least.

    Attributes:
        stage_ms: milliseconds of a stage's step by its rows: one number or curve
            (`TimeCurve.parse`) for all stages, or a list with one for each; 0: as fast as it goes.
        draft_ms: milliseconds of a draft round.
        mid_ms: milliseconds of a pass of the mid-size model of a cascade.
        jitter_ms: the mean of what a step of a stage lasts longer by chance, drawn for every
            stage and step from an exponential distribution.
        scale: multiplies every emulated time, links included. On a machine with few cores a
            longer time base leaves more room for the real computation; whoever reports times
            divides by it.
    """

    stage_ms: float | str | list[str] = 0.0
    draft_ms: float = 0.0
    mid_ms: float = 0.0
    jitter_ms: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("draft_ms", "mid_ms", "jitter_ms"):
            check_number(f"pace.{name}", getattr(self, name), 0, MAX_MS)
        check_number("pace.scale", self.scale, 0, MAX_SCALE, above=True)
        if not self.curves:
            raise ConfigError("pace.stage_ms is an empty list; give one time, or one per stage.")

    @cached_property
    def curves(self) -> tuple[TimeCurve, ...]:
        """One for all stages, or one per stage."""
        entries = self.stage_ms if isinstance(self.stage_ms, list) else [self.stage_ms]
        try:
            return tuple(TimeCurve.parse(str(entry)) for entry in entries)
        except ConfigError as error:
            raise ConfigError(f"pace.stage_ms: {error}") from error

    def check(self, num_stages: int) -> None:
        """Raise ConfigError unless there is a time for every stage."""
        if len(self.curves) not in (1, num_stages):
            raise ConfigError(
                f"pace.stage_ms has times of {len(self.curves)} stages, but "
                f"cluster.stages is {num_stages}."
            )

    def __bool__(self) -> bool:
        slow = any(ms for curve in self.curves for _, ms in curve.points)
        return slow or max(self.draft_ms, self.mid_ms, self.jitter_ms) > 0

    def of_stage(self, rank: int, step: int, rows: int) -> float:
        """Milliseconds of a stage's step with so many rows; no rows take no time."""
        if not rows:
            return 0.0
        ms = self.curves[(rank - 1) % len(self.curves)].ms(rows)
        if self.jitter_ms:
            ms += random.Random(f"{rank}:{step}").expovariate(1 / self.jitter_ms)
        return ms * self.scale

    @property
    def of_round(self) -> float:
        """Milliseconds of a draft round."""
        return self.draft_ms * self.scale

    @property
    def of_mid(self) -> float:
        """Milliseconds of a pass of the mid-size model."""
        return self.mid_ms * self.scale


@dataclass(frozen=True)
class Link:
    """An emulated network between any two ranks.

    Attributes:
        latency_ms: one way.
        gbit_per_s: what a batch's hidden states travel at; 0: at once.
        row_bytes: of a row's hidden states in the emulated model, such as 8192 in bfloat16.
    """

    latency_ms: float = 0.0
    gbit_per_s: float = 0.0
    row_bytes: int = 16384

    def __post_init__(self) -> None:
        check_number("link.latency_ms", self.latency_ms, 0, MAX_MS)
        if self.gbit_per_s != 0:
            hint = ", or 0 for no limit"
            check_number("link.gbit_per_s", self.gbit_per_s, SLOWEST_GBIT, MAX_GBIT, hint=hint)
        check_whole("link.row_bytes", self.row_bytes, 1, MAX_ROW_BYTES)

    def __bool__(self) -> bool:
        return self.latency_ms > 0 or self.gbit_per_s > 0

    def ms(self, rows: int) -> float:
        """Milliseconds on the way of a message with the hidden states of so many rows."""
        if not self.gbit_per_s:
            return self.latency_ms
        return self.latency_ms + rows * self.row_bytes * 8 / (self.gbit_per_s * 1e6)


def wait_until(start_ns: int, milliseconds: float) -> bool:
    """Sleep until `milliseconds` after `start_ns`; False: that moment had passed already."""
    if milliseconds == 0:
        return True
    left = start_ns + milliseconds * 1e6 - monotonic_ns()
    if left > 0:
        time.sleep(left / 1e9)
    return left >= 0
