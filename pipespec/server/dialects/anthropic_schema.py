"""The fields of Anthropic's /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, model_validator

from pipespec.limits import MAX_COUNT
from pipespec.server.dialects.translation import (
    PARTS,
    TEXT,
    TEXT_OR_PARTS,
    DialectBody,
    Messages,
    Translation,
    add_turn,
    call_of,
    named_function,
    schema_format,
    tool_of,
)
from pipespec.server.message_schema import (
    FUNCTION_NAME,
    MAX_TOOLS,
    READABLE,
    RequestModel,
    TextPart,
    contents,
)
from pipespec.server.request_schema import LATER, Texts

TEXT_ALONE = "is not supported: the model reads and writes text, and the server runs no tools"
ELSEWHERE = "is not supported: this server has no such service"

# --- messages ---------------------------------------------------------------------------------


class ThinkingBlock(RequestModel):
    """What the model has thought before an answer."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(RequestModel):
    """What another server's model has thought; it cannot be read here, and is left out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(RequestModel):
    """A call in an earlier message of the model."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Contents = Annotated[str, contents(str | list[TextPart], "'text'"), READABLE]


class ToolResultBlock(RequestModel):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Contents | None = None


AnyBlock = Annotated[
    TextPart | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class AnthropicMessage(RequestModel):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, TEXT] | Annotated[list[AnyBlock], PARTS], TEXT_OR_PARTS, READABLE
    ]

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


IGNORED = frozenset(
    (
        *("metadata", "service_tier", "cache_control", "inference_geo", "speed", "diagnostics"),
        *("user_profile_id", "workspace_id"),
    )
)
REFUSED = {
    "container": (ELSEWHERE, ()),
    "mcp_servers": (TEXT_ALONE, ()),
    "context_management": (LATER, ()),
    "prefill": (LATER, ()),
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
    """Whether a tool may, must or must not be called."""

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
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]


class OutputFormat(RequestModel):
    """The schema that the answer must match."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(RequestModel):
    """How much the model thinks, and what its answer must match."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(DialectBody):
    """POST /v1/messages/count_tokens."""

    ignored, refused, names = IGNORED, REFUSED, NAMES

    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    system: Contents | None = None
    tools: Annotated[list[AnthropicTool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def translate(self, earlier: Messages) -> Translation:
        return Translation(chat_fields(self), counts=_count_reply)


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    temperature: Annotated[FiniteFloat | None, Field(ge=0, le=1)] = None
    top_p: Annotated[FiniteFloat | None, Field(ge=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0, le=MAX_COUNT)] = None
    stop_sequences: Texts = Field(default_factory=list)
    stream: bool | None = None

    def translate(self, earlier: Messages) -> Translation:
        fields = chat_fields(self) | {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }
        # Clients send the most tokens that Anthropic's own models write.
        options = {"max_tokens": self.max_tokens}
        return Translation(fields, bool(self.stream), options, clamps=True)


# --- translation ------------------------------------------------------------------------------


def chat_fields(body: CountTokensRequest) -> dict[str, Any]:
    """The fields that decide the prompt."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": body.system})
    for message in body.messages:
        for part in translated_messages(message):
            add_turn(messages, part)
    fields: dict[str, Any] = {"model": body.model, "messages": messages}
    if body.messages[-1].role == "assistant":
        fields["continue_final_message"] = True
    if body.tools:
        fields["tools"] = [
            tool_of(tool.name, tool.input_schema, tool.description or None) for tool in body.tools
        ]
    if (choice := body.tool_choice) is not None:
        chosen = {"any": "required", "tool": named_function(choice.name)}
        fields["tool_choice"] = chosen.get(choice.type, choice.type)
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    config = body.output_config or OutputConfig()
    if body.thinking is not None and body.thinking.type == "disabled":
        fields["reasoning_effort"] = "none"
    elif body.thinking is not None or config.effort is not None:
        fields["reasoning_effort"] = config.effort or "medium"
    if config.format is not None:
        fields["response_format"] = schema_format(config.format.schema_)
    return fields


def translated_messages(message: AnthropicMessage) -> list[dict[str, Any]]:
    """A message as OpenAI has it, in which each result of a tool is a message of its own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    made: list[dict[str, Any]] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in message.content:
        if isinstance(block, TextPart):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            calls.append(call_of(block.id, block.name, json.dumps(block.input)))
        elif isinstance(block, ToolResultBlock):
            result = {"tool_call_id": block.tool_use_id, "content": block.content or ""}
            made.append({"role": "tool", **result})
    if texts or calls or not made:
        spoken: dict[str, Any] = {"role": message.role, "content": "\n".join(texts)}
        if calls:
            spoken["tool_calls"] = calls
        if thoughts:
            spoken["reasoning_content"] = "\n".join(thoughts)
        made.append(spoken)
    return made


def _count_reply(num_tokens: int) -> bytes:
    return json.dumps({"input_tokens": num_tokens}).encode()
