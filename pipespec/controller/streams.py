"""Following requests of the log, any number of them over one connection."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from pipespec.controller.connection import RETRY_S, Pipe
from pipespec.controller.following import Following, block_ms
from pipespec.controller.records import Event
from pipespec.errors import Unreachable

# A blocking read is renewed this often, so that a silent Redis is noticed.
LISTEN_S = 5.0


class Streams:
    """The events of requests as they come, over one connection. Not for several threads.

    A request is followed from `add` to its Finished. When Redis goes away, it connects again for
    up to `patience` seconds and goes on where it was; after that Unreachable is raised.
    """

    def __init__(self, url: str, *, namespace: str, patience: float):
        self._url = url
        self._patience = patience
        self._pipe: Pipe | None = None
        self._give_up: float | None = None  # when Redis will have been away for too long
        self._following = Following(namespace)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __len__(self) -> int:
        """How many requests are followed."""
        return len(self._following)

    def close(self) -> None:
        if self._pipe:
            self._pipe.close()
        self._pipe = None

    def add(self, request: int, base: int = 0) -> None:
        """Follow a request, also one that began, or finished, before.

        What happened before is told first. Who has heard some of it names as `base` the length
        of the sequence (prompt included) that he already has.
        """
        self._following.add(request, base)

    def next(self, timeout: float | None = None) -> list[tuple[int, Event]]:
        """The next events, each with its request, waiting for the first; [] after `timeout`
        seconds.

        Events of one request come in their order; of several that have finished, any may be
        told first. Redis may be away meanwhile, for at most `patience` seconds. Raises
        ControllerError if a request is not in the log; the others are still followed.
        """
        assert self._following or timeout is not None, "nothing would ever come"
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = LISTEN_S if deadline is None else min(deadline - time.monotonic(), LISTEN_S)
            try:
                if self._pipe is None:
                    self._pipe = Pipe(self._url)
                    self._following.reconnected()
                events = self._read(self._pipe, left)
                self._give_up = None
            except Unreachable:
                self.close()
                now = time.monotonic()
                self._give_up = self._give_up or now + self._patience
                if now >= self._give_up:
                    raise
                time.sleep(RETRY_S)
                events = []
            if events or (deadline is not None and time.monotonic() >= deadline):
                return events

    def _read(self, pipe: Pipe, seconds: float) -> list[tuple[int, Event]]:
        """The events that come first within so many seconds."""
        if not self._following:
            time.sleep(max(seconds, 0.0))
            return []
        while found := self._following.look_up():
            request, command = found
            if not pipe.call(*command):
                raise self._following.missing(request)
        reply = pipe.call(*self._following.read(seconds), timeout=block_ms(seconds) / 1000)
        return self._following.events(reply)
