"""The request log: what was asked for and what was answered, kept in Redis.

It is the only durable state of a cluster; everything else can be rebuilt from it.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from pipespec.controller.reader import PATIENCE_S, RequestReader
from pipespec.controller.records import CANCELLED, pack_logprobs, pack_request, unpack_request
from pipespec.controller.scripts import evalsha
from pipespec.core import Request, TokenLogprobs

# How long a finished request can still be read.
KEEP_FINISHED_S = 3600
# How long Redis remembers that it has taken a request; longer than anybody's patience.
KEEP_TICKET_S = 600


class RequestLog(RequestReader):
    """A client of the request log, for one epoch, that also writes. Not for several threads.

    Users enqueue, stream and cancel; the head takes requests, accepts tokens and finishes; every
    rank reports. What a stale epoch writes is refused with StaleEpoch. `accept`, `finish`
    and `report` do not wait for Redis: an error of theirs surfaces at a later call, and they
    are not repeated when Redis goes away.
    """

    def __init__(self, url: str, *, namespace: str, epoch: int, patience: float = PATIENCE_S):
        super().__init__(url, namespace=namespace, patience=patience)
        self._epoch = epoch
        self._arrival = "0"

    def enqueue(self, **asked: Any) -> int:
        """Puts a request, given as the fields of `Request` except `id`, in the queue.

        Returns its id.
        """
        request = Request(id=0, **asked)
        keys = self._keys
        return self._call(
            "enqueue",
            (keys.counter, keys.queue, keys.arrivals, keys.requests),
            pack_request(request),
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
                return unpack_request(found[0], found[1])
            if found or timeout == 0:
                return None
            entries = self._read_stream(keys.arrivals, self._arrival, deadline)
            if entries is None:
                return None
            self._arrival = entries[-1][0]

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
            " ".join(map(pack_logprobs, logprobs)),
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

    def _send(self, script: str, keys: Sequence[str], *arguments: Any) -> None:
        """Runs a transition without waiting. Raises what the replies that came so far mean."""
        # Sent first: somebody may be waiting for what this brings about.
        self._pipe.send(*evalsha(script, keys, *arguments))
        self._pipe.drain()

    def _call(self, script: str, keys: Sequence[str], *arguments: Any) -> Any:
        return self._pipe.call(*evalsha(script, keys, *arguments))
