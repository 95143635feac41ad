"""What a step takes by the rows in the pipeline, learnt from steps as they ran.

Stages measure their batches one by one. Where ranks share cores, links or a device, a step takes
longer than any of them, so here whole steps are measured. Durations are arguments.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pipespec.timing.batch_times import Ema, Points, ms_at, rising

# Steps that a size remembers; of their times, this share at either end counts as chance.
SAMPLES, TRIMMED = 32, 1 / 8
# Times by rows are computed anew after so many steps, and for a size with no more samples at once.
RENEWED_EVERY = 8
# What was known before the first step weighs as many steps; it counts alone again for a size that
# no step has had for so long.
PRIOR_WEIGHT, STALE = 2, 4096
# Steps after which a size is known well enough to need no trial; of so many times as many steps as
# a trial takes, one is a trial.
KNOWN, TRIAL_SHARE = 3, 2
# How often a size is tried at most, also if batches had no room for so many rows.
MOST_TRIALS = 2
# A trial has at most so many times the rows of the target size, or at least that share of them;
# more rows only if they seem to take at most so many times as long.
TRIAL_REACH, NO_DEARER = (2, 1 / 8), 1.25
# Steps that compare whether the sum of the rows in the pipeline explains times better than the
# largest batch, and the share by which it must.
COMPARED, BETTER = 16, 0.97
# What a step takes at least: a stage may seem to take no time beside that for KV slots.
LEAST_MS = 1e-3
# A step that lasts longer than so many times what its rows take counts as one that does not.
OUTLIER = 4.0


class SizeTimes:
    """Milliseconds of a step by rows: a mean without outliers for each size, sizes being half
    powers of two, blended with what was known before."""

    def __init__(self, known: Points = (), error: Ema | None = None):
        """`known`: from an earlier run, of which the shape is taken over, not the speed."""
        self._known = known
        self._adopted = False  # whether that is of another way of decoding
        self._stages: Points = ()
        self._sizes: dict[int, deque[tuple[float, float]]] = {}
        self._means: dict[int, tuple[float, float]] = {}  # rows and milliseconds
        self._last: dict[int, int] = {}  # when a size was measured
        self._steps = 0
        self.error = error or Ema()  # of predictions, in ms
        self.points: Points = known

    def adopt(self, other: SizeTimes, share: float = 1.0) -> None:
        """Take over the shape of other times, of which these are such a share, if nothing is known
        of these."""
        if not self._known and (other._known or other._means):
            self._known = tuple((rows, ms * share) for rows, ms in other.measured)
            self._adopted = True
            self.points = self._points()

    def set_stage_times(self, stages: Points) -> None:
        """Take over what a stage takes: the first guess."""
        if stages != self._stages:
            self._stages = stages
            self.points = self._points()

    def add(self, rows: float, ms: float) -> None:
        if self.points:
            predicted = self.at(rows)
            self.error.add(min(abs(ms - predicted), predicted))
        self._steps += 1
        size = _size(rows)
        samples = self._sizes.setdefault(size, deque(maxlen=SAMPLES))
        samples.append((rows, ms))
        self._last[size] = self._steps
        took = sorted(each for _, each in samples)
        cut = round(TRIMMED * len(took))
        kept = took[cut : len(took) - cut]
        mean_rows = sum(each for each, _ in samples) / len(samples)
        self._means[size] = mean_rows, sum(kept) / len(kept)
        for old in [each for each, last in self._last.items() if self._steps - last > STALE]:
            del self._sizes[old], self._means[old], self._last[old]
        # Half a millisecond, and one of many steps changes little.
        if len(samples) <= RENEWED_EVERY or self._steps % RENEWED_EVERY == 0:
            self.points = self._points()

    @property
    def measured(self) -> Points:
        """The times of sizes that this run or an earlier one has measured."""
        sizes = {*self._means, *(_size(rows) for rows, _ in self._known)}
        return tuple(point for point in self.points if _size(point[0]) in sizes)

    def at(self, rows: float) -> float:
        """Milliseconds of a step with so many rows."""
        return ms_at(self.points, rows)

    def samples(self, rows: float) -> int:
        """Steps of about so many rows."""
        return len(self._sizes.get(_size(rows), ()))

    def is_known(self, rows: float) -> bool:
        """Whether steps of about so many rows were measured, in this run or an earlier one."""
        size = _size(rows)
        return self.samples(rows) >= KNOWN or any(_size(each) == size for each, _ in self._known)

    def _points(self) -> Points:
        """Rising times of all sizes that are known.

        Those of an earlier run are scaled by how fast the machine is now. To those of a stage, and
        of another way of decoding, what steps take longer is added.
        """
        means = sorted(self._means.values())
        known = self._known
        again = [mean for mean in means if known and _size(mean[0]) <= _size(known[-1][0])]
        if again:  # larger ones say nothing about those that are known
            before = np.interp([rows for rows, _ in again], *np.array(known).T)
            took = np.array([ms for _, ms in again])
            ratio = float(np.median(took / np.maximum(before, 1e-6)))
            more = float(np.median(took - before))
            if self._adopted:  # the rows cost what they did there
                known = tuple((rows, max(ms + more, ms * min(ratio, 1) / 2)) for rows, ms in known)
            else:
                known = tuple((rows, ms * ratio) for rows, ms in known)
        base = dict(known)
        sizes = {_size(rows) for rows in base}
        measured = sorted({**base, **dict(means)}.items())
        if self._stages:
            of_stage, stage_ms = np.array(self._stages).T
            at = [rows for rows, _ in measured]
            guess = np.interp(at, of_stage, stage_ms)
            took = np.array([ms for _, ms in measured])
            # Steps that are shorter than stages seemed say how much faster these are.
            faster = np.minimum(took / np.maximum(guess, 1e-6), 1)
            more = np.maximum(took - guess, 0)
            for rows, ms in self._stages:
                if not at:
                    base[rows] = ms
                elif _size(rows) not in sizes:
                    added = np.interp(rows, at, more) * min(ms / max(guess[0], 1e-6), 1)
                    base[rows] = float(ms * np.interp(rows, at, faster) + added)
        points = []
        for size, (rows, ms) in self._means.items():
            samples = len(self._sizes[size])
            if base:
                prior = ms_at(tuple(sorted(base.items())), rows)
                ms = (PRIOR_WEIGHT * prior + samples * ms) / (PRIOR_WEIGHT + samples)
            points.append((rows, ms, PRIOR_WEIGHT + samples))
        sizes = set(self._means)
        points += [
            (rows, ms, PRIOR_WEIGHT) for rows, ms in base.items() if _size(rows) not in sizes
        ]
        return rising((rows, max(ms, LEAST_MS), weight) for rows, ms, weight in points)


def _size(rows: float) -> int:
    return round(2 * math.log2(max(rows, 1e-3)))


class LearntTimes:
    """The times of steps by the rows in the pipeline.

    Where every stage has its own cores a step lasts as long as its largest batch takes; where they
    share them, as long as all rows together. Both are learnt, and the one that predicts better is
    used. In either, rows are those that entered, of which verdicts may have ruled out some.
    """

    def __init__(self, num_stages: int, stored: Mapping[str, Any] | None = None):
        self.num_stages = num_stages
        stored = stored or {}
        self._by_largest, self._by_mean = (
            SizeTimes(
                tuple((float(rows), float(ms)) for rows, ms in stored.get(name, ())),
                Ema(value=stored.get(f"{name}_error"), samples=COMPARED if stored else 0),
            )
            for name in ("largest", "mean")
        )

    def add(self, in_flight: Sequence[int], ms: float) -> None:
        """Add a step during which batches of so many rows were in the pipeline."""
        rows = sum(in_flight)
        if rows:
            if self.times.points:
                ms = min(ms, OUTLIER * self.times.at(self.rows_of(in_flight)))
            self._by_largest.add(max(in_flight), ms)
            if self.num_stages > 1:
                self._by_mean.add(rows / self.num_stages, ms)

    def set_stage_times(self, stages: Points) -> None:
        """Take over what a stage takes: the first guess."""
        self._by_largest.set_stage_times(stages)
        self._by_mean.set_stage_times(stages)

    def adopt(self, other: LearntTimes) -> None:
        """Take over the shape of other times, where nothing is known of these. A batch takes as
        long until its verdict in either; a step is what it takes by the batches in flight."""
        share = other.num_stages / self.num_stages
        self._by_largest.adopt(other._by_largest, share)
        self._by_mean.adopt(other._by_mean, share)
        if other.by_mean and not self._by_mean.error.samples:
            self._by_mean.error = replace(other._by_mean.error)
            self._by_largest.error = replace(other._by_largest.error)

    @property
    def by_mean(self) -> bool:
        """Whether times follow the mean of the batches in the pipeline, not the largest."""
        mean, largest = self._by_mean.error, self._by_largest.error
        if self.num_stages == 1 or min(mean.samples, largest.samples) < COMPARED:
            return False
        return (mean.value or 0.0) < BETTER * (largest.value or 0.0)

    @property
    def times(self) -> SizeTimes:
        """Those by which steps are predicted: of steps whose batches all have so many rows."""
        return self._by_mean if self.by_mean else self._by_largest

    def rows_of(self, in_flight: Sequence[int]) -> float:
        """By what `times` counts a step."""
        return sum(in_flight) / self.num_stages if self.by_mean else max(in_flight)

    def stored(self) -> dict[str, Any]:
        parts = {"largest": self._by_largest, "mean": self._by_mean}
        errors = {f"{name}_error": each.error.value for name, each in parts.items()}
        return {name: each.measured for name, each in parts.items()} | errors


class SizeTrials:
    """A little deliberate variation of the rows, while it is not known what near sizes take.

    One batch of a lone stage, in a longer pipeline all batches of a pass, has the size that is to
    be tried. It ends by itself: each size is tried as long as it is unknown, and no more than
    MOST_TRIALS times.
    """

    def __init__(self, num_stages: int):
        self.length = 1 if num_stages == 1 else num_stages + KNOWN
        self.pending = False  # whether sizes are to be tried
        self._steps = 0
        self._rows: int | None = None
        self._tried: dict[int, int] = {}

    def next_rows(self, times: SizeTimes, target: int, most: int) -> int | None:
        """The size of this step's batch; None: the best one."""
        up, down = TRIAL_REACH
        unknown = [
            rows
            for rows in (1 << power for power in range(most.bit_length()))
            if down * target <= rows <= up * target
            and _size(rows) != _size(target)
            and (rows < target or times.at(rows) <= NO_DEARER * times.at(target))
            and not times.is_known(rows)
            and self._tried.get(rows, 0) < MOST_TRIALS
        ]
        self.pending = bool(unknown)
        self._steps += 1
        turn = self._steps % (TRIAL_SHARE * self.length)
        if turn == 0:
            self._rows = min(
                unknown, key=lambda rows: (self._tried.get(rows, 0), -rows), default=None
            )
            if self._rows is not None:
                self._tried[self._rows] = self._tried.get(self._rows, 0) + 1
        return self._rows if turn < self.length else None
