"""Anthropic's /v1/messages and /v1/messages/count_tokens: requests and replies.

Above 350 lines, as a request is read with its reply.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from http import HTTPStatus
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, model_validator

from pipespec.client.chat_template import text_part
from pipespec.extras.dialects.translation import (
    PARTS,
    TEXT,
    TEXT_OR_PARTS,
    add_turn,
    call_of,
    named_function,
    schema_format,
    tool_of,
)
from pipespec.limits import MAX_COUNT
from pipespec.server.api_errors import ApiError
from pipespec.server.dialect import BodyRoute, Dialect, DialectBody, Translation
from pipespec.server.message_schema import (
    FUNCTION_NAME,
    MAX_TOOLS,
    RequestModel,
    TextOrParts,
    TextPart,
    contents,
)
from pipespec.server.reply_format import Block, OutputDelta, ReplyFormat, arguments_of, sse
from pipespec.server.request_schema import LATER, Refused, Texts, refused

TEXT_ALONE = "is not supported: the model reads and writes text, and the server runs no tools"
ELSEWHERE = "is not supported: this server has no such service"

# --- messages ---------------------------------------------------------------------------------


class ThinkingBlock(RequestModel):
    """What the model has thought; it is not signed."""

    type: Literal["thinking"]
    thinking: str
    signature: Any = ""


class RedactedThinkingBlock(RequestModel):
    """What another server's model has thought; it cannot be read here, and is left out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(RequestModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Contents = Annotated[TextOrParts, contents(str | list[TextPart], "'text'")]


