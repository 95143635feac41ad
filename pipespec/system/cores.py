"""How the ranks of a host share its cores, and busy waiting: a thread that sleeps is woken tens of
microseconds late. That is worth a core only while a step is under way, so a wait spins for SPIN_S
seconds at most."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

# The variable that the agent of a host sets if OMP_NUM_THREADS is not set there.
SHARES_CORES = "PIPESPEC_SHARES_CORES"
# How many times as many cores as the head a stage gets: a draft model is much smaller.
STAGE_SHARE = 4
SLEEP, SPIN, AUTO = "sleep", "spin", "auto"
WAITS = (AUTO, SLEEP, SPIN)
# A longer wait is not for a step.
SPIN_S = 0.1


@dataclass(frozen=True)
class CoreShares:
    head: int
    stage: int


def share_cores(cores: int, num_stages: int, *, has_head: bool) -> CoreShares:
    """The threads of the ranks of a host that compute on its CPU, of which `num_stages` are stages.
    All stages compute at once. The head has cores of its own where each stage has two and more;
    elsewhere it takes one thread."""
    if not num_stages:
        return CoreShares(cores, cores)
    if not has_head:
        return CoreShares(1, max(1, cores // num_stages))
    if cores <= 2 * num_stages:
        return CoreShares(1, max(1, cores // num_stages))
    head = max(1, cores // (1 + STAGE_SHARE * num_stages))
    return CoreShares(head, (cores - head) // num_stages)


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


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
