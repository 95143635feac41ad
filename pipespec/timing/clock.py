"""Clocks as arguments: the product passes the real ones, a test passes a counter."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

# Nanoseconds since an arbitrary moment that all processes of one machine share.
Clock = Callable[[], int]

monotonic_ns: Clock = time.monotonic_ns


def wait_until(start_ns: int, milliseconds: float) -> bool:
    """Sleep until `milliseconds` after `start_ns`; False: that moment had passed already."""
    if milliseconds == 0:
        return True
    left = start_ns + milliseconds * 1e6 - monotonic_ns()
    if left > 0:
        time.sleep(left / 1e9)
    return left >= 0


@dataclass(frozen=True)
class StepClock:
    """The least time that a rank's work takes. On a real machine, this class, that is none.

    The loops call a `wait_for_...` method when a piece of work that began at `start_ns` is done. A
    subclass that emulates another machine sleeps there until that machine would be done. The method
    returns False if the work took longer than it would there. `scale` is how many times longer
    everything takes here than is reported. A clock is true if it is one of another machine.
    """

    scale = 1.0

    def __bool__(self) -> bool:
        return False

    def check(self, num_stages: int) -> None:
        """Raise ConfigError unless the clock fits a pipeline of so many stages."""

    def wait_for_draft_round(self, start_ns: int, nodes: int) -> bool:
        """Wait for the end of a draft round of the head that expanded `nodes` nodes."""
        return True

    def wait_for_stage(self, start_ns: int, rank: int, step: int, rows: int) -> bool:
        """Wait for the end of a stage's computation of a batch of `rows` rows."""
        return True

    def min_stage_ms(self, rank: int, step: int, rows: int) -> float:
        """Milliseconds that a stage takes at least for a batch of `rows` rows."""
        return 0.0


REAL_TIME = StepClock()
