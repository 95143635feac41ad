"""The messages of a conversation, and the tools that a model may call in it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

from pipespec.system.validation import Unreadable, parse_json, shown

MAX_TOOLS = 128
# The names of functions that Anthropic accepts; OpenAI's have 64 characters at most.
FUNCTION_NAME = r"^[a-zA-Z0-9_-]{1,128}$"


class RequestModel(BaseModel):
    """Part of a request. Types are strict: "1" is no number."""

    model_config = ConfigDict(strict=True, extra="allow")


# --- messages ---------------------------------------------------------------------------------


# What parts of messages hold besides text, by the types of OpenAI, vLLM and Transformers.
_MEDIA = {
    **dict.fromkeys(("image_url", "input_image", "image"), "images"),
    **dict.fromkeys(("input_audio", "audio_url", "audio"), "recordings"),
    **dict.fromkeys(("video_url", "video"), "videos"),
    **dict.fromkeys(("file", "input_file"), "files"),
    **dict.fromkeys(("document", "container_upload"), "documents"),
}


def media_refusal(kind: str) -> str | None:
    """Why a part of this type is not read, as a clause; None: it is no image or the like."""
    if kind not in _MEDIA:
        return None
    return (
        f"holds a part of type {shown(kind)}, but {_MEDIA[kind]} are not read: of a multimodal "
        "model the text part alone is loaded"
    )


def _content(value: Any) -> Any:
    """Text, or parts of text."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"is {shown(value)}, but must be a text or a list of parts")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and (why := media_refusal(kind)):
            raise ValueError(why)
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f"holds a part of type {shown(kind)}, but the model reads parts of type 'text' "
                "alone"
            )
    return "\n".join(part["text"] for part in value)


def _arguments(value: Any) -> Any:
    """The object that a JSON text encodes; an empty text has no arguments."""
    wrong = f"is {shown(value)}, but must be a JSON object as text"
    if not isinstance(value, str):
        raise ValueError(wrong)
    try:
        parsed = parse_json(value or "{}")
    except Unreadable as error:
        raise ValueError(f"{wrong}: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError(wrong)
    return parsed


Content = Annotated[
    str | None,
    BeforeValidator(_content),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                    },
                },
                {"type": "null"},
            ]
        }
    ),
]
Arguments = Annotated[
    dict[str, Any], BeforeValidator(_arguments), WithJsonSchema({"type": "string"})
]


class CalledFunction(RequestModel):
    """The function that was called."""

    name: str
    arguments: Arguments


class MessageToolCall(RequestModel):
    """A call in an earlier message of the model."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(RequestModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _fits(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(
                f"has the role {self.role!r} and tool_calls, but only 'assistant' calls tools"
            )
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("has the role 'tool', but no tool_call_id, which names the call")
        if self.role == "tool" and self.content is None:
            raise ValueError("has the role 'tool', but no content, the result of the call")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as Transformers passes it to chat templates: arguments are objects."""
        # OpenAI's newer name of the same role, which templates do not know.
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.content or ""}
        if self.name is not None:
            message["name"] = self.name
        if self.reasoning_content:
            # The names that templates have for it.
            message |= dict.fromkeys(("reasoning_content", "thinking"), self.reasoning_content)
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": call.type,
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for call in self.tool_calls
            ]
        if self.role == "tool":
            message["tool_call_id"] = self.tool_call_id
        return message


# --- tools ------------------------------------------------------------------------------------


class Function(RequestModel):
    """A function that may be called. `parameters` is a JSON schema."""

    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool as Transformers passes it to chat templates: as the client wrote it."""
        tool = self.model_dump(exclude_unset=True)
        tool["function"].pop("strict", None)  # it is meant for the server
        return tool


Tools = Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)]


def _tool_choice(value: Any) -> Any:
    """none, auto, required, a function's name, or some of the tools."""
    if value is None or value in ("none", "auto", "required"):
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "function" and _function_name(value) is not None:
        return value
    allowed = value.get("allowed_tools") if kind == "allowed_tools" else None
    if isinstance(allowed, dict) and allowed.get("mode") in ("auto", "required"):
        tools = allowed.get("tools")
        if (
            isinstance(tools, list)
            and tools
            and all(_function_name(tool) is not None for tool in tools)
        ):
            return value
    raise ValueError(
        f"is {shown(value)}, but must be 'none', 'auto', 'required', "
        "{'type': 'function', 'function': {'name': ...}} or {'type': 'allowed_tools', "
        "'allowed_tools': {'mode': 'auto' or 'required', 'tools': [...]}}"
    )


def _function_name(tool: Any) -> str | None:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


_NAMED_FUNCTION = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
_ALLOWED_TOOLS = {
    "type": "object",
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {
            "type": "object",
            "properties": {
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "items": _NAMED_FUNCTION, "minItems": 1},
            },
            "required": ["mode", "tools"],
        },
    },
    "required": ["type", "allowed_tools"],
}
ToolChoice = Annotated[
    str | dict[str, Any] | None,
    BeforeValidator(_tool_choice),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["none", "auto", "required"]},
                _NAMED_FUNCTION,
                _ALLOWED_TOOLS,
                {"type": "null"},
            ]
        }
    ),
]
