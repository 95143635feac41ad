"""Watches a cluster's workers, and begins a new epoch when one of them is lost.

Four things tell that something is wrong: a worker's lease that has run out (it hangs, or its
host is cut off), a supervisor that replaced a worker ended by a signal, a suspicion (a neighbour
whose link broke), and a request for which no step is completed. What follows is always the
same: the next epoch begins, with the same assignment or, where a worker stays away, with a spare in
its place or over fewer stages. The requests that were open return to the queue, the ranks that
live join again with their weights in memory, and the head reads prompt and accepted tokens like
a prompt and goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from pipespec.cluster.faults import Fault, FaultKind, FaultRecord
from pipespec.cluster.rank_assignment import RankAssignment
from pipespec.cluster.watched import Death, Server, Workers
from pipespec.controller import epochs
from pipespec.controller.connection import ANSWER_TIMEOUT_S
from pipespec.controller.membership import LEASE_S, Membership
from pipespec.errors import ConfigError, ControllerError, RankFailed, Unreachable

# Seconds between two looks at the leases.
LOOK_S = 0.1
# Seconds in which a worker that was started in the place of another must say something.
KILL_S = 15.0
# Seconds in which one whose lease has run out may still renew it.
GRACE_S = 0.5
# So many faults in a row end the cluster, unless a token was decided in between, or all ranks
# were there for so many seconds.
FRUITLESS = 16
LONG_S = 10.0

log = logging.getLogger(__name__)


class Recovery:
    """A thread that keeps one cluster going.

        with Recovery(url, namespace, assignment, workers=..., replan=...) as recovery:
            recovery.watch(cluster)

    Args:
        assignment: of the first epoch, which begins at once.
        workers: all that there are, spares included.
        replan: makes an assignment without workers that are lost, or raises ConfigError.
        server: the private Redis, if there is one; it is started again when it has ended or hangs.
        patience_s: how long a lost worker is waited for before the assignment changes, and a Redis
            that is not ours before all ends.
        stall_s: how long a step may take.
    """

    def __init__(
        self,
        url: str,
        namespace: str,
        assignment: RankAssignment,
        *,
        workers: Sequence[str],
        replan: Callable[[set[str]], RankAssignment],
        server: Server | None = None,
        patience_s: float = 30.0,
        stall_s: float = 30.0,
    ):
        self._url, self._namespace = url, namespace
        self._everyone = tuple(workers)
        self._replan = replan
        self._server = server
        self._patience_s = patience_s
        self._stall_s = stall_s
        # Our own Redis is on this machine: silent for longer, it will not speak again.
        self._answer_s = ANSWER_TIMEOUT_S if server is None else LEASE_S
        self._workers: Workers | None = None
        self._alive: set[str] = set()  # workers that hold a lease
        self._lost: dict[str, float] = {}  # when a lease ran out
        self._killed: dict[str, float] = {}  # when a lost worker was ended
        self._prepared_at = 0.0  # when the host of one that is away was last seen to start
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._fruitless = 0  # faults since something was decided
        self._events = 0  # faults since the last judgement
        self._latest = ""
        self._complete_at: float | None = None  # since when all ranks of this epoch are there
        self._moved: tuple[object, ...] = ()  # what changes as long as the cluster works
        self._moved_at = time.monotonic()
        self._finished = 0  # requests so far
        self._lengths: dict[int, int] = {}  # of the sequences of the requests seen
        self._failure: RankFailed | None = None
        # The workers of this epoch that were seen there, and of the one before; their processes.
        self._holders: dict[str, int] = {}
        self._held: dict[str, int] = {}
        self.assignment = assignment
        self.epoch = epochs.begin(url, namespace, assignment.encode())
        with Membership(url, namespace) as shared:
            self._record = FaultRecord(shared.totals())
        self._told = Counter(self._record.counts)

    @property
    def faults(self) -> Sequence[Fault]:
        """What has ended epochs so far."""
        return self._record.faults

    def watch(self, workers: Workers) -> None:
        """Begin to watch."""
        self._workers = workers
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop watching; harmless when called again."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def check(self) -> None:
        """Raise RankFailed if the cluster was given up."""
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        reached = time.monotonic()
        while not self._stop.is_set():
            try:
                with Membership(self._url, self._namespace, answer_s=self._answer_s) as shared:
                    if self.faults and self.faults[-1].epoch == self.epoch:
                        self._next(shared)
                    while not self._stop.is_set():
                        reached = time.monotonic()
                        self._look(shared)
            except Unreachable as error:
                silent_s = time.monotonic() - reached
                if not self._revive(silent_s):
                    self._note(FaultKind.REDIS_GONE, "Redis went away")
                    if silent_s > self._patience_s:
                        self._give_up(str(error))
            except Exception as error:  # noqa: BLE001 - nobody else would see to the next fault
                self._give_up(f"{type(error).__name__}: {error}")
            self._stop.wait(LOOK_S)

    def _revive(self, silent_s: float) -> bool:
        """Start our own Redis again if it has ended, or hangs as long as a lease lasts."""
        if self._server is None:
            return False
        hangs = self._server.alive()
        if hangs and silent_s < self._answer_s:
            return False
        self._note(FaultKind.REDIS_GONE, "Redis hung" if hangs else "Redis went away")
        try:
            self._server.restart()
        except ControllerError as error:
            self._give_up(str(error))
        return True

    def _look(self, shared: Membership) -> None:
        """Take in what has happened; begin the next epoch if it must be."""
        assert self._workers is not None
        suspicions = [
            (FaultKind.LINK_BROKE, f"{told.worker}: {told.reason}")
            for told in shared.suspicions(LOOK_S)
            if told.epoch == self.epoch
        ]
        deaths = self._deaths()
        here = shared.attached(self.epoch)
        self._holders = {
            worker: here[rank]
            for rank, worker in enumerate(self.assignment.workers)
            if rank in here
        } | {
            worker: pid
            for worker, pid in shared.followers(self.epoch).items()
            if worker in self.assignment.everyone
        }
        reasons: list[tuple[FaultKind, str]] = []
        for death in deaths:
            self._events += 1
            self._latest = f"{death.worker} ended ({death.how})"
            # One that had not joined this epoch will join it when it is started again, or has
            # done so already: word of a death can come later than the next life.
            if _of(death, self._holders):
                reasons.append((FaultKind.WORKER_ENDED, self._latest))
            elif _of(death, self._held):
                self._record.explain(FaultKind.WORKER_ENDED)
        if len(here) < len(self.assignment.workers):
            self._complete_at = None
        elif self._complete_at is None:
            self._complete_at = time.monotonic()
            self._record.complete(self._complete_at)
        reasons += [
            (FaultKind.WORKER_SILENT, f"{worker} says nothing")
            for worker in self._silent(shared)
            if worker in self._holders
        ]
        reasons += suspicions  # what is behind them says more
        if self._stalls(shared):
            stalled = f"no step was completed for {self._stall_s:g} seconds"
            reasons.append((FaultKind.STEP_STALLED, stalled))
        self._workers.mend()
        self._count(shared)
        if reasons:
            self._note(*reasons[0])
        if reasons or self._must_replace():
            self._next(shared)
        elif self._events:
            self._judge(shared)

    def _count(self, shared: Membership) -> None:
        """Look whether the text goes on after a fault, and keep what was counted."""
        if self._record.lengths:
            lengths = shared.lengths(self._record.lengths)
            self._record.heard(lengths, time.monotonic())
            if shared.idle():
                self._record.leave()
        if self._record.counts != self._told:
            shared.count(self._record.counts)
            self._told = Counter(self._record.counts)

    def _stalls(self, shared: Membership) -> bool:
        """Whether a request is open, all ranks are there, and yet nothing moves: two of them
        may have lost one another, while both still reach Redis."""
        now, complete = time.monotonic(), self._complete_at is not None
        moved = (self.epoch, complete, shared.oldest_step(self.epoch), shared.progress())
        if moved != self._moved or not complete or shared.idle():
            self._moved, self._moved_at = moved, now
        return now - self._moved_at > self._stall_s

    def _deaths(self) -> list[Death]:
        assert self._workers is not None
        found: list[Death] = []
        while not self._workers.deaths.empty():
            found.append(self._workers.deaths.get())
        return found

    def _silent(self, shared: Membership) -> list[str]:
        """Workers whose leases have run out since the last look; what hangs there is ended."""
        assert self._workers is not None
        alive, now = set(shared.alive(self._everyone)), time.monotonic()
        silent = sorted(self._alive - alive)
        self._alive = alive
        for worker in alive:
            self._lost.pop(worker, None)
            self._killed.pop(worker, None)
        for worker in silent:
            self._lost[worker] = now
        if any(map(self._workers.preparing, set(self._everyone) - alive)):
            self._prepared_at = now
        for worker, since in self._lost.items():
            # A moment more: after a silence of Redis all leases have run out.
            due = now - self._killed.get(worker, -KILL_S) > KILL_S and now - since > GRACE_S
            if due and self._workers.kill(worker, since):
                self._killed[worker] = now
        return silent

    def _must_replace(self) -> bool:
        """Whether a worker of the assignment has been away so long that others must do, and can."""
        assert self._workers is not None
        now = time.monotonic()
        lost = [self._lost.get(worker, now) for worker in self.assignment.everyone]
        if now - min(lost) < self._patience_s:
            return False
        # Those that never came cannot take anybody's place.
        away = {
            worker
            for worker in self._everyone
            if now - self._lost.get(worker, now) > self._patience_s
            or (worker not in self._lost and worker not in self._alive)
        }
        try:
            self.assignment = self._replan(away)
        except ConfigError as error:
            # Imports can take longer than patience lasts; who imports has not stayed away, and
            # who has imported gets as long again to join.
            if now - self._prepared_at > self._patience_s:
                self._give_up(f"{', '.join(sorted(away))} stayed away: {error}")
            return False
        self._note(FaultKind.STAYED_AWAY, f"{', '.join(sorted(away))} stayed away")
        return True

    def _note(self, kind: FaultKind, reason: str) -> None:
        """Keep the first reason why an epoch must end."""
        if not self.faults or self.faults[-1].epoch != self.epoch:
            self._record.note(Fault(self.epoch, kind, reason, time.monotonic()))
            log.info("epoch %d: %s", self.epoch, reason)

    def _next(self, shared: Membership) -> None:
        self._events += 1
        self._latest = self.faults[-1].reason
        shared.note_fault(self.epoch, self._latest)
        self._judge(shared)
        if not self._stop.is_set():
            decoded = [number for number, _ in shared.progress()]
            begun = epochs.begin(self._url, self._namespace, self.assignment.encode())
            if begun <= self.epoch:
                self._give_up("Redis came back without what it knew; start the cluster again.")
            self.epoch, self._complete_at = begun, None
            self._held, self._holders = self._holders, {}
            log.info("epoch %d begins", self.epoch)
            # Not before: until then the last epoch may decide tokens.
            self._record.begun(shared.lengths(decoded))

    def _judge(self, shared: Membership) -> None:
        """Give up if there was fault after fault and nothing was decided in between."""
        finished, lengths = shared.finished(), dict(shared.progress())
        # Admitted again is no progress; a token more is.
        grown = any(length > self._lengths.get(n, length) for n, length in lengths.items())
        long = self._complete_at is not None and time.monotonic() - self._complete_at > LONG_S
        if grown or long or finished > self._finished:
            self._fruitless = 0
        self._finished, self._lengths = finished, self._lengths | lengths
        self._fruitless += self._events
        self._events = 0
        if self._fruitless > FRUITLESS:
            self._give_up(f"{self._latest}; {FRUITLESS} faults, and nothing was decided.")

    def _give_up(self, reason: str) -> None:
        self._failure = RankFailed(reason)
        self._stop.set()


def _of(death: Death, holders: Mapping[str, int]) -> bool:
    """Whether it is the death of a process that held a rank."""
    return death.worker in holders and death.pid in (None, holders[death.worker])
