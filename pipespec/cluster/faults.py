"""What ended epochs, and how long a cluster took to go on: counted for as long as its log lasts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum


class FaultKind(StrEnum):
    """What was wrong, by whoever noticed it first; that a worker has ended may come later."""

    WORKER_ENDED = "worker_ended"  # a signal ended it
    WORKER_SILENT = "worker_silent"  # its lease ran out
    LINK_BROKE = "link_broke"  # a worker lost its neighbour, or Redis
    STEP_STALLED = "step_stalled"  # no step was completed, though all ranks were there
    REDIS_GONE = "redis_gone"  # it ended, hung, or could not be reached
    STAYED_AWAY = "stayed_away"  # others took the place of a lost worker


# The names of the counts, in the totals of the log.
FAULTS, RECOVERIES, RESUMPTIONS = "faults", "recoveries", "resumptions"
RECOVERY_NS, RESUMPTION_NS = "recovery_ns", "resumption_ns"


@dataclass(frozen=True)
class Fault:
    """What ended an epoch; `at_s` is on the monotonic clock."""

    epoch: int
    kind: FaultKind
    reason: str
    at_s: float


class FaultRecord:
    """Faults and what they cost. Holds no clock: moments are told to it, in seconds.

    A fault is counted once all ranks are there again, or when the next one happens: that a link
    broke is often heard before the end of the worker that held it (`explain`). From the first
    fault on a cluster is down until all ranks are there: a *recovery*. If requests were decoded
    then, it is silent until any of them has a token more: a *resumption*.

    Args:
        known: the counts that this record has made before, of the same log; others are left out.
    """

    def __init__(self, known: Mapping[str, int]):
        own = {RECOVERIES, RESUMPTIONS, RECOVERY_NS, RESUMPTION_NS}
        own |= {f"{FAULTS}/{kind}" for kind in FaultKind}
        self.counts = Counter({name: known[name] for name in own & known.keys()})
        self.faults: list[Fault] = []
        self.lengths: dict[int, int] = {}  # of those that were decoded when it became silent
        self._counted = True  # whether the newest fault is
        self._down_since: float | None = None
        self._silent_since = 0.0

    def note(self, fault: Fault) -> None:
        """An epoch must end."""
        self._count()
        self.faults.append(fault)
        self._counted = False
        if self._down_since is None:
            self._down_since = fault.at_s

    def explain(self, kind: FaultKind) -> None:
        """It turns out why a link broke."""
        if not self._counted and self.faults[-1].kind is FaultKind.LINK_BROKE:
            self.faults[-1] = replace(self.faults[-1], kind=kind)

    def begun(self, lengths: Mapping[int, int]) -> None:
        """The next epoch has begun; the lengths of the sequences that the last one decoded."""
        if lengths and not self.lengths:
            self.lengths = dict(lengths)
            self._silent_since = self.faults[-1].at_s

    def complete(self, now: float) -> None:
        """All ranks are there."""
        self._count()
        if self._down_since is not None:
            self.counts[RECOVERIES] += 1
            self.counts[RECOVERY_NS] += round((now - self._down_since) * 1e9)
            self._down_since = None

    def heard(self, lengths: Mapping[int, int], now: float) -> None:
        """The lengths of the same sequences now; those that the log has forgotten are left out."""
        if any(length > self.lengths.get(number, length) for number, length in lengths.items()):
            self.counts[RESUMPTIONS] += 1
            self.counts[RESUMPTION_NS] += round((now - self._silent_since) * 1e9)
            self.lengths = {}

    def leave(self) -> None:
        """Nobody waits for a token any more."""
        self.lengths = {}

    def _count(self) -> None:
        if not self._counted:
            self.counts[f"{FAULTS}/{self.faults[-1].kind}"] += 1
            self._counted = True
