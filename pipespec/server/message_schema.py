"""The messages of a conversation, and the tools that a model may call in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import core_schema

from pipespec.client.chat_template import REASONING, text_of, text_part
from pipespec.system.validation import Unreadable, parse_json, shown

MAX_TOOLS = 128
# The names of functions that Anthropic accepts; OpenAI's have 64 characters at most.
FUNCTION_NAME = r"^[a-zA-Z0-9_-]{1,128}$"


class RequestModel(BaseModel):
    """Part of a request. Types are strict: "1" is no number."""

    # What is not declared is looked at by name, to refuse what would change the text.
    model_config = ConfigDict(strict=True, extra="allow")


def accepts(kind: Any, must: str, convert: Callable[[Any], Any] = lambda value: value) -> Any:
    """Annotates a field that accepts values of a type, which `convert` converts. `must` describes
    them, in place of pydantic's message for each alternative."""

    def validate(value: Any, as_kind: ValidatorFunctionWrapHandler) -> Any:
        try:
            return convert(as_kind(value))
        except ValidationError:
            raise ValueError(f"is {shown(value)}, but must be {must}") from None

    made = core_schema.no_info_wrap_validator_function
    return GetPydanticSchema(lambda _, handler: made(validate, handler.generate_schema(kind)))


# --- messages ---------------------------------------------------------------------------------


class TextPart(RequestModel):
    type: Literal["text"]
    text: str


TextOrParts: TypeAlias = str | list[dict[str, str]]


def as_content(value: Any) -> Any:
    """A text as it is, and parts as those of OpenAI's chats."""
    return [text_part(part.text) for part in value] if isinstance(value, list) else value


def contents(kind: Any, types: str) -> Any:
    """Annotates a text that may be given as parts of these types."""
    must = f"a text or a list of parts; the model reads parts of type {types} alone"
    return accepts(kind, must, as_content)


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


Content = Annotated[TextOrParts | None, contents(str | list[TextPart] | None, "'text'")]
Arguments = Annotated[
    dict[str, Any], BeforeValidator(_arguments), WithJsonSchema({"type": "string"})
]


class CalledFunction(RequestModel):
    name: str
    arguments: Arguments


class MessageToolCall(RequestModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(RequestModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @property
    def text(self) -> str:
        return text_of(self.content)

    @property
    def continued(self) -> str:
        """What an answer that continues this message continues."""
        return self.text or self.reasoning_content or ""

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
            message |= dict.fromkeys(REASONING, self.reasoning_content)
        if self.tool_calls:
            message["tool_calls"] = [
                call.model_dump(
                    include={"id": True, "type": True, "function": {"name", "arguments"}}
                )
                for call in self.tool_calls
            ]
        if self.role == "tool":
            message["tool_call_id"] = self.tool_call_id
        return message


# --- tools ------------------------------------------------------------------------------------


class OfFunction(RequestModel):
    """What may be of other types elsewhere. As the last base its field is checked first."""

    type: Literal["function"]


class Function(RequestModel):
    """A function that may be called. `parameters` is a JSON schema."""

    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(OfFunction):
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool as Transformers passes it to chat templates: as the client wrote it."""
        tool = self.model_dump(exclude_unset=True)
        tool["function"].pop("strict", None)  # it is meant for the server
        return tool


Tools = Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)]


class FunctionName(RequestModel):
    """A function of `tools`."""

    name: str


class NamedTool(OfFunction):
    function: FunctionName


class AllowedTools(RequestModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class ToolsChoice(RequestModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


_AnyChoice = Literal["none", "auto", "required"] | NamedTool | ToolsChoice | None
ToolChoice = Annotated[
    _AnyChoice,
    accepts(
        _AnyChoice,
        "'none', 'auto', 'required', {'type': 'function', 'function': {'name': ...}} or "
        "{'type': 'allowed_tools', 'allowed_tools': {'mode': 'auto' or 'required', 'tools': "
        "[...]}}",
    ),
]
