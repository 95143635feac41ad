"""The replies to one HTTP request: events of the request log in, a JSON body or a stream out, and
cancellation when the client disconnects. A `ReplyFormat` decides what they look like."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any, cast

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from pipespec.client.async_answer import AsyncAnswer
from pipespec.client.async_client import AsyncClient
from pipespec.controller.log_records import Accepted, Event, Finished, check_answered
from pipespec.core import TokenLogprobs
from pipespec.errors import PipespecError
from pipespec.server.admission_queue import QueueEntry
from pipespec.server.answer_blocks import AnswerBlocks, BlockDelta
from pipespec.server.api_errors import ApiError, api_error_of
from pipespec.server.dialects.conversations import conversation_name
from pipespec.server.metric_definitions import ABORTED
from pipespec.server.metrics import Metrics, RequestTimer
from pipespec.server.request_parsing import ParsedRequest
from pipespec.server.response_schema import FinishReason
from pipespec.text import FinalText, MarkedText, Tokenizer, special_markers

# A connection sends something at least this often while its request waits.
KEEPALIVE_S = 10.0
# The status in proxies' logs for a client that has disconnected; no client reads this reply.
CLIENT_CLOSED_REQUEST = 499


@dataclass(frozen=True)
class OutputDelta:
    """What the cluster adds to one answer: text that is final, and the tokens behind it.

    `prompt_logprobs` are those of the prompt's next tokens, from the second on, if the request
    asks for them. Only the last delta of an answer has a `finish_reason`, the `stop_string` that
    has ended it, if one has, and, if it is known, the number of prompt tokens that were in the
    prefix cache.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    num_cached_tokens: int | None = None


class ReplyFormat(ABC):
    """The replies to one request in one dialect.

    Args:
        request: the request.
        tokenizer: of the model.
        model: the name that the client used for it.

    Attributes:
        answers: what has arrived of each answer, and `ends` its last delta.
    """

    media_type = "text/event-stream"
    # What a stream sends while its request waits; clients ignore it.
    keepalive = b": waiting\n\n"

    def __init__(self, request: ParsedRequest, tokenizer: Tokenizer, model: str):
        self.request = request
        self.tokenizer = tokenizer
        self.model = model
        self.created = int(time.time())
        choices = request.sampling_params
        self.answers = [AnswerBlocks(request.tool_use, request.reasoning) for _ in choices]
        self.ends: list[OutputDelta | None] = [None for _ in choices]
        self.num_tokens = 0
        self.num_reasoning = 0  # of them
        self.num_cached: int | None = None

    @property
    def has_logprobs(self) -> bool:
        """Whether the request asks for log-probabilities of any tokens."""
        choices = range(len(self.request.sampling_params))
        return self.request.prompt_logprobs is not None or any(map(self.wants_logprobs, choices))

    def wants_logprobs(self, choice: int) -> bool:
        """Whether the request asks for log-probabilities of the answer's tokens."""
        return self.request.sampling_params[choice].logprobs is not None

    def take(self, delta: OutputDelta) -> list[BlockDelta]:
        """Add a delta to its answer; what is new in the answer's blocks.

        A prompt with several answers counts once, and so do its cached tokens: those of its first
        answer.
        """
        answer, last = self.answers[delta.index], delta.finish_reason is not None
        self.num_tokens += len(delta.token_ids)
        if delta.num_cached_tokens is not None and not delta.index % self.request.n:
            self.num_cached = (self.num_cached or 0) + delta.num_cached_tokens
        if last:
            self.ends[delta.index] = delta
        parts = answer.push(delta.text, last=last)
        if answer.thinking:
            self.num_reasoning += len(delta.token_ids)
        return parts

    @property
    def kept(self) -> tuple[str, bytes] | None:
        """Once the answer has ended: the id of the response, and the conversation up to it, which
        a later request may continue; None: none may."""
        return None

    def add(self, delta: OutputDelta) -> None:
        """Keep a delta for the whole reply."""
        self.take(delta)

    @abstractmethod
    def response(self) -> BaseModel:
        """The whole reply, of all deltas that were added."""

    @abstractmethod
    def first_events(self) -> Iterator[bytes]:
        """The beginning of a stream."""

    @abstractmethod
    def events(self, delta: OutputDelta) -> Iterator[bytes]:
        """What a delta adds to a stream."""

    @abstractmethod
    def last_events(self) -> Iterator[bytes]:
        """The end of a stream."""

    @abstractmethod
    def failed(self, error: ApiError) -> Iterator[bytes]:
        """The end of a stream that fails, after its status was sent."""


