"""What the replies of an interface look like, made of what the cluster adds to answers: blocks of
reasoning, text and calls, as they arrive."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import from_json, to_json

from pipespec.core import TokenLogprobs
from pipespec.server.api_errors import ApiError
from pipespec.server.chat_prompt import ToolUse
from pipespec.server.reasoning import ReasoningUse
from pipespec.server.request_parsing import ParsedRequest
from pipespec.server.tool_parsers.tool_parser import BlockKind, Piece
from pipespec.text import Tokenizer

FinishReason = Literal["stop", "length", "tool_calls"]
# The key under which arguments are reported that are no JSON object, as the model wrote them.
UNREADABLE = "unreadable_arguments"


@dataclass
class Block:
    """Part of an answer. `number` counts the blocks of this kind; `id` and `name` are those of a
    call."""

    kind: BlockKind
    number: int
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class BlockDelta:
    """What is new in the block `index` of an answer; the first delta of a call has no text. A block
    ends where the next one begins, and at the end of the answer."""

    index: int
    block: Block
    text: str
    begins: bool


class AnswerBlocks:
    """Splits one answer into blocks as it arrives, and never takes back what it has returned."""

    def __init__(self, tool_use: ToolUse | None, reasoning: ReasoningUse | None = None):
        self.blocks: list[Block] = []
        self.undecided = 0  # tokens before the first block
        self._tool_use = tool_use
        self._parser = tool_use.parser(tool_use.declared) if tool_use else None
        self._splitter = reasoning.splitter(calls=tool_use is not None) if reasoning else None
        self._num_calls = 0  # also of those that are dropped

    def push(self, text: str, *, last: bool = False) -> list[BlockDelta]:
        """What the next text makes certain; `last`: no text follows."""
        if self._parser is None and self._splitter is None:  # nearly always
            return [self._add("text", text)] if text else []
        return [*self._deltas(text, last)]

    def text_of(self, kind: BlockKind) -> str:
        return "".join(block.text for block in self.blocks if block.kind == kind)

    @property
    def thinking(self) -> bool:
        return bool(self.blocks) and self.blocks[-1].kind == "reasoning"

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.blocks if block.kind == "call"]

    def _deltas(self, text: str, last: bool) -> Iterator[BlockDelta]:
        for piece in self._split(text, last):
            self._num_calls += bool(piece.name)
            one = self._tool_use is not None and not self._tool_use.parallel
            if piece.kind == "call" and one and self._num_calls > 1:
                continue
            yield self._begin_call(piece.name) if piece.name else self._add(piece.kind, piece.text)

    def _split(self, text: str, last: bool) -> list[Piece]:
        split = [Piece("text", text)] if text else []
        if self._splitter is not None:
            split = self._splitter.push(text) + (self._splitter.finish() if last else [])
        if self._parser is None:
            return split
        parsed: list[Piece] = []
        for piece in split:
            parsed += self._parser.push(piece.text) if piece.kind == "text" else [piece]
        return parsed + (self._parser.finish() if last else [])

    def _begin_call(self, name: str) -> BlockDelta:
        assert self._tool_use is not None, "only a parser finds calls"
        number = len(self.calls)
        return self._begin(
            Block("call", number, self._tool_use.family.new_id(name, number), name), ""
        )

    def _add(self, kind: BlockKind, text: str) -> BlockDelta:
        if self.blocks and self.blocks[-1].kind == kind:
            block = self.blocks[-1]
            block.pieces.append(text)
            return BlockDelta(len(self.blocks) - 1, block, text, begins=False)
        return self._begin(Block(kind, sum(b.kind == kind for b in self.blocks)), text)

    def _begin(self, block: Block, text: str) -> BlockDelta:
        if text:
            block.pieces.append(text)
        self.blocks.append(block)
        return BlockDelta(len(self.blocks) - 1, block, text, begins=True)


def arguments_of(call: Block) -> dict[str, Any]:
    """The arguments of a call as an object: as far as they came, if the answer was cut, and the
    model's own text under one key if they are no JSON object."""
    try:
        found = from_json(call.text or "{}", allow_partial="trailing-strings")
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {UNREADABLE: call.text}


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
        return self.request.prompt_logprobs is not None or self.wants_logprobs

    @property
    def wants_logprobs(self) -> bool:
        """Those of the answers' tokens; all answers to a request have the same."""
        return self.request.sampling_params[0].logprobs is not None

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
        begins = not answer.blocks
        answer.undecided += len(delta.token_ids)
        parts = answer.push(delta.text, last=last)
        if answer.thinking or (begins and parts and parts[0].block.kind == "reasoning"):
            self.num_reasoning += answer.undecided
        if answer.blocks:
            answer.undecided = 0
        return parts

    @property
    def kept(self) -> tuple[str, bytes] | None:
        """Once the answer has ended: the id of the reply, and what is kept under it for a later
        request, which may continue it; None: nothing."""
        return None

    def add(self, delta: OutputDelta) -> None:
        self.take(delta)

    @abstractmethod
    def response(self) -> dict[str, Any]:
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


def given(**fields: Any) -> dict[str, Any]:
    """The fields that a reply has: those that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def sse(data: Any, event: str = "") -> bytes:
    """A server-sent event whose data are JSON."""
    name = f"event: {event}\n".encode() if event else b""
    return b"%bdata: %b\n\n" % (name, to_json(data))
