"""The request log: what was asked for and what was answered, kept in Redis.

It is the only durable state of a cluster; everything else can be rebuilt from it.
"""

from __future__ import annotations

import json
import secrets
import time
import typing
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, Self

from pipespec.controller.connection import RETRY_S, PatientPipe, Pipe
from pipespec.controller.keys import Keys
from pipespec.controller.scripts import load_scripts
from pipespec.core import Request, TokenLogprobs
from pipespec.errors import ControllerError, Unreachable

# Why a request ended for which nobody waited any more.
CANCELLED = "cancelled"
# How long a finished request can still be read.
KEEP_FINISHED_S = 3600
# A blocking read is renewed this often, so that a silent Redis is noticed.
LISTEN_S = 5.0
# How long a user waits for a Redis that is away.
PATIENCE_S = 30.0
# How long Redis remembers that it has taken a request; longer than anybody's patience.
KEEP_TICKET_S = 600
# How often to look for something that Redis does not announce.
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Accepted:
    """Tokens joined a request's sequence, which had `base` tokens (prompt included).

    `logprobs` has one entry per token if the request asked for them, else none.
    """

    base: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()

    def since(self, base: int) -> Accepted:
        """The part from the position `base` on."""
        skip = max(0, base - self.base)
        return Accepted(self.base + skip, self.tokens[skip:], self.logprobs[skip:])


@dataclass(frozen=True, slots=True)
class Finished:
    """A request ended. The last event of its stream."""

    reason: str


# The id and the fields of an entry of a Redis stream.
Entry = tuple[str, dict[bytes, bytes]]


