"""The replies of Anthropic's /v1/messages."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from pipespec.server.answer_blocks import AnswerBlocks, Block, BlockDelta, arguments_of
from pipespec.server.api_errors import ApiError
from pipespec.server.dialects.error_replies import anthropic_error
from pipespec.server.request_parsing import ParsedRequest
from pipespec.server.response_stream import OutputDelta, ReplyFormat
from pipespec.text import Tokenizer

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class TextContent(BaseModel):
    """Text of an answer."""

    type: Literal["text"] = "text"
    text: str


class ThinkingContent(BaseModel):
    """What the model has thought; it is not signed."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = ""


class ToolUseContent(BaseModel):
    """A call."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


class AnthropicUsage(BaseModel):
    """Token counts; `input_tokens` are those that were not in the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicReply(BaseModel):
    """The reply of POST /v1/messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[
        Annotated[TextContent | ThinkingContent | ToolUseContent, Field(discriminator="type")]
    ]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: AnthropicUsage


class TokenCount(BaseModel):
    """The reply of POST /v1/messages/count_tokens."""

    input_tokens: int


class AnthropicFormat(ReplyFormat):
    """The replies of /v1/messages.

    `max_tokens` is what the client has asked for, which may be more than the context has room for.
    """

    keepalive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(
        self, request: ParsedRequest, tokenizer: Tokenizer, model: str, *, max_tokens: int
    ):
        super().__init__(request, tokenizer, model)
        self.id = f"msg_{secrets.token_hex(12)}"
        self._answer = AnswerBlocks(request.tool_use, request.reasoning)
        self._asked = max_tokens
        self._end: OutputDelta | None = None
        self._frame = ("", "")  # the JSON of a delta of the open block before and after its text
        # Without a grammar the model may write arguments that no client can read.
        self._holds_calls = not request.sampling_params[0].grammar

    def add(self, delta: OutputDelta) -> None:
        self._take(delta)

    def response(self) -> BaseModel:
        return AnthropicReply(
            id=self.id,
            model=self.model,
            content=[_content(block) for block in self._answer.blocks],
            stop_reason=self._stop_reason(),
            stop_sequence=self._end.stop_string if self._end else None,
            usage=self._usage(),
        )

    def first_events(self) -> Iterator[bytes]:
        message = self.response().model_dump() | {"stop_reason": None}
        yield _event("message_start", message=message)

    def events(self, delta: OutputDelta) -> Iterator[bytes]:
        for part in self._take(delta):
            if part.begins:
                if part.index:
                    yield from self._close(part.index - 1)
                yield self._begin(part)
            if part.text and part.block.kind == "call" and self._holds_calls:
                yield self.keepalive
            elif part.text:
                yield self._piece(part.text)

    def last_events(self) -> Iterator[bytes]:
        if blocks := self._answer.blocks:
            yield from self._close(len(blocks) - 1)
        end = {
            "stop_reason": self._stop_reason(),
            "stop_sequence": self._end.stop_string if self._end else None,
        }
        yield _event("message_delta", delta=end, usage=self._usage().model_dump())
        yield _event("message_stop")

    def failed(self, error: ApiError) -> Iterator[bytes]:
        body = anthropic_error(error)
        yield _event(body["type"], error=body["error"])

    def _take(self, delta: OutputDelta) -> list[BlockDelta]:
        self.count_tokens(delta)
        if delta.finish_reason is not None:
            self._end = delta
        return self._answer.push(delta.text, last=delta.finish_reason is not None)

    def _begin(self, part: BlockDelta) -> bytes:
        """The event that begins a block, without its text."""
        block = part.block
        if block.kind == "call":
            empty = ToolUseContent(id=block.id, name=block.name, input={}).model_dump()
            kind, name = "input_json_delta", "partial_json"
        elif block.kind == "reasoning":
            empty = ThinkingContent(thinking="").model_dump()
            kind, name = "thinking_delta", "thinking"
        else:
            empty, kind, name = TextContent(text="").model_dump(), "text_delta", "text"
        example = _event("content_block_delta", index=part.index, delta={"type": kind, name: "\0"})
        before, _, after = example.decode().partition(json.dumps("\0"))
        self._frame = before, after
        return _event("content_block_start", index=part.index, content_block=empty)

    def _piece(self, text: str) -> bytes:
        """The event of a text of the open block."""
        before, after = self._frame
        return f"{before}{json.dumps(text, ensure_ascii=False)}{after}".encode()

    def _close(self, index: int) -> Iterator[bytes]:
        """The events that end the open block."""
        block = self._answer.blocks[index]
        if block.kind == "call" and self._holds_calls:
            yield self._piece(json.dumps(arguments_of(block), ensure_ascii=False))
        yield _event("content_block_stop", index=index)

    def _stop_reason(self) -> StopReason:
        end = self._end
        if end is not None and end.finish_reason == "length":
            (room,) = self.request.max_tokens
            return "max_tokens" if room >= self._asked else "model_context_window_exceeded"
        if end is not None and end.stop_string is not None:
            return "stop_sequence"
        return "tool_use" if self._answer.calls else "end_turn"

    def _usage(self) -> AnthropicUsage:
        cached = self.num_cached or 0
        return AnthropicUsage(
            input_tokens=self.request.prompt_tokens - cached,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=cached,
            output_tokens=self.num_tokens,
        )


def _content(block: Block) -> TextContent | ThinkingContent | ToolUseContent:
    if block.kind == "reasoning":
        return ThinkingContent(thinking=block.text)
    if block.kind == "call":
        return ToolUseContent(id=block.id, name=block.name, input=arguments_of(block))
    return TextContent(text=block.text)


def _event(kind: str, **fields: Any) -> bytes:
    data = json.dumps({"type": kind, **fields}, ensure_ascii=False, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()
