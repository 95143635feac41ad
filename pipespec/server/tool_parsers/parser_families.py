"""Which parser a model's tool calls need."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from string import ascii_letters, digits

from pipespec.server.tool_parsers.abstract_tool_parser import ToolParser
from pipespec.server.tool_parsers.incremental_json import Characters, NotAToolCall
from pipespec.server.tool_parsers.json_calls import DeepSeekV3, Hermes, KimiK2, Llama3Json, Mistral
from pipespec.server.tool_parsers.pythonic import Pythonic
from pipespec.server.tool_parsers.tagged_arguments import Glm45, MiniMaxM2, Qwen3Coder, SeedOss

# The length of ids, letters and digits, that Mistral's templates accept.
MISTRAL_ID = 9


def _openai_id(_name: str, _number: int) -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id(_name: str, _number: int) -> str:
    return "".join(secrets.choice(ascii_letters + digits) for _ in range(MISTRAL_ID))


def _kimi_id(name: str, number: int) -> str:
    return f"functions.{name}:{number}"


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
        new_id: makes the id of a call, by its name and number, that the model's template accepts
            when the client sends it back.
    """

    parser: type[ToolParser]
    special: tuple[str, ...]
    new_id: Callable[[str, int], str] = _openai_id


# By their names in `vllm serve --tool-call-parser`.
FAMILIES: Mapping[str, ParserFamily] = {
    "hermes": ParserFamily(Hermes, ("<tool_call>", "</tool_call>")),
    "llama3_json": ParserFamily(Llama3Json, ("<|python_tag|>",)),
    "mistral": ParserFamily(Mistral, ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), _mistral_id),
    "openai": ParserFamily(NoCalls, ()),
    "qwen3_coder": ParserFamily(Qwen3Coder, ("<tool_call>", "</tool_call>")),
    "seed_oss": ParserFamily(SeedOss, ("<seed:tool_call>", "</seed:tool_call>")),
    "minimax_m2": ParserFamily(MiniMaxM2, ("<minimax:tool_call>", "</minimax:tool_call>")),
    "glm45": ParserFamily(
        Glm45,
        (
            *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"),
            *("<arg_value>", "</arg_value>"),
        ),
    ),
    "deepseek_v3": ParserFamily(
        DeepSeekV3,
        (*DeepSeekV3.markers, *DeepSeekV3.closers, "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ),
    "kimi_k2": ParserFamily(
        KimiK2,
        (*KimiK2.markers, *KimiK2.closers, "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        _kimi_id,
    ),
    "llama4_pythonic": ParserFamily(Pythonic, ("<|python_start|>", "<|python_end|>")),
}


def forced_json_family(name: str | None) -> ParserFamily:
    """How required calls are parsed, to which a grammar holds the model; ids are those of the
    model's own family, if it is known."""
    new_id = _openai_id if name is None else FAMILIES[name].new_id
    return ParserFamily(ForcedJson, (), new_id)


# Texts of a template that reveal its family, all of them; the first row that fits. None: calls that
# no parser reads, although the texts of a row below fit too.
_SIGNS: tuple[tuple[str | None, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>",)),
    ("kimi_k2", ("<|tool_call_begin|>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    (None, ("<tool_call>", "<invoke name=")),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("hermes", ("<tool_call>",)),
    ("llama3_json", ("<|start_header_id|>", '"parameters"')),
    ("llama4_pythonic", ("<|header_start|>", "<|python_start|>")),
)


def family_for_template(template: str) -> str | None:
    """The family whose format a chat template prescribes; None: no known one."""
    for family, signs in _SIGNS:
        if all(sign in template for sign in signs):
            return family
    return None
