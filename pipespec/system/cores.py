"""How the ranks of a host share its cores, and for how long a thread had one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

# The variable that the agent of a host sets if OMP_NUM_THREADS is not set there.
SHARES_CORES = "PIPESPEC_SHARES_CORES"
# How many times as many cores as the head a stage gets: a draft model is much smaller.
STAGE_SHARE = 4


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


def processor_times(thread: Path) -> tuple[int, int]:
    """Nanoseconds for which a thread, a folder of /proc, had a processor, and waited for one.
    Raises OSError if it has ended, or the system does not say."""
    had, waited, _ = map(int, (thread / "schedstat").read_text().split())
    return had, waited
