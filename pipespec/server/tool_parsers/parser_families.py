"""Which parser a model's tool calls need."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from string import ascii_letters, digits

from pipespec.server.tool_parsers.abstract_tool_parser import ToolParser
from pipespec.server.tool_parsers.hermes import Hermes
from pipespec.server.tool_parsers.incremental_json import Characters, NotAToolCall
from pipespec.server.tool_parsers.llama3_json import Llama3Json
from pipespec.server.tool_parsers.mistral import Mistral

# The length of ids, letters and digits, that Mistral's templates accept.
MISTRAL_ID = 9


def _openai_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    return "".join(secrets.choice(ascii_letters + digits) for _ in range(MISTRAL_ID))


class ForcedJson(ToolParser):
    """`[{"name": ..., "arguments": {...}}, ...]`, and no other text: required calls."""

    markers = ("[",)

    def read(self, marker: str) -> Characters[None]:
        yield from self.listed()


class NoCalls(ToolParser):
    """For families whose calls are found with their reasoning."""

    markers = ()

    def read(self, marker: str) -> Characters[None]:
        raise NotAToolCall


@dataclass(frozen=True)
class ParserFamily:
    """Models that write their calls in the same format.

    Attributes:
        parser: the parser of one answer.
        special: texts of the format that are special tokens in some vocabularies.
        new_id: makes a call's id that the model's template accepts when the client sends it back.
    """

    parser: type[ToolParser]
    special: tuple[str, ...]
    new_id: Callable[[], str] = _openai_id


# By their names in `vllm serve --tool-call-parser`.
FAMILIES: Mapping[str, ParserFamily] = {
    "hermes": ParserFamily(Hermes, ("<tool_call>", "</tool_call>")),
    "llama3_json": ParserFamily(Llama3Json, ("<|python_tag|>",)),
    "mistral": ParserFamily(Mistral, ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), _mistral_id),
    "openai": ParserFamily(NoCalls, ()),
}


def forced_json_family(name: str | None) -> ParserFamily:
    """How required calls are parsed, to which a grammar holds the model; ids are those of the
    model's own family, if it is known."""
    new_id = _openai_id if name is None else FAMILIES[name].new_id
    return ParserFamily(ForcedJson, (), new_id)


def family_for_template(template: str) -> str | None:
    """The family whose format a chat template prescribes; None: no known one."""
    if "<|channel|>" in template:
        return "openai"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    # Later Qwen and GLM write tags where Hermes has JSON.
    if "<tool_call>" in template and not any(
        tag in template for tag in ("<function=", "<arg_key>")
    ):
        return "hermes"
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return "llama3_json"
    return None