def sse(data: Any, event: str = "") -> bytes:
    """A server-sent event whose data are JSON."""
    name = f"event: {event}\n".encode() if event else b""
    return b"%bdata: %b\n\n" % (name, to_json(data))


class ResponseStream:
    """The answers to one HTTP request, as the cluster decodes them. Close it when done.

    stream = ResponseStream(client, request, queue_entry, metrics, on_closed)
    try:
        await stream.submit()
        async for delta in stream.deltas(heartbeat): ...
    finally:
        await stream.close()
    """

    def __init__(
        self,
        client: AsyncClient,
        request: ParsedRequest,
        queue_entry: QueueEntry,
        metrics: Metrics,
        on_closed: Callable[[ResponseStream], None],
        api_key_digest: bytes = b"",
    ):
        self.request = request
        self._api_key_digest = api_key_digest
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

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the answers in the cluster's log, once they are submitted."""
        return tuple(self._by_number)

    async def submit(self) -> None:
        """Put every answer in the cluster's queue. Raises Unreachable."""
        self._events = await self._following.enter_async_context(self._client.follow())
        request = self.request
        for answer, sampling in zip(self._answers, request.sampling_params, strict=True):
            number = await self._events.submit(
                request.prompt_of(answer.index),
                sampling,
                # The cluster decodes one token at least, also if only the prompt is wanted.
                max_new_tokens=answer.max_tokens or 1,
                stop=request.stop,
                eos=request.eos,
                priority=request.priority,
                cache_salt=request.cache_salt,
            )
            self._by_number[number] = answer

    async def deltas(self, heartbeat: float) -> AsyncIterator[OutputDelta | None]:
        """What the cluster adds to the answers, as it arrives; None after each `heartbeat` seconds
        without an event.

        Raises RankFailed or Unreachable if the cluster is gone.
        """
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
            response, conversation = kept
            name = conversation_name(response, self._api_key_digest)
            await self._client.log.keep_conversation(name, conversation)

    def fail(self, error: PipespecError) -> None:
        """Let `deltas` raise an error."""
        if self._events is not None:
            self._events.interrupt(error)

    async def close(self) -> None:
        """Cancel answers that have not finished."""
        await self._following.aclose()
        self._queue_entry.release()
        for answer in self._answers:
            answer.timer.finished(ABORTED)
        self._on_closed(self)


@dataclass
class _Answer:
    """One answer as it arrives. With `max_tokens` 0 the one token that the cluster decodes is
    dropped."""

    index: int
    max_tokens: int
    text: FinalText
    timer: RequestTimer
    started: bool = False

    def delta(self, event: Event) -> OutputDelta:
        """What an event adds. Raises what has ended the request without an answer."""
        if isinstance(event, Accepted):
            tokens = event.tokens if self.max_tokens else ()
            self.timer.add_tokens(len(tokens))
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
    special = request.tool_use.family.special if request.tool_use else ()
    special += request.reasoning.special if request.reasoning else ()
    markers = special_markers(tokenizer, special) if special else {}
    texts: list[FinalText] = []
    for choice, sampling in enumerate(request.sampling_params):
        arguments = tokenizer, request.prompt_of(choice), request.stop, sampling.min_tokens
        texts.append(MarkedText(*arguments, markers) if markers else FinalText(*arguments))
    return texts


# --- whole replies ------------------------------------------------------------------------------


async def full_response(
    stream: ResponseStream, reply_format: ReplyFormat, request: Request
) -> Response:
    """The answers in one reply, unless the client disconnects before. Raises ApiError."""
    try:
        collecting = asyncio.ensure_future(_collect(stream, reply_format))
        disconnected = asyncio.ensure_future(_until_disconnected(request))
        try:
            await asyncio.wait({collecting, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            return Response(collecting.result(), media_type="application/json")
        except PipespecError as error:
            raise api_error_of(error) from error
        finally:
            for task in (collecting, disconnected):
                task.cancel()
            await asyncio.wait({collecting, disconnected})
    finally:
        await stream.close()


async def _collect(stream: ResponseStream, reply_format: ReplyFormat) -> str:
    async for delta in stream.deltas(KEEPALIVE_S):
        if delta is not None:
            reply_format.add(delta)
    await stream.keep(reply_format.kept)
    if reply_format.has_logprobs:  # those of long texts take seconds
        return await asyncio.to_thread(_to_json, reply_format)
    return _to_json(reply_format)


def _to_json(reply_format: ReplyFormat) -> str:
    return reply_format.response().model_dump_json()


async def _until_disconnected(request: Request) -> None:
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
