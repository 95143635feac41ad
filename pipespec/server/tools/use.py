"""Whether a chat may call tools, or must, and how its calls are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipespec.client.served import ServedModel
from pipespec.server.errors import refused
from pipespec.server.fields import ChatRequest
from pipespec.server.messages import Message, Tool
from pipespec.server.structure import Form, calls_of
from pipespec.server.tools.families import FAMILIES, Family, family_of, held_to_scheme
from pipespec.system.reading import shown


@dataclass(frozen=True)
class ToolUse:
    """How calls are read out of an answer; one at most unless `parallel`.

    `demanded` are the tools of which one must be called, if any must; `named`: the client said
    which.
    """

    family: Family
    parallel: bool
    demanded: Sequence[Tool] = ()
    named: bool = False

    @property
    def form(self) -> Form | None:
        """What the answer must fit."""
        return calls_of(self.demanded, None if self.parallel else 1) if self.demanded else None


def offered(body: ChatRequest) -> Sequence[Tool]:
    """The tools that the model is shown: with `tool_choice` none there are none. Raises ApiError.

    What is not shown is not called, and nothing else keeps a model from a call.
    """
    tools, choice = body.tools or [], body.tool_choice
    if choice == "none":
        return ()
    if not tools and choice not in (None, "auto"):
        raise refused("tool_choice", f"tool_choice is {shown(choice)}, but tools holds none.")
    named = _named(body)
    if named is not None and named not in [tool.function.name for tool in tools]:
        raise refused("tool_choice", f"tool_choice names {shown(named)}, which is not in tools.")
    return tools


def _named(body: ChatRequest) -> str | None:
    """The function that must be called."""
    choice = body.tool_choice
    return choice["function"]["name"] if isinstance(choice, dict) else None


def read_as(body: ChatRequest, served: ServedModel, parser: str | None) -> ToolUse:
    """How the calls of a chat are read: as it was made to write them, or else with a parser that
    was chosen, or by the template. Raises ApiError."""
    name = parser or family_of(served.tokenizer.chat_template or "")
    parallel = body.parallel_tool_calls is not False
    if (named := _named(body)) is not None:
        demanded = [tool for tool in body.tools or () if tool.function.name == named]
        return ToolUse(held_to_scheme(name), False, demanded, named=True)
    if body.tool_choice == "required":
        return ToolUse(held_to_scheme(name), parallel, body.tools or ())
    if name is None:
        raise refused(
            "tools",
            "tools are given, but how this model writes a call cannot be told from its chat "
            f"template; start the server with --tool-call-parser {'|'.join(FAMILIES)}.",
            "unsupported_field",
        )
    return ToolUse(FAMILIES[name], parallel)


def check_template(served: ServedModel, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
    """Raise ApiError if the model's chat template would leave tools or calls out."""
    template = served.tokenizer.chat_template or ""
    called = any(message.tool_calls for message in messages)
    for param, given, word, told in (
        ("tools", tools, "tools", "tools are given"),
        ("messages", called, "tool_calls", "messages hold tool_calls"),
    ):
        if given and word not in template:
            raise refused(
                param,
                f"{told}, but the model's chat template has no place for them; leave "
                "them out or serve another model.",
                "unsupported_field",
            )
