"""When each of many requests is handed in: at a rate, and never too many at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Any

from pipespec.limits import MAX_COUNT, MAX_SEED, check_number, check_whole

# Requests per second: one in some days.
MIN_RATE = 1e-6


@dataclass(frozen=True)
class Load:
    """How many requests come at once, and how often one comes.

    Attributes:
        concurrency: how many are handed in and not yet finished, at most; None: any number.
        request_rate: per second (of the emulated machine, if there is one), as a Poisson
            process; inf: each as soon as `concurrency` allows.
        arrival_seed: of that process.
    """

    concurrency: int | None
    request_rate: float
    arrival_seed: int

    @classmethod
    def of(
        cls,
        concurrency: int | None = None,
        request_rate: float | None = None,
        arrival_seed: int = 0,
    ) -> Load:
        """What is meant by what was given: without anything, one request after another; with a
        rate alone, any number at once. Raises ConfigError."""
        if concurrency is not None:
            check_whole("concurrency", concurrency, 1, MAX_COUNT)
        check_whole("arrival_seed", arrival_seed, 0, MAX_SEED)
        if request_rate is None:
            return cls(concurrency or 1, math.inf, arrival_seed)
        check_rate(request_rate)
        return cls(concurrency, request_rate, arrival_seed)


@dataclass(frozen=True)
class Arrivals:
    """When requests are handed in, in their order.

    Attributes:
        due_s: when each comes, in seconds since the start.
        concurrency: how many may be handed in and not yet finished; None: any number. One that
            comes when there are as many waits until one finishes.
    """

    due_s: Sequence[float]
    concurrency: int | None

    @classmethod
    def of(cls, load: Load, count: int) -> Arrivals:
        """Those of so many requests under a load."""
        return cls(due_s(count, load.request_rate, load.arrival_seed), load.concurrency)

    def wait_s(self, handed_in: int, unfinished: int, now_s: float) -> float | None:
        """How long to wait before the next is handed in; 0: it is time.

        None: nothing can be handed in before one finishes, or all are.
        """
        if handed_in == len(self.due_s):
            return None
        if self.concurrency is not None and unfinished >= self.concurrency:
            return None
        return max(0.0, self.due_s[handed_in] - now_s)


def check_rate(rate: Any) -> None:
    """Raise ConfigError unless so many requests per second can be handed in."""
    if rate != math.inf:
        check_number("request_rate", rate, MIN_RATE, MAX_COUNT, hint=", or inf")


def due_s(count: int, rate: float, seed: int) -> list[float]:
    """When so many requests come at `rate` per second, in seconds since the start; inf: at once.

    A Poisson process as in `vllm bench serve`, and scaled as there: the last one comes after
    `count` / `rate` seconds, so that the rate is exact for every seed.
    """
    if rate == math.inf:
        return [0.0] * count
    chance = Random(seed)
    came = list(accumulate(chance.expovariate(1.0) for _ in range(count)))
    return [at / came[-1] * count / rate for at in came]
