"""Busy waiting: a thread that sleeps is woken tens of microseconds late. That is worth a core only
while a step is under way, so a wait spins for SPIN_S seconds at most."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

SLEEP, SPIN, AUTO = "sleep", "spin", "auto"
WAITS = (AUTO, SLEEP, SPIN)
# A longer wait is not for a step.
SPIN_S = 0.1


def should_spin(wait: str, ranks: int) -> bool:
    """Whether the `ranks` ranks of this host should spin. `wait` is `transport.wait`; with `auto`
    they spin if each has a core and Redis has another one."""
    return wait == SPIN or (wait == AUTO and len(os.sched_getaffinity(0)) > ranks)


def spin_until(ready: Callable[[], object], seconds: float = SPIN_S) -> bool:
    """Call `ready` until it returns a true value; False: it has not within `seconds`."""
    end = time.monotonic() + min(seconds, SPIN_S)
    while not ready():
        if time.monotonic() >= end:
            return False
        time.sleep(0)  # for the other threads of this process
    return True
