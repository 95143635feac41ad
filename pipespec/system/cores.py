"""How the ranks of a host share its cores, and busy waiting: a thread that sleeps is woken tens of
microseconds late. That is worth a core only while a step is under way, so a wait spins for SPIN_S
seconds at most."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# The variable that the agent of a host sets if OMP_NUM_THREADS is not set there.
SHARES_CORES = "PIPESPEC_SHARES_CORES"
# How many times as many cores as the head a stage gets: a draft model is much smaller.
STAGE_SHARE = 4
SLEEP, SPIN, AUTO = "sleep", "spin", "auto"
WAITS = (AUTO, SLEEP, SPIN)
# A longer wait is not for a step.
SPIN_S = 0.1
# A spinning thread that waited for a core for more than this share of its time has none to itself,
# and sleeps for so many seconds instead; each time that this goes on, twice as long, up to
# MOST_REST_S. It looks after LOOK_S of spinning.
MOST_WAITED, REST_S, MOST_REST_S, LOOK_S = 0.02, 10.0, 300.0, 0.1


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


def waited_s() -> float:
    """Seconds for which this thread has waited for a processor; 0: the system does not say."""
    try:
        return processor_times(Path("/proc/thread-self"))[1] / 1e9
    except OSError:
        return 0.0


class Spinner:
    """Busy waiting of a thread. Unless it is `always` to spin, it does so as long as it has a core
    to itself: other processes may use the cores too, among them ranks that count as other hosts.

    `clock` gives the time in seconds, `waited` for how long this thread has waited for a core.
    """

    def __init__(
        self,
        *,
        always: bool = False,
        clock: Callable[[], float] = time.monotonic,
        waited: Callable[[], float] = waited_s,
    ) -> None:
        self._always, self._clock, self._waited = always, clock, waited
        self._spun = 0.0  # seconds since the last look
        self._since = 0.0, 0.0  # by both clocks, when it began to spin after that
        self._rest_s, self._rests_until = REST_S, 0.0

    def until(self, ready: Callable[[], object], seconds: float = SPIN_S) -> bool:
        """Call `ready` until it returns a true value; False: it has not within `seconds`, or this
        thread should sleep meanwhile."""
        begun = now = self._clock()
        if begun < self._rests_until:
            return False
        if not self._spun:
            self._since = begun, self._waited()
        while not (found := bool(ready())) and now - begun < min(seconds, SPIN_S):
            time.sleep(0)  # for the other threads of this process
            now = self._clock()
        self._spun += now - begun
        if self._spun >= LOOK_S and not self._always:
            self._look(now)
        return found

    def _look(self, now: float) -> None:
        self._spun = 0.0
        if self._waited() - self._since[1] <= MOST_WAITED * (now - self._since[0]):
            self._rest_s = REST_S
            return
        self._rests_until = now + self._rest_s
        self._rest_s = min(2 * self._rest_s, MOST_REST_S)


def make_spinner(wait: str, ranks: int) -> Spinner | None:
    """How the `ranks` ranks of this host wait; None: they sleep. `wait` is `transport.wait`; with
    `auto` they spin if each has a core and Redis has another one."""
    if wait == SPIN or (wait == AUTO and len(os.sched_getaffinity(0)) > ranks):
        return Spinner(always=wait == SPIN)
    return None
