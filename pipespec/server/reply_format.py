"""What the replies of an interface look like, made of what the cluster adds to answers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json

from pipespec.core import TokenLogprobs
from pipespec.server.answer_blocks import AnswerBlocks, BlockDelta
from pipespec.server.api_errors import ApiError
from pipespec.server.request_parsing import ParsedRequest
from pipespec.server.response_schema import FinishReason
from pipespec.text import Tokenizer


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
    """The replies to one request in one dialect: `answers` is what has arrived of each answer, and
    `ends` its last delta."""

    media_type = "text/event-stream"
    # What a stream sends while its request waits; clients ignore it.
    keepalive = b": waiting\n\n"
    # Makes the JSON of a text.
    encode: Callable[[str], bytes] = staticmethod(to_json)

    def __init__(self, request: ParsedRequest, tokenizer: Tokenizer, model: str):
        self.request = request
        self.tokenizer = tokenizer
        self.model = model
        self.created = int(time.time())
        choices = request.sampling_params
        self.answers = [AnswerBlocks(request.tool_use, request.reasoning) for _ in choices]
        self.ends: list[OutputDelta | None] = [None for _ in choices]
        self.frames: dict[Any, Frame] = {}  # of the stream's texts
        self.num_tokens = 0
        self.num_reasoning = 0  # of them
        self.num_cached: int | None = None

    @property
    def has_logprobs(self) -> bool:
        choices = range(len(self.request.sampling_params))
        return self.request.prompt_logprobs is not None or any(map(self.wants_logprobs, choices))

    def wants_logprobs(self, choice: int) -> bool:
        return self.request.sampling_params[choice].logprobs is not None

    def framed(self, key: Any, text: str, make: Callable[[str], bytes]) -> bytes:
        frame = self.frames.get(key)
        if frame is None:
            frame = self.frames[key] = Frame(make(SLOT), self.encode)
        return frame.event(text)

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
        """Once the answer has ended: the id of the reply, and what is kept under it for a later
        request, which may continue it; None: nothing."""
        return None

    def add(self, delta: OutputDelta) -> None:
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


# In place of the text of an event from which a `Frame` is made.
SLOT = "\0slot"


class Frame:
    """An event that all of a stream share but for one text: only that is encoded anew."""

    def __init__(self, event: bytes, encode: Callable[[str], bytes]):
        self._head, self._tail = event.split(encode(SLOT))
        self._encode = encode

    def event(self, text: str) -> bytes:
        return b"%b%b%b" % (self._head, self._encode(text), self._tail)


def sse(data: Any, event: str = "") -> bytes:
    """A server-sent event whose data are JSON."""
    name = f"event: {event}\n".encode() if event else b""
    return b"%bdata: %b\n\n" % (name, to_json(data))
