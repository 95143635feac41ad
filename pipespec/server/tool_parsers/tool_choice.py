"""Whether a chat may or must call tools, and how its calls are parsed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipespec.client.model_info import ModelInfo
from pipespec.server.api_errors import invalid_field
from pipespec.server.message_schema import Message, Tool
from pipespec.server.request_schema import ChatRequest
from pipespec.server.response_format import OutputConstraint, tool_calls_constraint
from pipespec.server.tool_parsers.parser_families import (
    FAMILIES,
    ParserFamily,
    family_for_template,
    forced_json_family,
)
from pipespec.system.validation import shown


@dataclass(frozen=True)
class ToolUse:
    """How calls are parsed out of an answer; one at most unless `parallel`.

    `required` are the tools of which one must be called; with `named` the client chose which.
    `strings` are the parameters that are texts, by function.
    """

    family: ParserFamily
    parallel: bool
    required: Sequence[Tool] = ()
    named: bool = False
    strings: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def constraint(self) -> OutputConstraint | None:
        """What the answer must match, if a call is required."""
        if not self.required:
            return None
        return tool_calls_constraint(self.required, None if self.parallel else 1)


def offered_tools(body: ChatRequest) -> Sequence[Tool]:
    """The tools that the prompt shows to the model: none with `tool_choice` none, and only allowed
    ones with `allowed_tools`, as nothing else keeps a model from a call. Raises ApiError.
    """
    tools, choice = body.tools or [], body.tool_choice
    if choice == "none":
        return ()
    if not tools and choice not in (None, "auto"):
        raise invalid_field("tool_choice", f"tool_choice is {shown(choice)}, but tools holds none.")
    known = [tool.function.name for tool in tools]
    named, allowed = _named_function(body), _allowed_functions(body)
    for name in (named,) if allowed is None else allowed:
        if name is not None and name not in known:
            raise invalid_field(
                "tool_choice", f"tool_choice names {shown(name)}, which is not in tools."
            )
    return tools if allowed is None else [tool for tool in tools if tool.function.name in allowed]


def _named_function(body: ChatRequest) -> str | None:
    """The function that `tool_choice` names."""
    choice = body.tool_choice
    if isinstance(choice, dict) and choice["type"] == "function":
        return str(choice["function"]["name"])
    return None


def _allowed_functions(body: ChatRequest) -> list[str] | None:
    """The functions to which `tool_choice` limits the tools; None: to none."""
    choice = body.tool_choice
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        return [tool["function"]["name"] for tool in choice["allowed_tools"]["tools"]]
    return None


def tool_use_of(body: ChatRequest, served: ModelInfo, parser: str | None) -> ToolUse:
    """How the calls of a chat are parsed: as forced JSON where a call is required, else by
    `parser` or, if that is None, as the chat template has it. Raises ApiError."""
    name = parser or family_for_template(served.tokenizer.chat_template or "")
    parallel = body.parallel_tool_calls is not False
    choice, offered = body.tool_choice, offered_tools(body)
    if (named := _named_function(body)) is not None:
        required = [tool for tool in offered if tool.function.name == named]
        return ToolUse(forced_json_family(name), False, required, named=True)
    mode = choice["allowed_tools"]["mode"] if isinstance(choice, dict) else choice
    if mode == "required":
        return ToolUse(forced_json_family(name), parallel, offered)
    if name is None:
        raise invalid_field(
            "tools",
            "tools are given, but the chat template does not show how this model writes a "
            f"call; forms that are known: {', '.join(FAMILIES)}.",
            "unsupported_field",
        )
    return ToolUse(FAMILIES[name], parallel, strings=string_parameters(offered))


def string_parameters(tools: Sequence[Tool]) -> dict[str, frozenset[str]]:
    """The parameters that are texts, by function, as far as the tools declare them."""
    found = {}
    for tool in tools:
        properties = (tool.function.parameters or {}).get("properties")
        found[tool.function.name] = frozenset(
            name
            for name, schema in (properties.items() if isinstance(properties, dict) else ())
            if isinstance(schema, dict) and schema.get("type") == "string"
        )
    return found


def check_template(served: ModelInfo, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
    """Raise ApiError if the model's chat template would leave tools or calls out."""
    template = served.tokenizer.chat_template or ""
    called = any(message.tool_calls for message in messages)
    for param, given, variable, problem in (
        ("tools", tools, "tools", "tools are given"),
        ("messages", called, "tool_calls", "messages hold tool_calls"),
    ):
        if given and variable not in template:
            raise invalid_field(
                param,
                f"{problem}, but the model's chat template has no place for them; leave "
                "them out or serve another model.",
                "unsupported_field",
            )
