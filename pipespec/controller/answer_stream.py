"""Commands that read the event streams of requests, and the parsing of their replies. No I/O."""

from __future__ import annotations

from typing import Any

from pipespec.controller.log_records import Entry, Event, Finished, entries_of, event_from
from pipespec.controller.redis_keys import RedisKeys
from pipespec.errors import UnknownRequest

# Entries of one stream that are read at once.
MOST_ENTRIES = 256


class AnswerStreams:
    """Which requests are followed, and how far, each to its Finished.

    One XREAD reads the events of all of them (`read`); `events` parses its reply.
    """

    def __init__(self, namespace: str):
        self._keys = RedisKeys(namespace)
        # Of every request that is followed, by the name of its stream.
        self._followed: dict[bytes, _Followed] = {}
        self._held: set[bytes] = set()  # streams that are not read for now
        self._unseen: set[bytes] = set()  # not looked up in the log on this connection

    def __len__(self) -> int:
        """How many requests are followed."""
        return len(self._followed)

    def add(self, request: int, *, known: bool = False) -> None:
        """Follow a request, from its first event on; `known`: it is in the log for certain."""
        name = self._name(request)
        self._followed[name] = _Followed(request)
        if not known:
            self._unseen.add(name)

    def drop(self, request: int) -> None:
        """Follow a request no more, if it still is."""
        self._forget(self._name(request))

    def hold(self, request: int) -> None:
        """Read nothing more of a request until `release`; the log keeps it."""
        if (name := self._name(request)) in self._followed:
            self._held.add(name)

    def release(self, request: int) -> None:
        """Read on where `hold` has stopped."""
        self._held.discard(self._name(request))

    def reconnected(self) -> None:
        """Nothing is known of what Redis holds now."""
        self._unseen = set(self._followed)

    def look_up(self) -> tuple[int, tuple[Any, ...]] | None:
        """A request of which it must be asked whether it is in the log, and the command that asks;
        if it is not, it would never have an event. None: there is none."""
        while self._unseen:
            followed = self._followed.get(self._unseen.pop())
            if followed:
                return followed.request, ("EXISTS", self._keys.request(followed.request))
        return None

    def missing(self, request: int) -> UnknownRequest:
        """A request is not in the log; it is followed no more."""
        self.drop(request)
        return not_in_log(request)

    def read(self, seconds: float, *more: tuple[str, str]) -> tuple[Any, ...]:
        """The command that waits up to so many seconds for events of what is followed.

        `more`: other streams that end the wait, each with its position.
        """
        read = {
            name: followed.position
            for name, followed in self._followed.items()
            if name not in self._held
        }
        names = (*read, *(name for name, _ in more))
        positions = (*read.values(), *(position for _, position in more))
        options = ("COUNT", MOST_ENTRIES, "BLOCK", block_ms(seconds))
        return ("XREAD", *options, "STREAMS", *names, *positions)

    def events(self, reply: list[Any] | None) -> list[tuple[int, Event]]:
        """The events in the reply to `read`, each with its request."""
        events: list[tuple[int, Event]] = []
        for name, entries in reply or []:
            followed = self._followed.get(name)
            if followed is None:  # dropped meanwhile
                continue
            new = followed.events(entries_of(entries))
            events += [(followed.request, event) for event in new]
            if isinstance(new[-1], Finished):
                self._forget(name)
        return events

    def _name(self, request: int) -> bytes:
        return self._keys.events(request).encode()

    def _forget(self, name: bytes) -> None:
        self._followed.pop(name, None)
        self._held.discard(name)


class _Followed:
    """How far a request was followed."""

    def __init__(self, request: int):
        self.request = request
        self.position = "0"

    def events(self, entries: list[Entry]) -> list[Event]:
        """The events of the next entries of its stream, up to its end."""
        self.position = entries[-1][0]
        events: list[Event] = []
        for _, fields in entries:
            events.append(event_from(fields))
            if isinstance(events[-1], Finished):
                break
        return events


def block_ms(seconds: float) -> int:
    """How long a read may block, as Redis takes it."""
    return max(1, int(seconds * 1000))


def not_in_log(request: int) -> UnknownRequest:
    """One sentence for a request that was never asked, or was forgotten."""
    return UnknownRequest(f"Request {request} is not in the log.")
