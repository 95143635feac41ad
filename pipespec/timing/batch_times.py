"""Measured times of batches by their rows and by the KV slots that they read, as exponential moving
averages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

# Samples that an average remembers: a newer one weighs 1/MEMORY.
MEMORY = 64

# The ratio of one profiled size to the one before.
PROFILED_RATIO = 4

# KV slots must explain this share of the variance of times, or their effect counts as chance.
LEAST_EXPLAINED = 0.1
# Reading KV slots must take this share of a batch's time, or it counts as free.
LEAST_SHARE = 0.01

# Rows and milliseconds, by rising rows; rows that are means need not be whole.
Points = tuple[tuple[float, float], ...]


def ms_at(points: Points, rows: float) -> float:
    """The milliseconds of so many rows, interpolated."""
    known, ms = np.array(points).T
    return float(np.interp(rows, known, ms))


class BatchTimes(NamedTuple):
    """The measured times of batches.

    Attributes:
        points: mean milliseconds by rows, without the time for KV slots.
        slot_ms: milliseconds that each KV slot adds.
        slots: KV slots that a batch reads on average."""

    points: Points = ()
    slot_ms: float = 0.0
    slots: float = 0.0

    def with_slots(self) -> Points:
        """The mean milliseconds by rows, with the time for the average number of KV slots."""
        return tuple((rows, ms + self.slot_ms * self.slots) for rows, ms in self.points)

    def scaled(self, factor: float) -> BatchTimes:
        """The same times multiplied by `factor`."""
        points = tuple((rows, ms * factor) for rows, ms in self.points)
        return BatchTimes(points, self.slot_ms * factor, self.slots)


NO_TIMES = BatchTimes()


@dataclass(slots=True)
class Ema:
    """An exponential moving average; the first `memory` samples have equal weights."""

    memory: int = MEMORY
    value: float | None = None
    samples: int = 0

    def add(self, sample: float) -> None:
        self.samples += 1
        old = sample if self.value is None else self.value
        self.value = old + (sample - old) / min(self.samples, self.memory)


@dataclass(slots=True)
class LinearTimes:
    """Milliseconds as a linear function of a count, fitted to the last samples."""

    samples: int = 0
    count: float = 0.0  # means
    ms: float = 0.0
    _variance: float = 0.0
    _covariance: float = 0.0

    def add(self, count: float, ms: float) -> None:
        self.samples += 1
        new = 1 / min(self.samples, MEMORY)
        by_count, by_ms = count - self.count, ms - self.ms
        self.count += new * by_count
        self.ms += new * by_ms
        self._variance = (1 - new) * (self._variance + new * by_count * by_count)
        self._covariance = (1 - new) * (self._covariance + new * by_count * by_ms)

    @property
    def each_ms(self) -> float:
        """What one more adds; never less than nothing, nor so much that none would take less."""
        if self._covariance <= 0 or not self.count:
            return 0.0
        return min(self._covariance / self._variance, self.ms / self.count)


def profiled_sizes(most: int) -> Iterator[int]:
    """Rows of the batches, up to `most`, that a stage measures before the first request."""
    rows = 1
    while rows < most:
        yield rows
        rows *= PROFILED_RATIO
    yield most


def size_bucket(rows: int) -> int:
    """The largest batch in the same bucket as one of so many rows: buckets end at powers of two, as
    GPUs take about the same time up to these."""
    return 1 << (rows - 1).bit_length()


@dataclass(slots=True)
class _SizeStats:
    """The batches of one bucket: means and covariances of rows, slots and times."""

    samples: int = 0
    mean: np.ndarray = field(default_factory=lambda: np.zeros(3))
    covariance: np.ndarray = field(default_factory=lambda: np.zeros((3, 3)))

    def add(self, rows: int, slots: int, ms: float) -> None:
        self.samples += 1
        new = 1 / min(self.samples, MEMORY)
        delta = (rows, slots, ms) - self.mean
        self.mean = self.mean + new * delta
        self.covariance = (1 - new) * (self.covariance + np.outer(new * delta, delta))


class RowTimes:
    """Measures the times of batches, averaged by bucket (`size_bucket`)."""

    def __init__(self) -> None:
        self._by_size: dict[int, _SizeStats] = {}
        self._slots = Ema()

    def add(self, rows: int, ms: float, slots: int = 0) -> None:
        """Add a batch of one row or more that read so many KV slots."""
        self._by_size.setdefault(size_bucket(rows), _SizeStats()).add(rows, slots, ms)
        self._slots.add(slots)

    def points(self, slot_ms: float = 0.0) -> Points:
        """The mean times without the time for KV slots; they rise with the rows."""
        return _whole(
            (rows, max(ms - slot_ms * slots, 0.0), min(size.samples, MEMORY))
            for size in self._by_size.values()
            for rows, slots, ms in [size.mean.tolist()]
        )

    def measured(self) -> BatchTimes:
        slot_ms = self._slot_ms()
        return BatchTimes(self.points(slot_ms), slot_ms, self._slots.value or 0.0)

    def _slot_ms(self) -> float:
        """Milliseconds per KV slot, by least squares of times on rows and slots within buckets.

        0 where the slots explain hardly anything, only correlate with the rows, or take hardly any
        time.
        """
        sizes = self._by_size.values()
        total = sum((size.covariance for size in sizes), np.zeros((3, 3)))
        (rows, rows_slots, rows_ms), (_, slots_slots, slots_ms), (*_, ms_ms) = total.tolist()
        share = rows_slots / rows if rows else 0.0
        slots = slots_slots - share * rows_slots
        ms = slots_ms - share * rows_ms
        left = ms_ms - (rows_ms**2 / rows if rows else 0.0)
        if slots <= 0 or ms <= 0 or ms * ms <= LEAST_EXPLAINED * slots * left:
            return 0.0
        share = ms / slots * (self._slots.value or 0.0) / max(float(size.mean[2]) for size in sizes)
        return ms / slots if share >= LEAST_SHARE else 0.0


def mean_by_size(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The mean rows and the mean of what was measured with them, for each bucket, by rising
    rows."""
    by_size: dict[int, list[tuple[float, float]]] = {}
    for rows, value in points:
        by_size.setdefault(size_bucket(math.ceil(rows)), []).append((rows, value))
    return [
        (sum(rows for rows, _ in like) / len(like), sum(value for _, value in like) / len(like))
        for _, like in sorted(by_size.items())
    ]


