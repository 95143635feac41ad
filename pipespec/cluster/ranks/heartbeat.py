"""Renews the lease of a worker and watches for new epochs, in a thread beside its work. The thread
hands over epochs under its condition, ends the links of an epoch that is over, and finds what the
main thread does not see while it waits for a neighbour. Everything else belongs to that."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Self

from pipespec.cluster.deployment.rank_assignment import RankAssignment
from pipespec.controller.membership import Epoch, Membership
from pipespec.errors import ControllerError, StaleEpoch, Unreachable
from pipespec.system.liveness import Waiting, progress
from pipespec.transport.distributed import GlooWait

# Seconds between two renewals of the lease, and between two attempts to reach a lost Redis.
RENEW_S = 0.4
RETRY_S = 0.1
# Seconds within which a thread that waits in gloo must leave a link that was aborted, as far as the
# heartbeat has looked meanwhile: then the thread could have run, too.
RELEASE_S = 3.0
# How much longer than for Redis the heartbeat waits for the launcher.
LAUNCHER_S = 20.0

log = logging.getLogger(__name__)


class Heartbeat:
    """Renews a worker's lease, and aborts the links of an epoch that is over. While Redis does not
    answer, it tries to connect again for `patience_s` seconds. With `by_hand`, as no process of the
    launcher's ends this one, the cluster has ended, too, if the launcher gives no sign of life for
    LAUNCHER_S seconds more. gloo does not release every thread whose link is aborted. One that
    waits for RELEASE_S then never will be, so the heartbeat ends this process by `kill`;
    what watches it starts another, and judges whether the main thread makes progress otherwise
    (`pipespec.system.liveness`). A heartbeat that comes late ends nothing."""

    def __init__(
        self,
        url: str,
        namespace: str,
        worker: str,
        *,
        patience_s: float,
        by_hand: bool = False,
        kill: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGKILL),
    ):
        self._url, self._namespace, self._worker = url, namespace, worker
        self._patience_s, self._by_hand = patience_s, by_hand
        self._kill = kill
        self._changed = threading.Condition()
        self._epoch = Epoch(0, "")
        self._gone: ControllerError | None = None
        self._closed = False
        self._links: tuple[Callable[[], None], ...] = ()
        self._look: tuple[int, Callable[[], None]] | None = None  # and the epoch
        # The thread whose links were aborted; None: it has left them, or none were. Since when it
        # waits in gloo, for how many seconds that was seen, and when last.
        self._user = 0
        self._aborted: int | None = None
        self._stuck: tuple[float | None, float, float] = (None, 0.0, 0.0)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True

    def next(self, after: int) -> Epoch:
        """Wait for an epoch later than `after` and return the newest. Raises Unreachable."""
        with Waiting(), self._changed:
            self._changed.wait_for(lambda: self._epoch.number > after or self._gone)
            if self._epoch.number > after:
                return self._epoch
            assert self._gone is not None
            raise self._gone

    def check(self, epoch: int) -> None:
        with self._changed:
            if self._epoch.number > epoch:
                raise StaleEpoch(f"Epoch {epoch} is over: a newer one has begun.")
            if self._gone is not None:
                raise self._gone

    @contextmanager
    def aborting(
        self, epoch: int, *links: Callable[[], None], look: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """Abort links by these functions, once, from another thread, if the epoch ends within the
        block. Blocks may be nested; the links of the inner one come in place of the others. `look`
        is called there now and then; what it raises is reported (`suspect`): a command that was
        refused or lost, whose result others wait for, while this thread waits for them. Raises
        StaleEpoch if the epoch has ended already."""
        with self._changed:
            outer, self._links = self._links, links
            self._look = None if look is None else (epoch, look)
            self._user = threading.get_ident()
        try:
            self.check(epoch)
            yield
        finally:
            with self._changed:
                self._links = outer if self._aborted is None else ()
                self._look = self._aborted = None

    def suspect(self, epoch: int, reason: str) -> None:
        """Report that something is wrong with an epoch, if Redis can be reached."""
        with suppress(Unreachable), Membership(self._url, self._namespace) as shared:
            shared.suspect(epoch, self._worker, reason)

    def _run(self) -> None:
        reached = time.monotonic()
        while not self._closed:
            try:
                with Membership(self._url, self._namespace) as shared:
                    launched = time.monotonic()
                    while not self._closed:
                        progress.beat()
                        shared.renew(self._worker, os.getpid(), progress.describe())
                        reached = time.monotonic()
                        if not self._by_hand or shared.launcher_lives():
                            launched = reached
                        elif (away_s := reached - launched) > self._patience_s + LAUNCHER_S:
                            sentence = "The launcher of the cluster gave no sign of life for "
                            self._publish(gone=Unreachable(f"{sentence}{away_s:.0f} s."))
                            return
                        self._check_released()
                        self._report_fault(shared)
                        epoch = shared.epoch(self._epoch.number, RENEW_S)
                        if epoch is not None:
                            self._publish(epoch)
            except Unreachable as error:
                progress.beat()
                over = time.monotonic() - reached > self._patience_s
                self._publish(gone=error if over else None)
                self._check_released()
                if over:
                    return
                time.sleep(RETRY_S)
            except ControllerError as error:
                self._publish(gone=error)
                return

    def _report_fault(self, shared: Membership) -> None:
        """Report what `look` finds, once."""
        with self._changed:
            given = self._look
        if given is None:
            return
        epoch, look = given
        try:
            look()
        except StaleEpoch:  # the next one is on its way
            pass
        except ControllerError as error:
            with self._changed:
                self._look = None if self._look is given else self._look
            shared.suspect(epoch, self._worker, str(error))

    def _publish(self, epoch: Epoch | None = None, gone: ControllerError | None = None) -> None:
        with self._changed:
            self._epoch = epoch or self._epoch
            self._gone = gone
            links, self._links = self._links, ()
            self._changed.notify_all()
            for link in links:
                # Under the lock: the block cannot end, and its link close, meanwhile.
                link()
            if links:
                self._aborted = self._user

    def _check_released(self) -> None:
        """End this process if a thread cannot leave a link that was aborted."""
        with self._changed:
            if self._aborted is None:
                return
            since, now = GlooWait.since.get(self._aborted), time.monotonic()
            known, seen_s, seen_at = self._stuck
            same = since is not None and since == known
            self._stuck = since, seen_s + min(now - seen_at, RENEW_S) if same else 0.0, now
            if same and self._stuck[1] > RELEASE_S:
                log.warning("gloo does not release this worker, which is replaced by another")
                self._aborted = None
                self._kill()


def why_ended(error: Exception, assignment: RankAssignment, following: Epoch | None) -> str:
    """Why an epoch with this assignment ended for a rank that met an error: a neighbour that has
    left for the next epoch, `following`, looks like a link that broke."""
    if following is None:
        return str(error)
    if not following.assignment:
        return "the cluster ends"
    changed = RankAssignment.decode(following.assignment).joined != assignment.joined
    return "the ranks change their layers" if changed else str(error)
