"""When each of many requests is handed in: at a rate, and never too many at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from pipespec.limits import MAX_COUNT, check_number, check_whole

# Requests per second: one in some days.
MIN_RATE = 1e-6


@dataclass(frozen=True)
class Load:
    """How many requests come at once, and how often one comes. Raises ConfigError.

    Attributes:
        concurrency: how many are handed in and not yet finished, at most; None: any number.
        request_rate: per second (of the emulated machine, if there is one), as a Poisson
            process; inf: each as soon as `concurrency` allows.
    """

    concurrency: int | None
    request_rate: float = math.inf

    def __post_init__(self) -> None:
        if self.concurrency is not None:
            check_whole("concurrency", self.concurrency, 1, MAX_COUNT)
        if self.request_rate != math.inf:
            check_number("request_rate", self.request_rate, MIN_RATE, MAX_COUNT, hint=", or inf")

    @classmethod
    def of(
        cls,
        concurrency: int | None = None,
        request_rate: float | None = None,
    ) -> Load:
        """What is meant by what was given: without anything, one request after another; with a
        rate alone, any number at once."""
        if request_rate is None:
            return cls(1 if concurrency is None else concurrency, math.inf)
        return cls(concurrency, request_rate)

    def due_s(self, count: int) -> list[float]:
        """When so many requests come, in seconds since the start.

        A Poisson process as in `vllm bench serve`, and scaled as there: the last one comes after
        `count` / rate seconds, so that the rate is exact.
        """
        if self.request_rate == math.inf:
            return [0.0] * count
        chance = Random(0)
        came = list(accumulate(chance.expovariate(1.0) for _ in range(count)))
        return [at / came[-1] * count / self.request_rate for at in came]


ONE_AT_A_TIME = Load(1)
