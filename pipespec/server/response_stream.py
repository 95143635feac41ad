"""How many requests may wait, and the replies to one: events of the request log in, a JSON body or
a stream out, and cancellation when the client disconnects. A `ReplyFormat` decides what they look
like."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import cast

from pydantic_core import to_json
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from pipespec.client.async_client import AsyncAnswer, AsyncClient
from pipespec.controller.log_records import Accepted, Event, Finished, check_answered
from pipespec.core import Request
from pipespec.errors import PipespecError
from pipespec.server.answer_record import AnswerRecord
from pipespec.server.api_errors import ApiError, api_error_of
from pipespec.server.metrics import ABORTED, Metrics, RequestTimer
from pipespec.server.reply_format import FinishReason, OutputDelta, ReplyFormat
from pipespec.server.request_parsing import ParsedRequest
from pipespec.text import FinalText, Tokenizer, special_markers

# A connection sends something at least this often while its request waits.
KEEPALIVE_S = 10.0
# The status in proxies' logs for a client that has disconnected; no client reads this reply.
CLIENT_CLOSED_REQUEST = 499


class AdmissionQueue:
    """Counts answers that have not started, and the tokens of their prompts, by tenant. A request
    that would exceed a limit is refused, unless its tenant has less than an equal share of it. An
    empty queue admits one request of any size."""

    def __init__(self, max_requests: int, max_tokens: int):
        self._limits = max_requests, max_tokens
        self.requests: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()

    def admit(self, requests: int, tokens: int = 0, tenant: str = "") -> QueueEntry:
        """Admit so many answers to prompts of so many tokens in all; 0: the prompts are not
        tokenized yet. Raises ApiError."""
        share = 1 / len({*+self.requests, tenant})
        for waiting, more, most, what in zip(
            (self.requests, self.tokens),
            (requests, tokens),
            self._limits,
            ("{} requests wait and {} may", "prompts of {} tokens wait and {} may"),
            strict=True,
        ):
            total = waiting.total()
            if total and total + more > most and waiting[tenant] + more > most * share:
                why = f"The queue is full: {what.format(total, most)}; try again in a moment."
                raise ApiError(HTTPStatus.TOO_MANY_REQUESTS, why, code="queue_full")
        self.requests[tenant] += requests
        self.tokens[tenant] += tokens
        return QueueEntry(self, tenant, requests, tokens)


@dataclass
class QueueEntry:
    """The part of the queue that one HTTP request holds until its answers start, or to its end."""

    queue: AdmissionQueue
    tenant: str
    requests: int
    tokens: int

    def started(self, tokens: int) -> None:
        self._free(1, tokens)

    def close(self) -> None:
        self._free(self.requests, self.tokens)

    def _free(self, requests: int, tokens: int) -> None:
        self.requests -= requests
        self.tokens -= tokens
        for counts, fewer in ((self.queue.requests, requests), (self.queue.tokens, tokens)):
            counts[self.tenant] -= fewer
            if not counts[self.tenant]:
                del counts[self.tenant]


@dataclass(frozen=True)
class RequestOrigin:
    """Where a request comes from: the client's address and name for itself (`User-Agent`), what it
    asks and its API key. Only this server knows that: it is in no log."""

    client: str
    agent: str
    preview: str
    api_key_digest: bytes


def kept_name(reply: str, api_key_digest: bytes) -> str:
    """The name in the log of what is kept of a reply: only the id, which is random and not in the
    log, and the same API key lead to it."""
    return hmac.new(reply.encode(), api_key_digest, hashlib.sha256).hexdigest()


class ResponseStream:
    """The answers to one HTTP request, as the cluster decodes them. Close it when done."""

    def __init__(
        self,
        client: AsyncClient,
        request: ParsedRequest,
        queue_entry: QueueEntry,
        metrics: Metrics,
        on_closed: Callable[[ResponseStream], None],
        origin: RequestOrigin,
        record: AnswerRecord | None = None,
    ):
        self.request = request
        self.origin = origin
        self._on_closed = on_closed
        self._client = client
        self._queue_entry = queue_entry
        self._following = AsyncExitStack()
        self._events: AsyncAnswer | None = None
        timers = metrics.request_arrived(request)
        texts = _texts(client.served.tokenizer, request)
        self._answers = [
            _Answer(i, request.max_tokens[i // request.n], *each)
            for i, each in enumerate(zip(texts, timers, strict=True))
        ]
        self._by_number: dict[int, _Answer] = {}  # of the request in the log
        self._record = record

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the answers in the cluster's log, once they are submitted."""
        return tuple(self._by_number)

    @property
    def summary(self) -> str:
        """Numbers, tokens and ends of the answers so far, for the access log."""
        timers = [answer.timer for answer in self._answers]
        return (
            f" request={','.join(map(str, self.numbers)) or '-'} "
            f"prompt={self.request.prompt_tokens} answer={sum(t.num_tokens for t in timers)} "
            f"end={','.join(timer.reason for timer in timers)}"
        )

    async def submit(self) -> None:
        self._events = await self._following.enter_async_context(self._client.follow())
        request = self.request
        asked = [
            Request(
                id=0,
                prompt=request.prompt_of(answer.index),
                # The cluster decodes one token at least, also if only the prompt is wanted.
                max_new_tokens=answer.max_tokens or 1,
                eos=request.eos,
                stop=request.stop,
                sampling=sampling,
                priority=request.priority,
                cache_salt=request.cache_salt,
                tenant=self._queue_entry.tenant,
            )
            for answer, sampling in zip(self._answers, request.sampling_params, strict=True)
        ]
        numbers = await self._events.submit_all(asked)
        self._by_number = dict(zip(numbers, self._answers, strict=True))

    async def deltas(self, heartbeat: float) -> AsyncIterator[OutputDelta | None]:
        """What the cluster adds to the answers, as it arrives; None after each `heartbeat` seconds
        without an event. Raises RankFailed or Unreachable if the cluster is gone."""
        assert self._events is not None
        while len(self._events):
            events = await self._events.next(heartbeat)
            if not events:
                yield None
            for number, event in events:
                answer = self._by_number[number]
                if isinstance(event, Accepted) and not answer.started:
                    answer.started = True
                    self._queue_entry.started(len(self.request.prompt_of(answer.index)))
                yield answer.delta(event)

    async def keep(self, kept: tuple[str, bytes] | None) -> None:
        """Keep what a reply says that a later request may continue. Raises Unreachable."""
        if kept is not None:
            reply, content = kept
            name = kept_name(reply, self.origin.api_key_digest)
            await self._client.log.keep_conversation(name, content)

    def fail(self, error: PipespecError) -> None:
        if self._events is not None:
            self._events.interrupt(error)

    async def close(self) -> None:
        await self._following.aclose()
        self._queue_entry.close()
        for answer in self._answers:
            answer.timer.finished(ABORTED)
        self._on_closed(self)
        if self._record is not None:
            texts = [(self.request.prompt_of(each.index), each.tokens) for each in self._answers]
            await asyncio.to_thread(self._record.add, texts)