def merge_times(measured: Iterable[BatchTimes]) -> BatchTimes:
    """Merge the measurements of several stages: the mean for each bucket.

    The first stage computes whole batches, later ones the rows that verdicts have left, so together
    they have measured more sizes.
    """
    found = list(measured)
    count = max(len(found), 1)
    return BatchTimes(
        _whole((*point, 1) for point in mean_by_size(p for each in found for p in each.points)),
        sum(each.slot_ms for each in found) / count,
        sum(each.slots for each in found) / count,
    )


def rising(measured: Iterable[tuple[float, float, float]]) -> Points:
    """The nearest times that never fall as rows rise, by least squares (isotonic regression, pool
    adjacent violators), given rows, milliseconds and the weight of each.

    So a size that was slow once, with little weight, does not make all larger ones slow.
    """
    pools: list[tuple[float, float, list[float]]] = []  # milliseconds, weight, rows
    for rows, ms, weight in sorted(measured):
        pool = (ms, weight, [rows])
        while pools and pools[-1][0] > pool[0]:
            before = pools.pop()
            both = before[1] + pool[1]
            mean = (before[0] * before[1] + pool[0] * pool[1]) / both
            pool = (mean, both, before[2] + pool[2])
        pools.append(pool)
    return tuple((rows, ms) for ms, _, all_rows in pools for rows in all_rows)


def _whole(measured: Iterable[tuple[float, float, float]]) -> Points:
    return tuple((round(rows), ms) for rows, ms in rising(measured))


def pack(measured: BatchTimes) -> str:
    """As a string without spaces, such as "1:5.25,16:8;0.0001;350"; empty without measurements."""
    if not measured.points:
        return ""
    points = ",".join(f"{rows}:{ms:.6g}" for rows, ms in measured.points)
    return f"{points};{measured.slot_ms:.6g};{measured.slots:.6g}"


def unpack(packed: str) -> BatchTimes:
    """The inverse of `pack`."""
    if not packed:
        return NO_TIMES
    points, slot_ms, slots = packed.split(";")
    pairs = (part.split(":") for part in points.split(",") if part)
    known = tuple((int(rows), float(ms)) for rows, ms in pairs)
    return BatchTimes(known, float(slot_ms), float(slots))