class RequestLog:
    """A client of the request log, for one epoch. Not for several threads.

    Users enqueue, stream and cancel; the head takes requests, accepts tokens and finishes; every
    rank reports. What a stale epoch writes is refused with StaleEpoch. `accept`, `finish`
    and `report` do not wait for Redis: an error of theirs surfaces at a later call.

    When Redis goes away, everything else connects again for up to `patience` seconds and goes
    on where it was, so that a restart of a Redis that keeps its data is not seen. After that
    Unreachable is raised. The three above are not repeated.
    """

    def __init__(self, url: str, *, namespace: str, epoch: int, patience: float = PATIENCE_S):
        self._url = url
        self._keys = Keys(namespace)
        self._epoch = epoch
        self._arrival = "0"
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

    def enqueue(self, **asked: Any) -> int:
        """Puts a request, given as the fields of `Request` except `id`, in the queue.

        Returns its id.
        """
        request = Request(id=0, **asked)
        spec = asdict(request)
        del spec["id"]
        keys = self._keys
        return self._call(
            "enqueue",
            (keys.counter, keys.queue, keys.arrivals, keys.requests),
            json.dumps(spec),
            len(request.prompt),
            # If the reply is lost with the connection, the second try finds the first.
            secrets.token_hex(8),
            KEEP_TICKET_S,
        )

    def close_queue(self, epoch: int | None = None) -> None:
        """Says that no request will follow those that are in the queue, in this epoch or
        another."""
        keys, epoch = self._keys, self._epoch if epoch is None else epoch
        closed = keys.closed(epoch)
        self._call("close_queue", (keys.epoch, keys.counter, keys.arrivals, closed), epoch)

    def next_request(self, timeout: float | None = None) -> Request | None:
        """Takes the next request off the queue.

        None if none comes within `timeout` seconds, or ever: the queue is empty and closed.
        """
        keys = self._keys
        deadline = None if timeout is None else time.monotonic() + timeout
        names = (
            keys.epoch,
            keys.queue,
            keys.admitted,
            keys.requests,
            keys.closed(self._epoch),
            keys.finished,
        )
        while True:
            found = self._call("admit", names, self._epoch, KEEP_FINISHED_S)
            if isinstance(found, list):
                return _revive(found[0], found[1])
            if found or timeout == 0:
                return None
            entries = self._read_stream(keys.arrivals, self._arrival, deadline)
            if entries is None:
                return None
            self._arrival = entries[-1][0]

    def request(self, request: int) -> Request:
        """What was asked for in a request. Raises ControllerError if it is not in the log."""
        return _revive(request, self._asked(self._pipe, request))

    def accept(
        self,
        request: int,
        base: int,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        """Appends tokens to a request whose sequence has `base` tokens (prompt included).

        `logprobs` has one entry per token, or none.

        Positions that the sequence already has are skipped. A base beyond its end, and new
        tokens of a finished request, are refused.
        """
        keys = self._keys
        self._send(
            "accept",
            (keys.epoch, keys.request(request), keys.events(request)),
            self._epoch,
            request,
            base,
            " ".join(map(str, tokens)),
            " ".join(map(_written, logprobs)),
        )

    def finish(self, request: int, reason: str) -> None:
        """Ends a request. The first reason stays."""
        keys = self._keys
        self._send(
            "finish",
            (
                keys.epoch,
                keys.request(request),
                keys.events(request),
                keys.queue,
                keys.admitted,
                keys.finished,
            ),
            self._epoch,
            request,
            reason,
            KEEP_FINISHED_S,
        )

    def cancel(self, request: int) -> None:
        """Ends a request for which nobody waits any more, with the reason "cancelled": at once
        if it is in the queue, else as soon as the head hears of it.

        One that has finished stays as it is. Raises ControllerError if it is not in the log.
        """
        keys = self._keys
        self._call(
            "cancel",
            (
                keys.epoch,
                keys.request(request),
                keys.events(request),
                keys.queue,
                keys.finished,
            ),
            keys.epochs,
            request,
            CANCELLED,
            KEEP_FINISHED_S,
        )

    def tokens(self, request: int) -> tuple[int, ...]:
        """The tokens accepted so far, prompt excluded."""
        entries = _entries(self._pipe.call("XRANGE", self._keys.events(request), "-", "+"))
        events = [_event(fields) for _, fields in entries]
        return tuple(t for event in events if isinstance(event, Accepted) for t in event.tokens)

    def stream(
        self, request: int, *, base: int = 0, heartbeat: float | None = None
    ) -> Iterator[Accepted | Finished | None]:
        """The events of a request as they come, on a connection of its own; ends with Finished.

        A reader may start late: what happened before is told first. One that starts again
        names as `base` the length of the sequence (prompt included) that it already has.
        With `heartbeat` the iterator yields None whenever so many seconds pass without an
        event, so that the caller can look whether the cluster is alive.
        None comes also while Redis is away, for at most `patience` seconds.
        Raises ControllerError if the request is not in the log.
        """
        pipe: Pipe | None = None
        position = f"{base}-0"
        give_up: float | None = None
        try:
            while True:
                deadline = None if heartbeat is None else time.monotonic() + heartbeat
                try:
                    if pipe is None:
                        pipe = Pipe(self._url)
                        self._asked(pipe, request)
                    entries = self._read_stream(
                        self._keys.events(request), position, deadline, pipe
                    )
                    give_up = None
                except Unreachable:
                    now = time.monotonic()
                    give_up = give_up or now + self._patience
                    if now >= give_up:
                        raise
                    if pipe:
                        pipe.close()
                    pipe = entries = None
                    time.sleep(RETRY_S)
                if entries is None:
                    if heartbeat is not None:
                        yield None
                    continue
                position = entries[-1][0]
                for _, fields in entries:
                    event = _event(fields)
                    yield event.since(base) if isinstance(event, Accepted) else event
                    if isinstance(event, Finished):
                        return
        finally:
            if pipe:
                pipe.close()

    def reports(
        self, request: int, count: int, timeout: float, *, partial: bool = False
    ) -> dict[int, dict[str, Any]]:
        """The report of every rank on a request, by rank; a later report replaces an earlier.

        Waits for `count` ranks. If they take longer than `timeout` seconds it raises
        ControllerError or, if `partial`, returns what there is.
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
        return dict(sorted(found.items()))

    def _send_report(self, rank: int, request: int, stats: dict[str, Any]) -> None:
        keys = self._keys
        self._send(
            "report",
            (keys.epoch, keys.request(request), keys.reports(request)),
            self._epoch,
            request,
            rank,
            json.dumps(stats),
            KEEP_FINISHED_S,
        )

    def _asked(self, pipe: Pipe, request: int) -> bytes:
        asked = pipe.call("HGET", self._keys.request(request), "asked")
        if asked is None:
            raise ControllerError(f"Request {request} is not in the log.")
        return bytes(asked)

    def _send(self, script: str, keys: Sequence[str], *arguments: Any) -> None:
        """Runs a transition without waiting. Raises what the replies that came so far mean."""
        # Sent first: somebody may be waiting for what this brings about.
        self._pipe.send(*evalsha(script, keys, *arguments))
        self._pipe.drain()

    def _call(self, script: str, keys: Sequence[str], *arguments: Any) -> Any:
        return self._pipe.call(*evalsha(script, keys, *arguments))

    def _read_stream(
        self, key: str, after: str, deadline: float | None, pipe: Pipe | None = None
    ) -> list[Entry] | None:
        """The entries of a stream after `after`, waiting for the first; None at `deadline`."""
        pipe = pipe or self._pipe
        while True:
            left = LISTEN_S if deadline is None else min(deadline - time.monotonic(), LISTEN_S)
            block = max(1, int(left * 1000))
            found = pipe.call("XREAD", "BLOCK", block, "STREAMS", key, after, timeout=block / 1000)
            if found:
                return _entries(found[0][1])
            if deadline is not None and time.monotonic() >= deadline:
                return None


def load(pipe: Pipe) -> None:
    """Gives Redis every transition."""
    for script in load_scripts().values():
        pipe.send("SCRIPT", "LOAD", script.source)
    pipe.flush()


def evalsha(script: str, keys: Sequence[str], *arguments: Any) -> tuple[Any, ...]:
    """The command that runs a transition."""
    return ("EVALSHA", load_scripts()[script].sha, len(keys), *keys, *arguments)


def _entries(found: list[Any]) -> list[Entry]:
    return [
        (entry.decode(), dict(zip(pairs[::2], pairs[1::2], strict=True))) for entry, pairs in found
    ]


def _event(fields: dict[bytes, bytes]) -> Accepted | Finished:
    if b"reason" in fields:
        return Finished(fields[b"reason"].decode())
    return Accepted(
        int(fields[b"base"]),
        tuple(map(int, fields[b"tokens"].split())),
        tuple(map(_read, fields.get(b"notes", b"").decode().split())),
    )


def _written(logprobs: TokenLogprobs) -> str:
    """As one word: the token's log-probability, then id:log-probability of the top ones."""
    pairs = (f"{token}:{value!r}" for token, value in logprobs.top)
    return ",".join((repr(logprobs.logprob), *pairs))


def _read(word: str) -> TokenLogprobs:
    """The inverse of `_written`."""
    own, *pairs = word.split(",")
    split = (pair.split(":") for pair in pairs)
    return TokenLogprobs(float(own), tuple((int(token), float(value)) for token, value in split))


def _revive(request: int, asked: bytes) -> Request:
    return _build(Request, {**json.loads(asked), "id": request})


def _build(kind: Any, values: dict[str, Any]) -> Any:
    """A dataclass of `kind` from what JSON made of it: lists to tuples, dicts to dataclasses."""
    hints = typing.get_type_hints(kind)

    def revive(hint: Any, value: Any) -> Any:
        if isinstance(value, list):
            return tuple(revive(None, item) for item in value)
        if isinstance(value, dict):
            # The annotation may be `Sampling | None`.
            for option in (hint, *typing.get_args(hint)):
                if is_dataclass(option):
                    return _build(option, value)
        return value

    return kind(**{name: revive(hints[name], value) for name, value in values.items()})