@dataclass
class _Answer:
    """One answer as it arrives. With `max_tokens` 0 the one token that the cluster decodes is
    dropped."""

    index: int
    max_tokens: int
    text: FinalText
    timer: RequestTimer
    started: bool = False
    tokens: list[int] = field(default_factory=list)

    def delta(self, event: Event) -> OutputDelta:
        if isinstance(event, Accepted):
            tokens = event.tokens if self.max_tokens else ()
            self.timer.add_tokens(len(tokens))
            self.tokens += tokens
            if not self.max_tokens:
                return OutputDelta(self.index, "")
            return OutputDelta(self.index, self.text.push(tokens), tokens, event.logprobs)
        if not isinstance(event, Finished):
            return OutputDelta(self.index, "", prompt_logprobs=event.logprobs)
        check_answered(event)
        reason = event.reason if self.max_tokens else "length"
        self.timer.finished(reason, event.prefill_ns)
        return OutputDelta(
            self.index,
            self.text.flush(),
            finish_reason=cast(FinishReason, reason),
            stop_string=self.text.found,
            num_cached_tokens=event.cached,
        )


def _texts(tokenizer: Tokenizer, request: ParsedRequest) -> list[FinalText]:
    """A detokenizer for each answer, which keeps the special tokens that parsers need."""
    special = request.tool_use.parser.special if request.tool_use else ()
    special += request.reasoning.special if request.reasoning else ()
    markers = special_markers(tokenizer, special) if special else {}
    return [
        FinalText(tokenizer, request.prompt_of(choice), request.stop, sampling.min_tokens, markers)
        for choice, sampling in enumerate(request.sampling_params)
    ]


# --- whole replies ------------------------------------------------------------------------------


async def full_response(
    stream: ResponseStream, reply_format: ReplyFormat, request: HttpRequest
) -> Response:
    """The answers in one reply, unless the client disconnects before. Raises PipespecError."""
    collecting = asyncio.ensure_future(_collect(stream, reply_format))
    disconnected = asyncio.ensure_future(_until_disconnected(request))
    try:
        await asyncio.wait({collecting, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return Response(collecting.result(), media_type="application/json")
    finally:
        for task in (collecting, disconnected):
            task.cancel()
        try:
            await asyncio.wait({collecting, disconnected})
        finally:
            await stream.close()


async def _collect(stream: ResponseStream, reply_format: ReplyFormat) -> bytes:
    async for delta in stream.deltas(KEEPALIVE_S):
        if delta is not None:
            reply_format.add(delta)
    await stream.keep(reply_format.kept)
    if reply_format.has_logprobs:  # those of long texts take seconds
        return await asyncio.to_thread(_to_json, reply_format)
    return _to_json(reply_format)


def _to_json(reply_format: ReplyFormat) -> bytes:
    return to_json(reply_format.response())


async def _until_disconnected(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# --- streams ------------------------------------------------------------------------------------


class EventStream(StreamingResponse):
    """Server-sent events. A client that disconnects, or does not read, delays no other client."""

    media_type = "text/event-stream"

    async def stream_response(self, send: Send) -> None:
        # A client that disconnects while nothing can be sent leaves the iterator suspended.
        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().stream_response(send)


class CompletionEvents(EventStream):
    """The answers to one request as a stream."""

    def __init__(self, stream: ResponseStream, reply_format: ReplyFormat):
        super().__init__(
            _events(stream, reply_format),
            headers={"Cache-Control": "no-cache"},
            media_type=reply_format.media_type,
        )
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # Whether or not the first event was sent.
            await self._stream.close()


async def _events(stream: ResponseStream, reply_format: ReplyFormat) -> AsyncIterator[bytes]:
    try:
        for event in reply_format.first_events():
            yield event
        async for delta in stream.deltas(KEEPALIVE_S):
            if delta is None:
                yield reply_format.keepalive
                continue
            for event in reply_format.events(delta):
                yield event
        await stream.keep(reply_format.kept)
        for event in reply_format.last_events():
            yield event
    except PipespecError as error:
        for event in reply_format.failed(api_error_of(error)):
            yield event
