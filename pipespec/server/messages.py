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

from pipespec.system.reading import Unreadable, parse_json, shown

MAX_TOOLS = 128
# What OpenAI takes as the name of a function.
FUNCTION_NAME = r"^[a-zA-Z0-9_-]{1,64}$"


class Fields(BaseModel):
    """Part of a request. Types are as JSON has them: "1" is no number."""

    model_config = ConfigDict(strict=True, extra="allow")


# --- messages ---------------------------------------------------------------------------------


def _content(value: Any) -> Any:
    """Text, or parts of text."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"is {shown(value)}, but must be a text or a list of parts")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f"holds a part of type {shown(kind)}, but the model reads parts of type 'text' "
                "alone"
            )
    return "\n".join(part["text"] for part in value)


def _arguments(value: Any) -> Any:
    """The object that a JSON text is; no text is no arguments."""
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


class CalledFunction(Fields):
    """What was called."""

    name: str
    arguments: Arguments


class ToolCall(Fields):
    """A call that the model has made before."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Fields):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _fits(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(
                f"has the role {self.role!r} and tool_calls, but only 'assistant' calls tools"
            )
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("has the role 'tool', but no tool_call_id: which call it answers")
        if self.role == "tool" and self.content is None:
            raise ValueError("has the role 'tool', but no content: what the tool has answered")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as Transformers gives it to chat templates: arguments are objects."""
        # OpenAI's newer word for the same role, which templates do not know.
        role = "system" if self.role == "developer" else self.role
        told: dict[str, Any] = {"role": role, "content": self.content or ""}
        if self.name is not None:
            told["name"] = self.name
        if self.tool_calls:
            told["tool_calls"] = [
                {
                    "id": call.id,
                    "type": call.type,
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for call in self.tool_calls
            ]
        if self.role == "tool":
            told["tool_call_id"] = self.tool_call_id
        return told


# --- tools ------------------------------------------------------------------------------------


class Function(Fields):
    """What may be called. `parameters` are a JSON schema."""

    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    """One of the tools."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool as Transformers gives it to chat templates: as the client wrote it."""
        told = self.model_dump(exclude_unset=True)
        told["function"].pop("strict", None)  # it is meant for us
        return told


Tools = Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)]


def _tool_choice(value: Any) -> Any:
    """none, auto, required, or a function's name."""
    if value is None or value in ("none", "auto", "required"):
        return value
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or value.get("type") != "function":
        raise ValueError(
            f"is {shown(value)}, but must be 'none', 'auto', 'required' or "
            "{'type': 'function', 'function': {'name': ...}}"
        )
    return value


ToolChoice = Annotated[
    str | dict[str, Any] | None,
    BeforeValidator(_tool_choice),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["none", "auto", "required"]},
                {
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
                },
                {"type": "null"},
            ]
        }
    ),
]
