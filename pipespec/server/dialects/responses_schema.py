"""The fields of OpenAI's /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, FiniteFloat, Tag, model_validator
from pydantic_core import to_json

from pipespec.limits import MAX_COUNT
from pipespec.sampling.params import MAX_LOGPROBS
from pipespec.server.dialects.translation import (
    OWN_FIELDS,
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
    Accepts,
    RequestModel,
    contents,
)
from pipespec.server.request_schema import LATER, NO_MEDIA, ReasoningEffort

NO_SERVICE = "is not supported: this server has no such service"
LOGPROBS = "message.output_text.logprobs"
# What else replies of this server could include: nothing of it is there, so nothing is left out.
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
MAX_ID = 128
MAX_METADATA = 16

# --- input ------------------------------------------------------------------------------------


class InputText(RequestModel):
    """Text of a message, of a result or of reasoning."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


Contents = Annotated[str, contents(str | list[InputText], "'input_text' and the like"), READABLE]


class InputMessage(RequestModel):
    """A message of the conversation."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Contents


class FunctionCallItem(RequestModel):
    """A call in an earlier answer of the model."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionOutputItem(RequestModel):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Contents


class ReasoningItem(RequestModel):
    """What the model has thought before an earlier answer."""

    type: Literal["reasoning"]
    content: Annotated[str | None, contents(list[InputText] | None, "'reasoning_text'")] = None


def _kind_of_item(item: Any) -> str | None:
    if isinstance(item, dict):
        kind = item.get("type") or "message"
        return kind if isinstance(kind, str) else None
    return getattr(item, "type", None) or "message"


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _kind_of_item,
        custom_error_type="kind_of_item",
        custom_error_message=(
            "should be an item of type message, function_call, function_call_output or reasoning"
        ),
    ),
]

# --- requests ---------------------------------------------------------------------------------


class FunctionTool(RequestModel):
    """A function that the model may call. `parameters` is a JSON schema."""

    type: Literal["function"]
    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(RequestModel):
    """What the answer must match: nothing, any JSON object, or a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _fits(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError(
                f"is of type '{self.type}', but the type 'json_schema' alone has a schema, and "
                "needs it"
            )
        return self


class TextConfig(RequestModel):
    """How the text of the answer is written."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(RequestModel):
    """How much the model thinks. It is not summarised."""

    effort: ReasoningEffort | None = None


class NamedFunction(RequestModel):
    """A function that must or may be called."""

    type: Literal["function"]
    name: str


class AllowedTools(RequestModel):
    """The functions of which one may or must be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1)]


_AnyChoice = Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None
ToolChoice = Annotated[
    _AnyChoice,
    Accepts(
        _AnyChoice,
        "'none', 'auto', 'required', {'type': 'function', 'name': ...} or "
        "{'type': 'allowed_tools', 'mode': 'auto' or 'required', 'tools': [...]}",
    ),
]

IGNORED = frozenset(
    (
        *("user", "safety_identifier", "service_tier", "prompt_cache_key", "stream_options"),
        *("prompt_cache_retention", "prompt_cache_options", "max_tool_calls"),
    )
)
REFUSED = {
    "background": (NO_SERVICE, ()),
    "background_options": (NO_SERVICE, ()),
    "image": (NO_MEDIA, ()),
    "conversation": (LATER, ()),
    "prompt": (NO_SERVICE, ()),
    "truncation": ("is not supported: a prompt that is too long is refused", ("disabled",)),
    "context_management": (LATER, ()),
    "moderation": (NO_SERVICE, ()),
    "access_programs": (NO_SERVICE, ()),
}
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": "include",
    "reasoning_effort": "reasoning.effort",
}


class ResponsesRequest(DialectBody):
    """POST /v1/responses."""

    passed = OWN_FIELDS | {"top_k", "stop"}
    ignored, refused, names = IGNORED, REFUSED, NAMES

    input: Annotated[
        Annotated[str, TEXT] | Annotated[list[Item], PARTS],
        TEXT_OR_PARTS,
    ]
    instructions: str | None = None
    previous_response_id: Annotated[str | None, Field(min_length=1, max_length=MAX_ID)] = None
    store: bool | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1, le=MAX_COUNT)] = None
    temperature: Annotated[FiniteFloat | None, Field(ge=0, le=2)] = None
    top_p: Annotated[FiniteFloat | None, Field(gt=0, le=1)] = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    include: list[Literal[INCLUDABLE]] | None = None  # type: ignore[valid-type]
    tools: Annotated[list[FunctionTool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    metadata: Annotated[dict[str, str] | None, Field(max_length=MAX_METADATA)] = None
    stream: bool | None = None

    @property
    def continues(self) -> str | None:
        return self.previous_response_id

    def translate(self, earlier: Messages) -> Translation:
        conversation = [*earlier]
        items = self.input
        if isinstance(items, str):
            items = [InputMessage(role="user", content=items)]
        for item in items:
            add_turn(conversation, message_of(item))
        # Those of the response that is continued are not carried over.
        rules = [{"role": "system", "content": self.instructions}] if self.instructions else []
        wanted = LOGPROBS in (self.include or ()) or bool(self.top_logprobs)
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": [*rules, *conversation],
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_completion_tokens": self.max_output_tokens,
            "tools": [tool_of(t.name, t.parameters, t.description) for t in self.tools or ()],
            "tool_choice": choice_of(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "response_format": format_of(self.text.format if self.text else None),
            "logprobs": wanted,
            "top_logprobs": self.top_logprobs if wanted else None,
        }
        # The messages to which the answer is added for a later request.
        kept = None if self.store is False else to_json(conversation)
        return Translation(fields, bool(self.stream), {"echo": echo_of(self), "conversation": kept})


# --- translation ------------------------------------------------------------------------------


def message_of(item: Any) -> dict[str, Any]:
    """A message as OpenAI's chats have it; one of the model may be only a part of one."""
    if isinstance(item, FunctionCallItem):
        call = call_of(item.call_id, item.name, item.arguments)
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if isinstance(item, FunctionOutputItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
    if isinstance(item, ReasoningItem):
        return {"role": "assistant", "content": "", "reasoning_content": item.content or ""}
    return {"role": item.role, "content": item.content}


def choice_of(choice: str | NamedFunction | AllowedTools | None) -> Any:
    """The choice of a tool as OpenAI's chats have it."""
    if isinstance(choice, NamedFunction):
        return named_function(choice.name)
    if isinstance(choice, AllowedTools):
        tools = [named_function(tool.name) for tool in choice.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    return choice


def format_of(wanted: TextFormat | None) -> dict[str, Any] | None:
    """What the answer must match, as OpenAI's chats have it."""
    if wanted is None or wanted.type != "json_schema":
        return None if wanted is None else {"type": wanted.type}
    return schema_format(wanted.schema_, wanted.name or "output")


def echo_of(body: ResponsesRequest) -> dict[str, Any]:
    """The fields of a request that its response repeats."""
    tools = [
        {"type": "function", "strict": None, "parameters": None}
        | tool.model_dump(exclude_unset=True)
        for tool in body.tools or ()
    ]
    text = body.text or TextConfig(format=TextFormat(type="text"))
    effort = body.reasoning.effort if body.reasoning else None
    choice = body.tool_choice or "auto"
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": effort},
        "text": text.model_dump(exclude_none=True, by_alias=True),
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": tools,
        "top_logprobs": body.top_logprobs,
    }
