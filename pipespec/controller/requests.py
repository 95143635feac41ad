"""The request log: what was asked for and what was answered, kept in Redis.

It is the only durable state of a cluster; everything else can be rebuilt from it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from pipespec.controller.keys import Keys
from pipespec.controller.reader import PATIENCE_S, RequestReader
from pipespec.controller.records import (
    CANCELLED,
    Accepted,
    pack_logprobs,
    pack_request,
)
from pipespec.controller.scripts import evalsha
from pipespec.core import Request, Scored

# How long a finished request can still be read.
KEEP_FINISHED_S = 3600
# How long Redis remembers that it has taken a request; longer than anybody's patience.
KEEP_TICKET_S = 600


class RequestLog(RequestReader):
    """A client of the request log, for one epoch, that also writes. Not for several threads.

    Users enqueue, stream and cancel; the head takes requests (`Controller.next_requests`),
    accepts tokens and finishes; every rank reports. What a stale epoch writes is refused with
    StaleEpoch. `accept`, `score`, `finish` and `report` do not wait for Redis: an error of theirs
    surfaces at a later call, and they are not repeated when Redis goes away.
    """

    def __init__(self, url: str, *, namespace: str, epoch: int, patience: float = PATIENCE_S):
        super().__init__(url, namespace=namespace, patience=patience)
        self._epoch = epoch

    def enqueue(self, **asked: Any) -> int:
        """Puts a request, given as the fields of `Request` except `id`, in the queue.

        Returns its id.
        """
        return self._pipe.call(*enqueuing(self._keys, Request(id=0, **asked)))

    def close_queue(self, epoch: int | None = None) -> None:
        """Says that no request will follow those that are in the queue, in this epoch or
        another."""
        keys, epoch = self._keys, self._epoch if epoch is None else epoch
        self._call("close_queue", (keys.epoch, keys.closed(epoch)), epoch, keys.epochs)

    def accept(self, pieces: Iterable[tuple[int, Accepted]]) -> None:
        """Appends tokens to requests, each named with what joins its sequence.

        Positions that the sequence already has are skipped. A base beyond its end, and new
        tokens of a finished request, are refused; then nothing of all this is written.
        """
        words: list[int | str] = []
        for request, piece in pieces:
            tokens = " ".join(map(str, piece.tokens))
            words += (request, piece.base, tokens, " ".join(map(pack_logprobs, piece.logprobs)))
        self._send("accept", (self._keys.epoch, self._keys.requests), self._epoch, *words)

    def score(self, request: int, told: Scored) -> None:
        """Tells the readers of a request what the target thinks of its prompt.

        Positions that were told of before are skipped, and so is all of a finished request.
        """
        keys = self._keys
        notes = " ".join(map(pack_logprobs, told.logprobs))
        names = (keys.epoch, keys.request(request), keys.events(request))
        self._send("score", names, self._epoch, told.base, notes)

    def finish(
        self,
        request: int,
        reason: str,
        prefill_ns: int | None = None,
        cached: int | None = None,
    ) -> None:
        """Ends a request (`Finished`). The first reason stays."""
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
            *("" if known is None else known for known in (prefill_ns, cached)),
        )

    def cancel(self, request: int) -> None:
        """Ends a request for which nobody waits any more, with the reason "cancelled": at once
        if it is in the queue, else as soon as the head hears of it.

        One that has finished stays as it is. Raises ControllerError if it is not in the log.
        """
        self._pipe.call(*cancelling(self._keys, request))

    def _send_report(self, rank: int, request: int, stats: dict[str, Any]) -> None:
        keys = self._keys
        self._send(
            "report",
            (keys.epoch, keys.request(request), keys.reports(request)),
            self._epoch,
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


# --- what users ask for, as commands that may run twice ----------------------------------------


def enqueuing(keys: Keys, request: Request) -> tuple[Any, ...]:
    """Puts a request in the queue; the reply is its number. `request.id` is not looked at."""
    return evalsha(
        "enqueue",
        (keys.epoch, keys.counter, keys.queue, keys.requests),
        keys.epochs,
        pack_request(request),
        len(request.prompt),
        # If the reply is lost with the connection, the second try finds the first.
        secrets.token_hex(8),
        KEEP_TICKET_S,
        request.priority,
    )


def cancelling(keys: Keys, request: int) -> tuple[Any, ...]:
    """Ends a request for which nobody waits any more. Refused if it is not in the log."""
    return evalsha(
        "cancel",
        (keys.epoch, keys.request(request), keys.events(request), keys.queue, keys.finished),
        keys.epochs,
        request,
        CANCELLED,
        KEEP_FINISHED_S,
    )
