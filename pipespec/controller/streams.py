"""Following requests of the log, any number of them over one connection."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from pipespec.controller.connection import RETRY_S, Pipe
from pipespec.controller.keys import Keys
from pipespec.controller.records import Accepted, Entry, Finished, entries_of, event_from
from pipespec.errors import ControllerError, Unreachable

# A blocking read is renewed this often, so that a silent Redis is noticed.
LISTEN_S = 5.0


class Streams:
    """The events of requests as they come, over one connection. Not for several threads.

    A request is followed from `add` to its Finished. When Redis goes away, it connects again for
    up to `patience` seconds and goes on where it was; after that Unreachable is raised.
    """

    def __init__(self, url: str, *, namespace: str, patience: float):
        self._url = url
        self._keys = Keys(namespace)
        self._patience = patience
        self._pipe: Pipe | None = None
        self._give_up: float | None = None  # when Redis will have been away for too long
        # Of every request that is followed, by the name of its stream.
        self._followed: dict[bytes, _Followed] = {}
        self._unseen: set[bytes] = set()  # not looked up in the log on this connection

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
        return len(self._followed)

    def close(self) -> None:
        if self._pipe:
            self._pipe.close()
        self._pipe = None

    def add(self, request: int, base: int = 0) -> None:
        """Follow a request, also one that began, or finished, before.

        What happened before is told first. Who has heard some of it names as `base` the length
        of the sequence (prompt included) that he already has.
        """
        name = self._keys.events(request).encode()
        self._followed[name] = _Followed(request, base)
        self._unseen.add(name)

    def next(self, timeout: float | None = None) -> list[tuple[int, Accepted | Finished]]:
        """The next events, each with its request, waiting for the first; [] after `timeout`
        seconds.

        Events of one request come in their order; of several that have finished, any may be
        told first. Redis may be away meanwhile, for at most `patience` seconds. Raises
        ControllerError if a request is not in the log; the others are still followed.
        """
        assert self._followed or timeout is not None, "nothing would ever come"
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = LISTEN_S if deadline is None else min(deadline - time.monotonic(), LISTEN_S)
            try:
                if self._pipe is None:
                    self._pipe = Pipe(self._url)
                    self._unseen = set(self._followed)
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

    def _read(self, pipe: Pipe, seconds: float) -> list[tuple[int, Accepted | Finished]]:
        """The events that come first within so many seconds."""
        if not self._followed:
            time.sleep(max(seconds, 0.0))
            return []
        self._look_up(pipe)
        block = max(1, int(seconds * 1000))
        positions = [followed.position for followed in self._followed.values()]
        found = pipe.call(
            *("XREAD", "BLOCK", block, "STREAMS", *self._followed, *positions),
            timeout=block / 1000,
        )
        events: list[tuple[int, Accepted | Finished]] = []
        for name, entries in found or []:
            followed = self._followed[name]
            told = followed.events(entries_of(entries))
            events += [(followed.request, event) for event in told]
            if isinstance(told[-1], Finished):
                del self._followed[name]
        return events

    def _look_up(self, pipe: Pipe) -> None:
        """Raise ControllerError for a request that would never have an event."""
        while self._unseen:
            name = self._unseen.pop()
            request = self._followed[name].request
            if not pipe.call("EXISTS", self._keys.request(request)):
                del self._followed[name]
                raise not_in_log(request)


class _Followed:
    """How far a request was followed."""

    def __init__(self, request: int, base: int):
        self.request = request
        self._base = base
        self.position = f"{base}-0"

    def events(self, entries: list[Entry]) -> list[Accepted | Finished]:
        """The events of the next entries of its stream, up to its end."""
        self.position = entries[-1][0]
        events: list[Accepted | Finished] = []
        for _, fields in entries:
            event = event_from(fields)
            events.append(event.since(self._base) if isinstance(event, Accepted) else event)
            if isinstance(event, Finished):
                break
        return events


def not_in_log(request: int) -> ControllerError:
    """One sentence for a request that was never asked, or was forgotten."""
    return ControllerError(f"Request {request} is not in the log.")
