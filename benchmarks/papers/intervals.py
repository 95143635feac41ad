"""95 % intervals of simulated and replayed figures, by batch means.

The tokens of a run are cut into batches of equal size, in the order in which they arrive. Tokens
near each other depend on each other, batches hardly do, so their means are taken as independent
draws of Student's distribution. Percentiles are not means: their intervals are those of resampled
batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

RESAMPLES = 200


@dataclass(frozen=True)
class Interval:
    """A figure and the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        digits = 1 if abs(self.value) >= 10 else 2
        value, low, high = (f"{each:.{digits}f}" for each in (self.value, self.low, self.high))
        return f"{value} [{low}, {high}]"

    def scaled(self, factor: float) -> Interval:
        """The same in another unit; `factor` is positive."""
        return Interval(self.value * factor, self.low * factor, self.high * factor)

    def plus(self, shift: float) -> Interval:
        """The same figure with a constant added."""
        return Interval(self.value + shift, self.low + shift, self.high + shift)

    @property
    def inverse(self) -> Interval:
        """Of the reciprocal of a positive figure."""
        return Interval(1 / self.value, 1 / self.high, 1 / self.low)


def student(freedom: int) -> float:
    """The .975 quantile of Student's distribution, within .002 from 4 degrees of freedom on.

    By its expansion about the normal one (Abramowitz and Stegun 26.7.5)."""
    if freedom < 4:
        raise ValueError(f"{freedom + 1} batches are too few for an interval; take 5 or more.")
    z = NormalDist().inv_cdf(0.975)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


def batches(values: Sequence[float] | np.ndarray, count: int) -> np.ndarray:
    """Consecutive values in `count` batches of equal size `[count, size]`; the last few that fill
    no batch are left out."""
    size = len(values) // count
    if not size:
        raise ValueError(f"{len(values)} values fill no {count} batches; take {count} or more.")
    return np.asarray(values, float)[: size * count].reshape(count, size)


def mean(batch_means: Sequence[float] | np.ndarray) -> Interval:
    """The mean of batches of equal size."""
    return ratio(batch_means, np.ones(len(batch_means)))


def ratio(
    numerators: Sequence[float] | np.ndarray, denominators: Sequence[float] | np.ndarray
) -> Interval:
    """The sum of the numerators over that of the denominators, which come in pairs."""
    above, below = np.asarray(numerators, float), np.asarray(denominators, float)
    if len(above) != len(below):
        raise ValueError(f"{len(above)} and {len(below)} batches make no pairs.")
    value = float(above.sum() / below.sum())
    deviation = float(np.std(above - value * below, ddof=1))
    half = student(len(above) - 1) * deviation / math.sqrt(len(above)) / abs(float(below.mean()))
    return Interval(value, value - half, value + half)


def percentile(samples: Sequence[np.ndarray], percent: float) -> Interval:
    """A percentile of all samples; the interval is of resampled batches (bootstrap)."""
    random = np.random.default_rng(0)
    drawn = random.integers(len(samples), size=(RESAMPLES, len(samples)))
    found = [np.percentile(np.concatenate([samples[i] for i in each]), percent) for each in drawn]
    low, high = np.percentile(found, (2.5, 97.5))
    whole = np.percentile(np.concatenate(list(samples)), percent)
    return Interval(float(whole), float(low), float(high))
