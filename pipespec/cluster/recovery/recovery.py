"""Watches the workers of a cluster, and begins a new epoch when one of them is lost.

Four signs indicate a fault: neither a worker nor its host gives a sign of life, an agent
replaces a worker that a signal ended or that made no progress, a worker reports a suspicion (the
link to a neighbour broke), or all ranks wait while a request is running. Then the next epoch
begins, with the same assignment or, where a worker stays away, with a spare in its place or fewer
stages. Running requests return to the queue, the other ranks join again with their weights in
memory, and the head prefills prompt and accepted tokens. The launcher kills no worker: whether one
makes progress is for what watches it to judge (`pipespec.system.liveness`).

Every field of `Recovery` belongs to its thread once `watch` has started it. Other threads read
`Recovery.state` alone, an immutable value that is replaced as a whole (read it once for one
decision), and hand over what they want by a queue and the event `stopped`. The listeners of the
agents send deaths by the queue `WorkerGroup.deaths`; what starts and ends an agent holds a lock.
Above 350 lines, as one thread holds all that it decides by."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Self

from pipespec.cluster.deployment.rank_assignment import RankAssignment, WeightsPending
from pipespec.cluster.processes.fault_stats import Fault, FaultKind, FaultStats
from pipespec.cluster.processes.worker_group import WorkerGroup
from pipespec.cluster.recovery.cluster_state import (
    MAX_FAULTS,
    STABLE_S,
    ClusterProgress,
    ClusterState,
    LayoutChange,
    WorkerLeases,
)
from pipespec.controller import epoch_control
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.controller.membership import Membership
from pipespec.controller.redis_connection import ANSWER_TIMEOUT_S
from pipespec.errors import ConfigError, PipespecError, RankFailed, Unreachable, WritesRefused

# Seconds between two checks of the signs, and that one try to reach a private Redis takes at most.
LOOK_S, TRY_S = 0.1, 2.0

log = logging.getLogger(__name__)


class Recovery:
    """A thread that keeps one cluster going, from `watch` to the end of the `with` block. The first
    epoch has `assignment` and begins at once; `replan` makes one without workers that are lost, or
    raises ConfigError, or WeightsPending while it cannot begin yet. The private Redis, `server`, is
    started again when it has ended or hangs. `patience_s`: how long a lost worker is waited for
    before the assignment changes, and a Redis that cannot be started again before the cluster
    ends."""

    def __init__(
        self,
        url: str,
        namespace: str,
        assignment: RankAssignment,
        *,
        workers: Sequence[str],
        replan: Callable[[set[str]], RankAssignment],
        server: EmbeddedRedis | None = None,
        patience_s: float = 30.0,
    ):
        self._url, self._namespace = url, namespace
        self._replan = replan
        self._server = server
        self._patience_s = patience_s
        self._answer_s = ANSWER_TIMEOUT_S if server is None else TRY_S
        self.stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._orders = queue.SimpleQueue[Callable[[], object]]()  # for the thread to call
        # From here on all fields belong to the thread; others read `state`.
        self._workers: WorkerGroup | None = None
        self._leases = WorkerLeases(workers)
        self._preparing_at = 0.0  # when the host of a lost worker was last seen to start
        self._progress = ClusterProgress()
        self._latest_reason = ""
        self._complete_since: float | None = None  # when all ranks had joined this epoch
        self._ever_complete = False
        # The processes of the workers that have joined this epoch, and the last one.
        self._pids: dict[str, int] = {}
        self._last_pids: dict[str, int] = {}
        self._assignment = assignment  # of the next epoch, where it differs from `state`
        self._change: LayoutChange | None = None  # once its workers are alive
        # The cluster now. Any thread may read it.
        self.state = ClusterState(
            epoch_control.begin_epoch(url, namespace, self._described()), assignment
        )
        with Membership(url, namespace) as shared:
            self._stats = FaultStats(shared.totals())
        self._published_counts = Counter(self._stats.counts)

    def watch(self, workers: WorkerGroup) -> None:
        self._workers = workers
        self._thread.start()

    def change(self, change: LayoutChange) -> None:
        """Go on with another assignment, in an epoch of its own if other workers have ranks or
        layers, as soon as all of its workers live. It takes the place of a change that has not
        begun."""
        self._orders.put(partial(self._set_change, change))

    def drop_change(self) -> None:
        """Drop a change that has not begun. When this returns, it has, or will never."""
        dropped = threading.Event()
        self._orders.put(partial(self._set_change, None))
        self._orders.put(dropped.set)
        while not dropped.wait(LOOK_S) and self._thread.is_alive():
            pass

    def watch_workers(self, workers: Sequence[str]) -> None:
        """These are all workers from now on."""
        self._orders.put(partial(self._leases.watch, workers))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop watching; harmless when called again."""
        self.stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def check(self) -> None:
        if (failure := self.state.failure) is not None:
            raise RankFailed(failure)

    def _watch(self) -> None:
        reached, tried_s = time.monotonic(), 0.0
        while not self.stopped.is_set():
            began = time.monotonic()
            try:
                with Membership(self._url, self._namespace, answer_s=self._answer_s) as shared:
                    if self._stats.ended(self.state.epoch):
                        self._begin_next_epoch(shared)
                    while not self.stopped.is_set():
                        if self._server is not None and self._server.front_failed():
                            raise Unreachable("The process in front of Redis ended or was stopped.")
                        reached, tried_s = time.monotonic(), 0.0
                        began = reached
                        self._check_signs(shared)
            except Unreachable as error:
                # A pause of this process is none of Redis'.
                tried_s += min(time.monotonic() - began, TRY_S)
                refused = isinstance(error, WritesRefused)  # it would when started again, too
                if self._server is None or refused:
                    why = str(error)
                    if self._server is not None:
                        why = f"{why.rstrip('.')} ({self._server.places()})."
                    self._record_fault(FaultKind.REDIS_GONE, why if refused else "Redis went away")
                    if time.monotonic() - reached > self._patience_s:
                        self._give_up(why)
                else:
                    self._restart_if_gone(self._server, tried_s)
            except Exception as error:
                if not isinstance(error, PipespecError):
                    log.exception("the recovery fails")
                self._give_up(f"{type(error).__name__}: {error}")
            self.stopped.wait(LOOK_S)

    def _restart_if_gone(self, server: EmbeddedRedis, tried_s: float) -> None:
        """Start a private Redis again if it has ended, is stopped, or was tried for long."""
        hangs = server.alive()
        if hangs and not server.stopped() and tried_s < ANSWER_TIMEOUT_S:
            return
        self._record_fault(FaultKind.REDIS_GONE, "Redis hung" if hangs else "Redis went away")
        try:
            server.restart()
        except PipespecError as error:
            self._give_up(str(error))
        except OSError as error:  # such as no memory for a process: tried again
            log.warning("Redis cannot be started: %s", error)

    def _check_signs(self, shared: Membership) -> None:
        assert self._workers is not None
        while not self._orders.empty():
            self._orders.get()()
        shared.renew_launcher()
        found = [each for each in shared.suspicions(LOOK_S) if each.epoch == self.state.epoch]
        failed = next((each for each in found if each.start_failed), None)
        if failed is not None and not self._ever_complete:
            self._give_up(f"{failed.worker}: {failed.reason}")
            return
        suspicions = [
            (FaultKind.LINK_BROKE, f"{each.worker}: {each.reason}")
            for each in found
            if not each.start_failed
        ]
        reported = self._workers.deaths
        deaths = [reported.get() for _ in range(reported.qsize())]
        joined, workers = shared.attached(self.state.epoch), self._assignment.workers
        self._pids = {workers[rank]: pid for rank, pid in joined.items() if rank < len(workers)}
        for worker, pid in shared.followers(self.state.epoch).items():
            if worker in self._assignment.everyone:
                self._pids[worker] = pid
        reasons: list[tuple[FaultKind, str]] = []
        for death in deaths:
            self._progress.new_faults += 1
            self._latest_reason = f"{death.worker} ended ({death.how})"
            if death.pid is None:
                wait = "%s is waited for; after %.0f s of silence others take its place"
                log.info(wait, death.worker, self._patience_s)
            # A worker that had not joined this epoch joins it when it is started again, or has
            # done so already: the report of a death can arrive after its replacement has joined.
            if death.of(self._pids):
                reasons.append((death.kind, self._latest_reason))
            elif death.of(self._last_pids) and self._stats.reclassify(
                death.kind, self._latest_reason
            ):
                self._publish_faults()
                self._note_fault(shared)
        if len(joined) < len(workers):
            self._complete_since = None
        elif self._complete_since is None:
            self._complete_since = time.monotonic()
            self._ever_complete = True
            self._stats.all_ranks_joined(self._complete_since)
        if self.state.complete != (complete := self._complete_since is not None):
            self.state = replace(self.state, complete=complete)
        beats = shared.beats(self._leases.workers)
        reasons += [
            (FaultKind.WORKER_SILENT, f"{worker} and its host give no sign of life")
            for worker in self._newly_silent(beats)
            if worker in self._pids
        ]
        reasons += suspicions  # last: a cause found by this process is more precise
        working = [beats.get(worker) for worker in self._assignment.everyone]
        if self._progress.stalls(shared, self.state.epoch, working, complete=self.state.complete):
            stalled = "all ranks wait, though a request is running"
            reasons.append((FaultKind.STEP_STALLED, stalled))
        self._workers.restart_lost_hosts()
        self._update_counts(shared)
        if reasons:
            self._record_fault(*reasons[0])
        if reasons or self._must_replace():
            self._begin_next_epoch(shared)
        elif self._progress.new_faults:
            self._give_up_without_progress(shared)
        elif self._change is not None and self._leases.alive.issuperset(
            self._change.assignment.everyone
        ):
            self._make_change(shared, self._change)

    def _set_change(self, change: LayoutChange | None) -> None:
        self._change = change

    def _make_change(self, shared: Membership, change: LayoutChange) -> None:
        log.info("epoch %d: %s", self.state.epoch, change.reason)
        before, self._assignment = self._assignment, change.assignment
        if change.assignment.ranks != before.ranks:  # else a host has gone that had none any more
            try:
                self._begin_epoch(shared)
            except Unreachable:  # it is made once Redis is back
                self._assignment = before
                raise
        self._change = None
        self.state = replace(self.state, away=frozenset(), assignment=self._assignment)
        change.on_begun()

    def _update_counts(self, shared: Membership) -> None:
        if self._stats.silent_lengths:
            lengths = shared.lengths(self._stats.silent_lengths)
            self._stats.update_lengths(lengths, time.monotonic())
            if shared.idle():
                self._stats.silent_lengths = {}  # no request is left
        if self._stats.counts != self._published_counts:
            shared.count(self._stats.counts)
            self._published_counts = Counter(self._stats.counts)

    def _newly_silent(self, beats: Mapping[str, bytes]) -> list[str]:
        assert self._workers is not None
        now = time.monotonic()
        silent = self._leases.update(beats, self._workers.signs(), now)
        self.state = replace(self.state, alive=frozenset(self._leases.alive))
        if any(map(self._workers.preparing, set(self._leases.workers) - self._leases.alive)):
            self._preparing_at = now
        return silent

    def _must_replace(self) -> bool:
        """Whether a worker of the assignment has been away for too long and others can replace it;
        if so, the next epoch has another assignment."""
        assert self._workers is not None
        now = time.monotonic()
        lost_s = max(self._leases.silent_s(each, now) for each in self._assignment.everyone)
        if lost_s < self._patience_s:
            return False
        # Workers that never joined cannot replace any.
        away = {
            worker
            for worker in self._leases.workers
            if self._leases.silent_s(worker, now) > self._patience_s
            or (worker not in self._leases.lost_at and worker not in self._leases.alive)
        }
        try:
            self._assignment = self._replan(away)
        except WeightsPending:
            return False
        except ConfigError as error:
            # Imports can take longer than `patience_s`. A worker that imports has not stayed away,
            # and has `patience_s` to join once it has imported.
            if now - self._preparing_at > self._patience_s:
                self._give_up(f"{', '.join(sorted(away))} stayed away: {error}")
            return False
        self.state = replace(self.state, away=frozenset(away))
        self._record_fault(FaultKind.STAYED_AWAY, f"{', '.join(sorted(away))} stayed away")
        return True

    def _record_fault(self, kind: FaultKind, reason: str) -> None:
        if not self._stats.ended(self.state.epoch):
            epoch = self.state.epoch
            self._stats.record_fault(Fault(epoch, kind, reason, time.monotonic()))
            self._publish_faults()
            log.info("epoch %d: %s", epoch, reason)

    def _publish_faults(self) -> None:
        self.state = replace(self.state, faults=tuple(self._stats.faults))

    def _note_fault(self, shared: Membership) -> str:
        """Keep why the last epoch ended for those who look later, unless it did as a lost worker
        stayed away, whose loss was kept; the reason."""
        newest = self._stats.faults[-1]
        if not self._stats.of_loss:
            shared.note_fault(newest.epoch, newest.reason)
        return newest.reason

    def _begin_next_epoch(self, shared: Membership) -> None:
        self._progress.new_faults += 1
        self._latest_reason = self._note_fault(shared)
        self._give_up_without_progress(shared)
        if not self.stopped.is_set():
            running = [number for number, _ in shared.progress()]
            self._begin_epoch(shared)
            # Not before: until then the last epoch may decide tokens.
            self._stats.begin_epoch(shared.lengths(running))

    def _described(self) -> str:
        """The next assignment, as text."""
        others = set(self._leases.workers) - set(self._assignment.everyone)
        return replace(self._assignment, others=tuple(sorted(others))).encode()

    def _begin_epoch(self, shared: Membership) -> None:
        begun = epoch_control.begin_epoch(self._url, self._namespace, self._described())
        if begun <= self.state.epoch:
            self._give_up("Redis came back without its data; start the cluster again.")
        self.state = replace(self.state, epoch=begun, assignment=self._assignment, complete=False)
        self._complete_since = None
        self._last_pids, self._pids = self._pids, {}
        log.info("epoch %d begins", begun)

    def _give_up_without_progress(self, shared: Membership) -> None:
        """Give up after too many faults in a row between which no token was decided."""
        since = self._complete_since
        stalled = (
            self._stats.ended(self.state.epoch)
            and self._stats.faults[-1].kind is FaultKind.STEP_STALLED
        )
        stable = since is not None and time.monotonic() - since > STABLE_S and not stalled
        if self._progress.too_many_faults(shared, stable=stable):
            self._give_up(f"{self._latest_reason}; {MAX_FAULTS} faults without a new token.")

    def _give_up(self, reason: str) -> None:
        self.state = replace(self.state, failure=reason)
        self.stopped.set()
