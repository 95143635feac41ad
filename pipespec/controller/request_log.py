"""The request log: requests and their answers, stored in Redis. It is the only durable state of a
cluster; everything else can be rebuilt from it."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from pipespec.controller.log_records import (
    CANCELLED,
    Accepted,
    check_size,
    entries_of,
    event_from,
    pack_logprobs,
    pack_requests,
)
from pipespec.controller.lua_scripts import evalsha
from pipespec.controller.redis_connection import RedisClient
from pipespec.controller.redis_keys import RedisKeys
from pipespec.core import PromptLogprobs, Request
from pipespec.limits import MAX_COUNT

# How long a finished request can still be read.
KEEP_FINISHED_S = 3600
# How long Redis remembers that it has taken a request; longer than anybody's patience.
KEEP_TICKET_S = 600


class RequestLog(RedisClient):
    """The request log as the processes of a cluster use it, for one epoch. Not for several threads.
    The head takes requests (`Controller.next_requests`), accepts tokens and finishes; every rank
    reports. What a stale epoch writes is refused with StaleEpoch. `accept`, `add_prompt_logprobs`,
    `finish` and `report` do not wait for Redis: an error of theirs surfaces at a later call. When
    Redis goes away, every call raises Unreachable, and nothing is repeated."""

    def __init__(self, url: str, *, namespace: str, epoch: int):
        super().__init__(url, namespace)
        self._epoch = epoch
        self._pipe.load_scripts()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                # Redis drops what a closed connection sent and it has not read yet.
                self._pipe.flush()
        finally:
            self.close()

    def enqueue(self, **fields: Any) -> int:
        """Puts a request, given as the fields of `Request` except `id`, in the queue; its id."""
        return self._pipe.call(*enqueuing(self._keys, [Request(id=0, **fields)]))

    def cancel(self, request: int) -> None:
        self._pipe.call(*cancelling(self._keys, request))

    def tokens(self, request: int) -> tuple[int, ...]:
        entries = entries_of(self._pipe.call("XRANGE", self._keys.events(request), "-", "+"))
        events = [event_from(fields) for _, fields in entries]
        return tuple(t for event in events if isinstance(event, Accepted) for t in event.tokens)

    def close_queue(self) -> None:
        """Says that no request will follow those that are in the queue, in this epoch."""
        keys, epoch = self._keys, self._epoch
        self._call("close_queue", (keys.epoch, keys.closed(epoch)), epoch, keys.epochs)

    def accept(self, pieces: Iterable[tuple[int, Accepted]]) -> None:
        """Appends tokens to requests, each named with what joins its sequence. Positions that the
        sequence already has are skipped. A base beyond its end, and new tokens of a finished
        request, are refused; then nothing of all this is written."""
        words: list[int | str] = []
        for request, piece in pieces:
            tokens = " ".join(map(str, piece.tokens))
            words += (request, piece.base, tokens, " ".join(map(pack_logprobs, piece.logprobs)))
        self._send("accept", (self._keys.epoch, self._keys.requests), self._epoch, *words)

    def add_prompt_logprobs(self, request: int, scored: PromptLogprobs) -> None:
        """Publishes log-probabilities of a request's prompt to its readers. Positions that were
        published before are skipped, and so are finished requests."""
        keys = self._keys
        logprobs = " ".join(map(pack_logprobs, scored.logprobs))
        names = (keys.epoch, keys.request(request), keys.events(request))
        self._send("add_prompt_logprobs", names, self._epoch, scored.base, logprobs)

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

    def _send(self, script: str, keys: Sequence[str], *arguments: Any) -> None:
        """Runs a transition without waiting. Raises what the replies that came so far mean."""
        # Sent first: somebody may be waiting for what this brings about.
        self._pipe.send(*evalsha(script, keys, *arguments))
        self._pipe.drain()

    def _call(self, script: str, keys: Sequence[str], *arguments: Any) -> Any:
        return self._pipe.call(*evalsha(script, keys, *arguments))


# --- what users ask for, as commands that may run twice ----------------------------------------


def enqueuing(
    keys: RedisKeys, requests: Sequence[Request], context: int = MAX_COUNT
) -> tuple[Any, ...]:
    """Puts requests in the queue that differ in prompt, length and seed alone; the reply is the
    number of the first. Their `id` is not looked at. Raises ConfigError if they may occupy too much
    (`check_size`)."""
    shared, own = pack_requests(requests)
    check_size(requests, len(shared), context)
    lengths = [len(each.prompt) for each in requests]
    return evalsha(
        "enqueue",
        (keys.epoch, keys.counter, keys.queue, keys.requests),
        keys.epochs,
        shared,
        # If the reply is lost with the connection, the second try finds the first.
        secrets.token_hex(8),
        KEEP_TICKET_S,
        requests[0].priority,
        requests[0].tenant,
        *chain.from_iterable(zip(own, lengths, strict=True)),
    )


def cancelling(keys: RedisKeys, request: int) -> tuple[Any, ...]:
    """Ends a request whose client no longer waits. Refused if it is not in the log."""
    return evalsha(
        "cancel",
        (keys.epoch, keys.request(request), keys.events(request), keys.queue, keys.finished),
        keys.epochs,
        request,
        CANCELLED,
        KEEP_FINISHED_S,
    )
