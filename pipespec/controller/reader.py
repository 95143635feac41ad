"""Reading the request log: what was asked, and what has been answered so far."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, Self

from pipespec.controller.connection import PatientPipe
from pipespec.controller.following import block_ms, not_in_log
from pipespec.controller.keys import Keys
from pipespec.controller.records import (
    Accepted,
    Entry,
    Event,
    entries_of,
    event_from,
    unpack_request,
)
from pipespec.controller.scripts import load
from pipespec.controller.streams import LISTEN_S, Streams
from pipespec.core import Request
from pipespec.errors import ControllerError
from pipespec.stats import blank

# How long a user waits for a Redis that is away.
PATIENCE_S = 30.0


class RequestReader:
    """A client of the request log that reads it. Not for several threads.

    When Redis goes away, it connects again for up to `patience` seconds and goes on where it
    was, so that a restart of a Redis that keeps its data is not seen. After that Unreachable is
    raised.
    """

    def __init__(self, url: str, *, namespace: str, patience: float = PATIENCE_S):
        self._url = url
        self._keys = Keys(namespace)
        self._patience = patience
        self._pipe = PatientPipe(url, prepare=load, patience=patience)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                # Redis drops what a closed connection sent and it has not read yet.
                self._pipe.flush()
        finally:
            self.close()

    def close(self) -> None:
        self._pipe.close()

    def request(self, request: int) -> Request:
        """What was asked for in a request. Raises ControllerError if it is not in the log."""
        asked = self._pipe.call("HGET", self._keys.request(request), "asked")
        if asked is None:
            raise not_in_log(request)
        return unpack_request(request, asked)

    def tokens(self, request: int) -> tuple[int, ...]:
        """The tokens accepted so far, prompt excluded."""
        entries = entries_of(self._pipe.call("XRANGE", self._keys.events(request), "-", "+"))
        events = [event_from(fields) for _, fields in entries]
        return tuple(t for event in events if isinstance(event, Accepted) for t in event.tokens)

    def streams(self) -> Streams:
        """What follows any number of requests, on a connection of its own."""
        return Streams(self._url, namespace=self._keys.namespace, patience=self._patience)

    def stream(
        self, request: int, *, base: int = 0, heartbeat: float | None = None
    ) -> Iterator[Event | None]:
        """The events of a request as they come, on a connection of its own; ends with Finished.

        A reader may start late: what happened before is told first. One that starts again
        names as `base` the length of the sequence (prompt included) that it already has.
        With `heartbeat` the iterator yields None whenever so many seconds pass without an
        event, so that the caller can look whether the cluster is alive.
        None comes also while Redis is away, for at most `patience` seconds.
        Raises ControllerError if the request is not in the log.
        """
        with self.streams() as streams:
            streams.add(request, base)
            while len(streams):
                found = streams.next(heartbeat)
                if not found:
                    yield None
                for _, event in found:
                    yield event

    def reports(
        self, request: int, count: int, timeout: float, *, partial: bool = False
    ) -> dict[int, dict[str, Any]]:
        """The report of every rank on a request, by rank; a later report replaces an earlier.

        Waits for `count` ranks; of a request that never reached the stages only the head has
        something to say. If they take longer than `timeout` seconds it raises ControllerError or,
        if `partial`, returns what there is.
        """
        deadline = time.monotonic() + timeout
        found: dict[int, dict[str, Any]] = {}
        position = "0"
        while len(found) < count:
            entries = self._read_stream(self._keys.reports(request), position, deadline)
            if entries is None and partial:
                break
            if entries is None:
                raise ControllerError(
                    f"Only {len(found)} of {count} ranks ({sorted(found)}) reported on request "
                    f"{request} within {timeout:g} seconds."
                )
            position = entries[-1][0]
            for _, fields in entries:
                found[int(fields[b"rank"])] = json.loads(fields[b"report"])
            if found.get(0, {}).get("alone"):
                found = {rank: blank(rank) for rank in range(count)} | found
        return dict(sorted(found.items()))

    def _read_stream(self, key: str, after: str, deadline: float | None) -> list[Entry] | None:
        """The entries of a stream after `after`, waiting for the first; None at `deadline`."""
        while True:
            left = LISTEN_S if deadline is None else min(deadline - time.monotonic(), LISTEN_S)
            block = block_ms(left)
            command = ("XREAD", "BLOCK", block, "STREAMS", key, after)
            found = self._pipe.call(*command, timeout=block / 1000)
            if found:
                return entries_of(found[0][1])
            if deadline is not None and time.monotonic() >= deadline:
                return None
