"""The state of a cluster: as other threads see it, whether it makes progress, and which workers are
alive, by their signs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
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
    epoch: int  # the newest
    assignment: RankAssignment  # of that epoch
    faults: tuple[Fault, ...] = ()  # which ended earlier epochs, or will end this one
    failure: str | None = None  # why the cluster was given up
    complete: bool = False  # whether all ranks have joined that epoch
    away: frozenset[str] = frozenset()  # workers that others have replaced
    alive: frozenset[str] = frozenset()  # workers that give signs of life


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
        time, as what watches it sees."""
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


# Seconds without a sign after which a worker is lost, and without one in which it alone can give
# it, from a thread that others of its process may hold up.
SILENT_S, ALONE_S = 5.0, 20.0
# A pause between two looks counts as no more: in a longer one, signs were not read.
LOOK_S = 0.5


class WorkerLeases:
    """The signs of life of workers, as one process sees them. Pure: callers pass the signs, and the
    time of the monotonic clock. A sign is a renewed lease (`Membership.beats`), or that the agent
    of its host has seen the process of the worker (`WorkerGroup.signs`). So a worker is lost if its
    host is cut off, or its process neither runs nor is started again, but not if its threads are
    late. Redis expires leases by its wall clock, so what counts is how long ago each sign was seen
    here. `alive` have renewed a lease and are not lost; `lost_at`: when each other one was lost."""

    def __init__(self, workers: Sequence[str]):
        self.workers = tuple(workers)
        self.alive: set[str] = set()
        self.lost_at: dict[str, float] = {}
        # The newest lease and sign of the agent, and when they were seen.
        self._signs: dict[str, tuple[tuple[bytes, object], float]] = {}
        self._now = self._looked_at = 0.0  # the time in which this process looked

    def watch(self, workers: Sequence[str]) -> None:
        self.workers = tuple(workers)
        self.alive &= set(workers)
        self.lost_at = {each: at for each, at in self.lost_at.items() if each in workers}
        self._signs = {each: sign for each, sign in self._signs.items() if each in workers}

    def update(
        self, beats: Mapping[str, bytes], signs: Mapping[str, object], now: float
    ) -> list[str]:
        """Take note of the signs; returns the workers that are lost since the last call."""
        self._now += min(now - self._looked_at, LOOK_S)
        self._looked_at = now
        for worker in self.workers:
            known = self._signs.get(worker)
            if known is not None or worker in beats:
                beat = beats.get(worker, b"" if known is None else known[0][0])
                sign = beat, signs.get(worker)
                if known is None or sign != known[0]:
                    self._signs[worker] = sign, self._now
        alive = {
            worker
            for worker, (sign, at) in self._signs.items()
            if self._now - at < (SILENT_S if worker in signs else ALONE_S)
        }
        silent = sorted(self.alive - alive)
        self.alive = alive
        self.lost_at = {each: at for each, at in self.lost_at.items() if each not in alive}
        self.lost_at |= dict.fromkeys(silent, now)
        return silent

    def silent_s(self, worker: str, now: float) -> float:
        """For how many seconds a worker has been lost; 0: it is alive, or never was."""
        return now - self.lost_at.get(worker, now)