class ToolResultBlock(RequestModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Contents | None = None


AnyBlock = Annotated[
    TextPart | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class AnthropicMessage(RequestModel):
    role: Literal["user", "assistant", "system"]
    content: Annotated[Annotated[str, TEXT] | Annotated[list[AnyBlock], PARTS], TEXT_OR_PARTS]

    @model_validator(mode="after")
    def _fits(self) -> AnthropicMessage:
        for block in self.content if isinstance(self.content, list) else ():
            role = "user" if isinstance(block, ToolResultBlock) else "assistant"
            if not isinstance(block, TextPart) and role != self.role:
                raise ValueError(
                    f"has the role {self.role!r} and a block of type {block.type!r}, which goes "
                    f"with the role {role!r}"
                )
        return self

    def translated(self) -> list[dict[str, Any]]:
        """The message as OpenAI has it, in which each result of a tool is a message of its own."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        made: list[dict[str, Any]] = []
        texts, calls, thoughts = [], [], []
        for block in self.content:
            if isinstance(block, TextPart):
                texts.append(text_part(block.text))
            elif isinstance(block, ThinkingBlock):
                thoughts.append(block.thinking)
            elif isinstance(block, ToolUseBlock):
                calls.append(call_of(block.id, block.name, json.dumps(block.input)))
            elif isinstance(block, ToolResultBlock):
                result = {"tool_call_id": block.tool_use_id, "content": block.content or ""}
                made.append({"role": "tool", **result})
        if texts or calls or not made:
            spoken: dict[str, Any] = {"role": self.role, "content": texts or ""}
            spoken |= {"tool_calls": calls} if calls else {}
            made.append(spoken | ({"reasoning_content": "\n".join(thoughts)} if thoughts else {}))
        return made


REFUSED: Refused = {
    "container": (ELSEWHERE, ()),
    "mcp_servers": (TEXT_ALONE, ()),
    **refused(LATER, "context_management", "prefill"),
}
NAMES = {
    "continue_final_message": "messages",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}


# --- requests ---------------------------------------------------------------------------------


class AnthropicTool(RequestModel):
    """A tool that the model may call. `input_schema` is a JSON schema."""

    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None


class AnthropicToolChoice(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _fits(self) -> AnthropicToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError(
                f"has the type {self.type!r}, but only 'tool' has a name, and needs it"
            )
        return self


class Thinking(RequestModel):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]


class OutputFormat(RequestModel):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(RequestModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(DialectBody):
    """POST /v1/messages/count_tokens."""

    refused, names = REFUSED, NAMES

    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    system: Contents | None = None
    tools: Annotated[list[AnthropicTool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def translate(self, kept: bytes) -> Translation:
        return Translation(
            self.chat_fields(), counts=lambda count: json.dumps({"input_tokens": count}).encode()
        )

    def chat_fields(self) -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": self.system})
        for message in self.messages:
            for part in message.translated():
                add_turn(messages, part)
        fields: dict[str, Any] = {"model": self.model, "messages": messages}
        if self.messages[-1].role == "assistant":
            fields["continue_final_message"] = True
        fields["tools"] = [
            tool_of(tool.name, tool.input_schema, tool.description or None)
            for tool in self.tools or ()
        ]
        if (choice := self.tool_choice) is not None:
            chosen = {"any": "required", "tool": named_function(choice.name)}
            fields["tool_choice"] = chosen.get(choice.type, choice.type)
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        config = self.output_config or OutputConfig()
        if self.thinking is not None and self.thinking.type == "disabled":
            fields["reasoning_effort"] = "none"
        elif self.thinking is not None or config.effort is not None:
            fields["reasoning_effort"] = config.effort or "medium"
        if config.format is not None:
            fields["response_format"] = schema_format(config.format.schema_)
        return fields


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    temperature: Annotated[FiniteFloat | None, Field(ge=0, le=1)] = None
    top_p: Annotated[FiniteFloat | None, Field(ge=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0, le=MAX_COUNT)] = None
    stop_sequences: Texts = Field(default_factory=list)
    stream: bool | None = None

    def translate(self, kept: bytes) -> Translation:
        names = ("max_tokens", "temperature", "top_p", "top_k")
        fields = self.chat_fields() | {name: getattr(self, name) for name in names}
        fields["stop"] = self.stop_sequences
        # Clients send the most tokens that Anthropic's own models write.
        options = {"max_tokens": self.max_tokens}
        return Translation(fields, bool(self.stream), options, clamps=True)


# --- replies ----------------------------------------------------------------------------------

# The type of a block's deltas, and the field that has the text.
DELTAS = {
    "call": ("input_json_delta", "partial_json"),
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
}


class AnthropicFormat(ReplyFormat):
    """The replies of /v1/messages.

    `max_tokens` is what the client has asked for, which may be more than the context has room for.
    """

    keepalive = sse({"type": "ping"}, "ping")

    def __init__(self, *answered: Any, max_tokens: int):
        super().__init__(*answered)
        self.id = f"msg_{secrets.token_hex(12)}"
        self._asked = max_tokens
        # Without a grammar the model may write arguments that no client can read.
        self._holds_calls = not self.request.sampling_params[0].grammar

    def response(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [_content(block, whole=True) for block in self.answers[0].blocks],
            "usage": self._usage(),
            **self._end(),
        }

    def first_events(self) -> Iterator[bytes]:
        yield _event("message_start", message=self.response() | {"stop_reason": None})

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
        body = error_body(error)
        yield _event(body["type"], error=body["error"])

    def _close(self, index: int) -> Iterator[bytes]:
        block = self.answers[0].blocks[index]
        if block.kind == "call" and self._holds_calls:
            yield _piece(index, block, json.dumps(arguments_of(block), ensure_ascii=False))
        yield _event("content_block_stop", index=index)

    def _end(self) -> dict[str, str | None]:
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
        """Token counts; `input_tokens` are those that were not in the prefix cache."""
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
        call = {"type": "tool_use", "id": block.id, "name": block.name}
        return call | {"input": arguments_of(block) if whole else {}}
    return {"type": "text", "text": block.text}


def _piece(index: int, block: Block, text: str) -> bytes:
    kind, field = DELTAS[block.kind]
    return _event("content_block_delta", index=index, delta={"type": kind, field: text})


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)


# --- errors -----------------------------------------------------------------------------------

ERROR_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}


def error_body(error: ApiError) -> dict[str, Any]:
    failed = error.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    usual = "api_error" if failed else "invalid_request_error"
    kind = ERROR_TYPES.get(HTTPStatus(error.status), usual)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


MESSAGES = "/v1/messages"
DIALECT = Dialect(
    routes={
        MESSAGES: BodyRoute(MessagesRequest, AnthropicFormat),
        f"{MESSAGES}/count_tokens": BodyRoute(CountTokensRequest),
    },
    errors={MESSAGES: error_body},
)
