"""The replies of Anthropic's /v1/messages."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from pipespec.server.answer_blocks import Block, arguments_of
from pipespec.server.api_errors import ApiError
from pipespec.server.dialects.error_replies import anthropic_error
from pipespec.server.request_parsing import ParsedRequest
from pipespec.server.response_stream import OutputDelta, ReplyFormat, sse
from pipespec.text import Tokenizer

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]
# The type of a block's deltas, and the field that has the text.
DELTAS = {
    "call": ("input_json_delta", "partial_json"),
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
}


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

    keepalive = sse({"type": "ping"}, "ping")

    def __init__(
        self, request: ParsedRequest, tokenizer: Tokenizer, model: str, *, max_tokens: int
    ):
        super().__init__(request, tokenizer, model)
        self.id = f"msg_{secrets.token_hex(12)}"
        self._asked = max_tokens
        # Without a grammar the model may write arguments that no client can read.
        self._holds_calls = not request.sampling_params[0].grammar

    def response(self) -> BaseModel:
        reply = {
            "id": self.id,
            "model": self.model,
            "content": [_content(block, whole=True) for block in self.answers[0].blocks],
            "usage": self._usage(),
        }
        return AnthropicReply.model_validate(reply | self._end())

    def first_events(self) -> Iterator[bytes]:
        message = self.response().model_dump() | {"stop_reason": None}
        yield _event("message_start", message=message)

    def events(self, delta: OutputDelta) -> Iterator[bytes]:
        for part in self.take(delta):
            index, block = part.index, part.block
            if part.begins:
                if index:
                    yield from self._close(index - 1)
                empty = _content(Block(block.kind, block.number, block.id, block.name))
                yield _event("content_block_start", index=index, content_block=empty)
            if part.text and block.kind == "call" and self._holds_calls:
                yield self.keepalive
            elif part.text:
                yield _piece(index, block, part.text)

    def last_events(self) -> Iterator[bytes]:
        if blocks := self.answers[0].blocks:
            yield from self._close(len(blocks) - 1)
        yield _event("message_delta", delta=self._end(), usage=self._usage())
        yield _event("message_stop")

    def failed(self, error: ApiError) -> Iterator[bytes]:
        body = anthropic_error(error)
        yield _event(body["type"], error=body["error"])

    def _close(self, index: int) -> Iterator[bytes]:
        """The events that end a block."""
        block = self.answers[0].blocks[index]
        if block.kind == "call" and self._holds_calls:
            yield _piece(index, block, json.dumps(arguments_of(block), ensure_ascii=False))
        yield _event("content_block_stop", index=index)

    def _end(self) -> dict[str, str | None]:
        """Why the answer has ended."""
        (end,) = self.ends
        stop = end.stop_string if end else None
        reason = "tool_use" if self.answers[0].calls else "end_turn"
        if end is not None and end.finish_reason == "length":
            (room,) = self.request.max_tokens
            reason = "max_tokens" if room >= self._asked else "model_context_window_exceeded"
        elif stop is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _usage(self) -> dict[str, int]:
        cached = self.num_cached or 0
        return {
            "input_tokens": self.request.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.num_tokens,
        }


def _content(block: Block, *, whole: bool = False) -> dict[str, Any]:
    """A block as a reply has it; the arguments of a call only if it is whole."""
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "call":
        arguments = arguments_of(block) if whole else {}
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments}
    return {"type": "text", "text": block.text}


def _piece(index: int, block: Block, text: str) -> bytes:
    """The event of a text of a block."""
    kind, field = DELTAS[block.kind]
    return _event("content_block_delta", index=index, delta={"type": kind, field: text})


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)
