"""Counts faults of a cluster and the time it took to recover, for as long as its log exists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum


class FaultKind(StrEnum):
    """The first sign of a fault. That a worker has ended may be reported later."""

    WORKER_ENDED = "worker_ended"  # a signal ended it
    WORKER_SILENT = "worker_silent"  # it made no progress, or its host gave no sign of life
    LINK_BROKE = "link_broke"  # a worker lost its neighbour, or Redis
    STEP_STALLED = "step_stalled"  # all ranks waited, though a request was running
    REDIS_GONE = "redis_gone"  # it ended, hung, or could not be reached
    STAYED_AWAY = "stayed_away"  # other workers replaced a lost one


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


class FaultStats:
    """Counts of faults, recoveries and resumptions, on top of those that are `known`. Callers pass
    the time, in seconds. A fault is counted once all ranks have joined again, or when the next
    fault happens: a broken link is often reported before the end of the worker that held it
    (`reclassify`). That a lost worker stays away is no other fault than its loss (`of_loss`: the
    newest is of this kind), whose reason comes first.

    A *recovery* lasts from the first fault until all ranks have joined, and if requests were
    running then, a *resumption* until any of them has a new token."""

    def __init__(self, known: Mapping[str, int]):
        own = {RECOVERIES, RESUMPTIONS, RECOVERY_NS, RESUMPTION_NS}
        own |= {f"{FAULTS}/{kind}" for kind in FaultKind}
        self.counts = Counter({name: known[name] for name in own & known.keys()})
        self.faults: list[Fault] = []
        self.silent_lengths: dict[int, int] = {}  # of the sequences that were running then
        self._counted = True  # whether the newest fault is
        self.of_loss = False
        self._down_since: float | None = None
        self._silent_since = 0.0

    def record_fault(self, fault: Fault) -> None:
        self.of_loss = fault.kind is FaultKind.STAYED_AWAY and not self._counted
        if fault.kind is not FaultKind.STAYED_AWAY:
            self._count()
        elif self.of_loss:
            fault = replace(fault, reason=f"{self.faults[-1].reason}; {fault.reason}")
        self.faults.append(fault)
        self._counted = False
        if self._down_since is None:
            self._down_since = fault.at_s

    def ended(self, epoch: int) -> bool:
        return bool(self.faults) and self.faults[-1].epoch == epoch

    def reclassify(self, kind: FaultKind, reason: str) -> bool:
        """Set kind and reason of the newest fault, once it is known why a link broke; whether it
        was one."""
        if self._counted or self.faults[-1].kind is not FaultKind.LINK_BROKE:
            return False
        self.faults[-1] = replace(self.faults[-1], kind=kind, reason=reason)
        return True

    def begin_epoch(self, lengths: Mapping[int, int]) -> None:
        """Begin the next epoch; `lengths`: of the sequences of the last one, in tokens."""
        if lengths and not self.silent_lengths:
            self.silent_lengths = dict(lengths)
            self._silent_since = self.faults[-1].at_s

    def all_ranks_joined(self, now: float) -> None:
        self._count()
        if self._down_since is not None:
            self.counts[RECOVERIES] += 1
            self.counts[RECOVERY_NS] += round((now - self._down_since) * 1e9)
            self._down_since = None

    def update_lengths(self, lengths: Mapping[int, int], now: float) -> None:
        """End a resumption if any sequence has grown; deleted ones are missing."""
        if any(
            length > self.silent_lengths.get(number, length) for number, length in lengths.items()
        ):
            self.counts[RESUMPTIONS] += 1
            self.counts[RESUMPTION_NS] += round((now - self._silent_since) * 1e9)
            self.silent_lengths = {}

    def _count(self) -> None:
        if not self._counted:
            self.counts[f"{FAULTS}/{self.faults[-1].kind}"] += 1
            self._counted = True
