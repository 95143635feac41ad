"""Waiting without sleeping: who sleeps is woken tens of microseconds after what he waits for.

That is worth a core only while a step is under way, so nobody waits like that for long.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

SLEEP, SPIN, AUTO = "sleep", "spin", "auto"
WAITS = (AUTO, SLEEP, SPIN)
# After so long it is no step that is waited for.
SPIN_S = 0.1


def spins(wait: str, ranks: int) -> bool:
    """Whether ranks wait like that, of which so many are on this host: with `auto` if each has a
    core, and Redis one more."""
    return wait == SPIN or (wait == AUTO and len(os.sched_getaffinity(0)) > ranks)


def spin(ready: Callable[[], object], seconds: float = SPIN_S) -> bool:
    """Look again and again whether something is ready, for so many seconds; whether it was."""
    end = time.monotonic() + min(seconds, SPIN_S)
    while not ready():
        if time.monotonic() >= end:
            return False
        time.sleep(0)  # for the other threads of this process
    return True
