"""From the messages and tools of a chat to the text of its prompt, by the model's own template, and
whether its answer may or must call tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipespec.client.chat_template import TemplateFailed
from pipespec.client.model_info import ModelInfo
from pipespec.server.api_errors import invalid_field
from pipespec.server.message_schema import Message, NamedTool, Tool, ToolsChoice
from pipespec.server.request_schema import ChatRequest, TokenizeRequest
from pipespec.server.response_format import OutputConstraint, tool_calls_constraint
from pipespec.server.tool_parsers.declared import Declared
from pipespec.server.tool_parsers.families import FAMILIES, ForcedJson, family_for_template
from pipespec.server.tool_parsers.tool_parser import ToolParser
from pipespec.system.validation import shown

# The variables by which templates switch reasoning on and off: Qwen 3's and GLM's, DeepSeek's.
THINKING_VARIABLES = ("enable_thinking", "thinking")
# Variables that are the server's to set.
RESERVED = (
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("conversation", "chat_template", "tokenize", "return_dict", "bos_token", "eos_token"),
)


def render_chat(
    served: ModelInfo, body: ChatRequest | TokenizeRequest, tools: Sequence[Tool] = ()
) -> str:
    """The messages of a request, and tools, in the model's chat template. Raises ApiError."""
    messages, continuing = body.messages or [], bool(body.continue_final_message)
    variables = thinking_variables(body) | (body.chat_template_kwargs or {})
    _check_options(body)
    check_template(served, messages, tools)
    try:
        return served.render(
            [message.for_template() for message in messages],
            answering=not continuing and body.add_generation_prompt is not False,
            continuing=continuing,
            tools=[tool.for_template() for tool in tools],
            variables=variables,
        )
    except TemplateFailed as error:
        subject = "messages and tools do" if tools else "messages do"
        raise invalid_field(
            f"{subject} not fit the model's chat template ({error}); change them."
        ) from None


def _check_options(body: ChatRequest | TokenizeRequest) -> None:
    for name in RESERVED:
        if name in (body.chat_template_kwargs or {}):
            raise invalid_field(f"chat_template_kwargs sets {name}, which the server sets.")
    if not body.continue_final_message:
        return
    if body.add_generation_prompt:
        raise invalid_field(
            "continue_final_message and add_generation_prompt are both true, but an answer either "
            "continues a message or begins one; leave one out."
        )
    assert body.messages
    last = body.messages[-1]
    if last.role != "assistant" or not last.continued or last.tool_calls:
        raise invalid_field(
            "continue_final_message is true, but the last message is no text of the role "
            f"'assistant'; its role is {shown(last.role)}."
        )


def thinking_variables(body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """The variables that mean `reasoning_effort` to templates that have a place for it."""
    effort = body.reasoning_effort
    if effort is None:
        return {}
    thinks = effort != "none"
    found: dict[str, Any] = dict.fromkeys(THINKING_VARIABLES, thinks)
    return found | ({"reasoning_effort": effort} if thinks else {})


def switched_off(served: ModelInfo, body: ChatRequest) -> bool:
    """Whether the template has a switch for reasoning, and a request leaves or turns it off."""
    given = thinking_variables(body) | (body.chat_template_kwargs or {})
    switches = [{}, *(dict.fromkeys(THINKING_VARIABLES, on) for on in (False, True))]
    try:
        now, off, on = (
            served.render([{"role": "user", "content": "a"}], variables={**given, **switch})
            for switch in switches
        )
    except TemplateFailed:
        return False
    return now == off != on


# --- tools --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToolUse:
    """How calls are parsed out of an answer, one at most unless `parallel`; `family` makes their
    ids. With `named` the client chose the function."""

    parser: type[ToolParser]
    family: type[ToolParser]
    parallel: bool
    named: bool = False
    declared: Mapping[str, Declared] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parser.patterns()  # compiled here, where a request is prepared, beside the event loop


def offered_tools(body: ChatRequest) -> Sequence[Tool]:
    """The tools that the prompt shows to the model: none with `tool_choice` none, and only allowed
    ones with `allowed_tools`, as nothing else keeps a model from a call. Raises ApiError.
    """
    tools, choice = body.tools or [], body.tool_choice
    if choice == "none":
        return ()
    if not tools and choice not in (None, "auto"):
        raise invalid_field(f"tool_choice is {shown(choice)}, but tools holds none.")
    known = [tool.function.name for tool in tools]
    chosen = [choice] if isinstance(choice, NamedTool) else []
    if isinstance(choice, ToolsChoice):
        chosen = choice.allowed_tools.tools
    names = [tool.function.name for tool in chosen]
    for name in names:
        if name not in known:
            raise invalid_field(f"tool_choice names {shown(name)}, which is not in tools.")
    if isinstance(choice, ToolsChoice):
        return [tool for tool in tools if tool.function.name in names]
    return tools


def tool_use_of(
    body: ChatRequest, offered: Sequence[Tool], served: ModelInfo, parser: str | None
) -> tuple[ToolUse, OutputConstraint | None]:
    """How the calls of a chat are parsed, and what the answer must match if one is required: as
    forced JSON then, else by `parser` or, if that is None, as the chat template has it. Raises
    ApiError."""
    name = parser or family_for_template(served.chat_template(tools=True) or "")
    parallel, choice = body.parallel_tool_calls is not False, body.tool_choice
    family = ToolParser if name is None else FAMILIES[name]
    if isinstance(choice, NamedTool):
        required = [tool for tool in offered if tool.function.name == choice.function.name]
        use = ToolUse(ForcedJson, family, False, named=True)
        return use, tool_calls_constraint(required, several=False)
    mode = choice.allowed_tools.mode if isinstance(choice, ToolsChoice) else choice
    if mode == "required":
        use = ToolUse(ForcedJson, family, parallel)
        return use, tool_calls_constraint(offered, several=parallel)
    if name is None:
        raise invalid_field(
            "tools are given, but the chat template does not show how this model writes a "
            f"call; forms that are known: {', '.join(FAMILIES)}.",
            "unsupported_field",
        )
    functions = [tool.function for tool in offered]
    declared = {each.name: Declared(each.parameters or {}) for each in functions}
    return ToolUse(family, family, parallel, declared=declared), None


def check_template(served: ModelInfo, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
    """Raise ApiError if the model's chat template would leave tools or calls out."""
    template = served.chat_template(tools=bool(tools)) or ""
    called = any(message.tool_calls for message in messages)
    for given, variable, problem in (
        (tools, "tools", "tools are given"),
        (called, "tool_calls", "messages hold tool_calls"),
    ):
        if given and variable not in template:
            raise invalid_field(
                f"{problem}, but the model's chat template has no place for them; leave "
                "them out or serve another model.",
                "unsupported_field",
            )
