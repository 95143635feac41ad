"""The state of a cluster: as other threads see it, and whether it makes progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipespec.cluster.deployment.rank_assignment import RankAssignment
from pipespec.cluster.processes.fault_stats import Fault
from pipespec.controller.membership import Membership

# Seconds for which all ranks may wait for one another: a batch may take a while over a slow link.
STALL_S = 30.0
# So many faults in a row end the cluster, unless a token was decided in between, or all ranks
# had joined for so many seconds.
MAX_FAULTS = 16
STABLE_S = 10.0


@dataclass(frozen=True)
class ClusterState:
    """The state of a cluster that other threads than the recovery's may read."""

    epoch: int  # the newest
    assignment: RankAssignment  # of that epoch
    faults: tuple[Fault, ...] = ()  # which ended earlier epochs, or will end this one
    failure: str | None = None  # why the cluster was given up
    complete: bool = False  # whether all ranks have joined that epoch
    away: frozenset[str] = frozenset()  # workers that others have replaced


@dataclass(frozen=True)
class LayoutChange:
    """Another assignment, which is no consequence of a fault: a host joins or leaves. `reason` is a
    clause for the log; the recovery's thread calls `on_begun` when the epoch begins."""

    assignment: RankAssignment
    reason: str
    on_begun: Callable[[], None]


class ClusterProgress:
    """The progress of one cluster; `new_faults`: since `too_many_faults` was called."""

    def __init__(self) -> None:
        self.new_faults = 0
        self._faults_in_a_row = 0  # since a token was decided
        self._latest: tuple[object, ...] = ()  # changes as long as the cluster works
        self._latest_at = time.monotonic()
        self._num_finished = 0  # requests so far
        self._lengths: dict[int, int] = {}  # in tokens, of every sequence that was admitted

    def stalls(
        self, shared: Membership, epoch: int, beats: Sequence[bytes | None], *, complete: bool
    ) -> bool:
        """Whether a request is running and all ranks have joined (`complete`), but each waits for
        another: two may have lost each other, while both still reach Redis. `beats`: the leases of
        the workers. One that works, or is not known to wait, is none of these: it may take its
        time, as its supervisor sees."""
        now = time.monotonic()
        # Of a lease, the process, its count, and whether it works.
        told = [None if beat is None else tuple(beat.split()[:3]) for beat in beats]
        latest = (epoch, shared.oldest_step(epoch), shared.progress(), told)
        waits = complete and all(each is not None and each[2] == b"0" for each in told)
        if latest != self._latest or not waits or shared.idle():
            self._latest, self._latest_at = latest, now
        return now - self._latest_at > STALL_S

    def too_many_faults(self, shared: Membership, *, stable: bool) -> bool:
        """Whether no token was decided between too many faults in a row, and it is not `stable`."""
        finished, lengths = shared.finished(), dict(shared.progress())
        # A sequence that is admitted again is no progress; a new token is.
        grown = any(length > self._lengths.get(n, length) for n, length in lengths.items())
        if grown or stable or finished > self._num_finished:
            self._faults_in_a_row = 0
        self._num_finished, self._lengths = finished, self._lengths | lengths
        self._faults_in_a_row += self.new_faults
        self.new_faults = 0
        return self._faults_in_a_row > MAX_FAULTS
