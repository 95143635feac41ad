"""A worker's sign of life, and its ear for new epochs: one thread beside its work."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Self

from pipespec.controller.membership import Epoch, Membership
from pipespec.errors import ControllerError, StaleEpoch, Unreachable

# Seconds between two renewals of the lease, and between two tries to reach a lost Redis.
RENEW_S = 0.4
RETRY_S = 0.1


class Heartbeat:
    """Renews a worker's lease, and wakes the worker's work when its epoch is over.

        with Heartbeat(url, namespace, worker, patience_s=30) as heartbeat:
            epoch = heartbeat.next(0)
            with heartbeat.guard(epoch.number, link.abort):
                ...     # ends soon after a newer epoch begins, or Redis is gone

    While Redis does not answer the heartbeat connects again, for `patience_s` seconds.
    """

    def __init__(self, url: str, namespace: str, worker: str, *, patience_s: float):
        self._url, self._namespace, self._worker = url, namespace, worker
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._epoch = Epoch(0, "")
        self._gone: ControllerError | None = None
        self._closed = False
        self._alarm: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True

    def next(self, after: int) -> Epoch:
        """The newest epoch later than `after`; waits for it. Raises Unreachable."""
        with self._changed:
            self._changed.wait_for(lambda: self._epoch.number > after or self._gone)
            if self._epoch.number > after:
                return self._epoch
            assert self._gone is not None
            raise self._gone

    def check(self, epoch: int) -> None:
        """Raise StaleEpoch if a newer epoch has begun, and Unreachable if Redis is gone."""
        with self._changed:
            if self._epoch.number > epoch:
                raise StaleEpoch(f"Epoch {epoch} is over: a newer one has begun.")
            if self._gone is not None:
                raise self._gone

    @contextmanager
    def guard(self, epoch: int, alarm: Callable[[], None]) -> Iterator[None]:
        """Call `alarm`, once, from another thread, should the epoch end within the block.

        Raises StaleEpoch if it has ended already.
        """
        with self._changed:
            self._alarm = alarm
        try:
            self.check(epoch)
            yield
        finally:
            with self._changed:
                self._alarm = None

    def suspect(self, epoch: int, reason: str) -> None:
        """Tell that something is wrong with an epoch, if Redis can be told."""
        with suppress(Unreachable), Membership(self._url, self._namespace) as shared:
            shared.suspect(epoch, self._worker, reason)

    def make_plain(self, epoch: int, reason: str) -> None:
        """End an epoch, as weights must be made plain in all later ones. Raises Unreachable."""
        with Membership(self._url, self._namespace) as shared:
            shared.make_plain(reason)
            shared.suspect(epoch, self._worker, reason)

    def plain(self) -> bool:
        """Whether somebody said so. Raises Unreachable."""
        with Membership(self._url, self._namespace) as shared:
            return shared.plain()

    def _run(self) -> None:
        reached = time.monotonic()
        while not self._closed:
            try:
                with Membership(self._url, self._namespace) as shared:
                    while not self._closed:
                        shared.renew(self._worker, os.getpid())
                        reached = time.monotonic()
                        epoch = shared.epoch(self._epoch.number, RENEW_S)
                        if epoch is not None:
                            self._sound(epoch)
            except Unreachable as error:
                over = time.monotonic() - reached > self._patience_s
                self._sound(gone=error if over else None)
                if over:
                    return
                time.sleep(RETRY_S)
            except ControllerError as error:
                # A full or read-only Redis: nothing can go on with it.
                self._sound(gone=error)
                return

    def _sound(self, epoch: Epoch | None = None, gone: ControllerError | None = None) -> None:
        with self._changed:
            self._epoch = epoch or self._epoch
            self._gone = gone
            alarm, self._alarm = self._alarm, None
            self._changed.notify_all()
            if alarm is not None:
                # Under the lock: the block cannot end, and its link close, meanwhile.
                alarm()
