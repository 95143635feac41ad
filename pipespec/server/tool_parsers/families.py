"""How each family of models writes its calls of tools, and which family a model is of."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from string import ascii_letters, digits

from pipespec.server.tool_parsers.declared import MAX_VALUE, Declared, python_as_json
from pipespec.server.tool_parsers.tool_parser import OBJECT, WS, Piece, ToolParser

LETTERS = ascii_letters + digits

# --- arguments in JSON ------------------------------------------------------------------------


class Hermes(ToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them."""

    markers, closers = ("<tool_call>",), ("</tool_call>",)
    first = rf"<tool_call>{WS}{OBJECT}"


class Llama3Json(ToolParser):
    """`{"name": ..., "parameters": {...}}`, several with `;` between them, each perhaps after
    `<|python_tag|>`."""

    markers, closers = ("<|python_tag|>", "{"), (";",)
    special = ("<|python_tag|>",)
    first = rf"(?:<\|python_tag\|>{WS})?{OBJECT}"


class ForcedJson(ToolParser):
    """`[{"name": ..., "arguments": {...}}, ...]`, and no other text: required calls."""

    markers = ("[",)
    special = ()
    first, another = rf"(?P<list>\[){WS}{OBJECT}", OBJECT

    def finish(self) -> list[Piece]:
        self._held = ""  # the beginning of a call that was cut, as nothing else is allowed
        return super().finish()


class Mistral(ToolParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or, as newer ones do, for each call
    `[TOOL_CALLS]name[ARGS]{...}`, where `[ARGS]` may be missing or follow `[CALL_ID]...`."""

    markers = ("[TOOL_CALLS]",)
    special = (*markers, "[CALL_ID]", "[ARGS]")
    first = (
        rf"\[TOOL_CALLS\]{WS}(?:(?:(?P<list>\[){WS})?{OBJECT}"
        rf"|(?P<name>[A-Za-z0-9_./:-]++){WS}(?:(?:\[CALL_ID\][^[]*+)?\[ARGS\]{WS})?(?P<next>\{{))"
    )
    another = OBJECT
    new_id = staticmethod(lambda name, number: "".join(secrets.choice(LETTERS) for _ in range(9)))


class DeepSeekV3(ToolParser):
    """`<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>...
    <｜tool▁calls▁end｜>`, as V3.1 writes it; V3 and R1 have `function` in place of the name, which
    then stands in a line before a block of JSON."""

    markers = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    closers = ("<｜tool▁calls▁end｜>",)
    special = (*markers, *closers, "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
    first = (
        rf"(?:{markers[0]}{WS})?{markers[1]}\s*+(?:function\s*+<｜tool▁sep｜>\s*+"
        rf"(?P<name>[\w.:/-]++)[^\S\n]*+\n{WS}```json|(?P<name>[\w.:/-]++)\s*+<｜tool▁sep｜>)"
        rf"{WS}(?P<next>\{{)"
    )
    end = ".*?<｜tool▁call▁end｜>"


class KimiK2(ToolParser):
    """`<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>
    {...}<|tool_call_end|>...<|tool_calls_section_end|>`."""

    markers = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    closers = ("<|tool_calls_section_end|>",)
    special = (*markers, *closers, "<|tool_call_argument_begin|>", "<|tool_call_end|>")
    first = (
        rf"(?:<\|tool_calls_section_begin\|>{WS})?<\|tool_call_begin\|>\s*+(?:functions\.)?"
        rf"(?P<name>[\w.-]++)(?::\d++)?\s*+<\|tool_call_argument_begin\|>{WS}(?P<next>\{{)"
    )
    end = r".*?<\|tool_call_end\|>"
    new_id = staticmethod("functions.{}:{}".format)


# --- arguments that are tagged texts ----------------------------------------------------------


class TaggedArguments(ToolParser):
    """Each argument is a text, whose meaning the tool declares."""

    value_end = "</parameter>"
    around = "\n"  # no part of a value, once at each end

    def read_value(self, key: str, start: int) -> tuple[int, str | None] | None:
        end = self._held.find(self.value_end, start)
        if end < 0:
            return None
        text = self._held[start:end].removeprefix(self.around).removesuffix(self.around)
        declared = self.declared.get(self.name) or Declared({})
        return end + len(self.value_end), declared.as_json(key, text)


class Qwen3Coder(TaggedArguments):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`, with
    line breaks between the parts; a function may follow another, or stand alone."""

    markers, closers = ("<tool_call>", "<function="), ("</tool_call>",)
    special = ("<tool_call>", "</tool_call>")
    first = rf"(?:<(?:seed:)?tool_call>{WS})?<function=[\"']*+(?P<name>[\w.-]++)[\"']*+>"
    key = rf"{WS}<parameter=[\"']*+(?P<key>[^>\"']*+)[\"']*+>"
    last = rf"{WS}</function>"


class SeedOss(Qwen3Coder):
    """As Qwen 3 Coder, between `<seed:tool_call>` and `</seed:tool_call>`."""

    markers, closers = ("<seed:tool_call>", "<function="), ("</seed:tool_call>",)
    special = ("<seed:tool_call>", "</seed:tool_call>")


class MiniMaxM2(TaggedArguments):
    """`<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter>...</invoke>
    ...</minimax:tool_call>`, with line breaks between the parts."""

    markers = ("<minimax:tool_call>", "<invoke name=")
    closers = ("</minimax:tool_call>",)
    special = (markers[0], *closers)
    first = rf"(?:<minimax:tool_call>{WS})?<invoke name=[\"']*+(?P<name>[\w.-]++)[\"']*+>"
    key = rf"{WS}<parameter name=[\"']*+(?P<key>[^>\"']*+)[\"']*+>"
    last = rf"{WS}</invoke>"


class Glm45(TaggedArguments):
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>`, with line
    breaks between the parts."""

    markers = ("<tool_call>",)
    special = (
        *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"),
        *("<arg_value>", "</arg_value>"),
    )
    first = r"<tool_call>\s*+(?P<name>[\w.-]++)\s*+(?P<next><(?:arg_key|/tool_call)>)"
    key = rf"{WS}<arg_key>(?P<key>[^<]*+)</arg_key>{WS}<arg_value>"
    last, value_end, around = rf"{WS}</tool_call>", "</arg_value>", ""


# --- arguments in Python ----------------------------------------------------------------------

_WORD = r"[A-Za-z0-9_.-]++"
_CLOSING = {"(": ")", "[": "]", "{": "}", "'": "'", '"': '"'}


class Pythonic(ToolParser):
    """`[name(key=value, ...), ...]`, perhaps between `<|python_start|>` and `<|python_end|>`."""

    markers, closers = ("<|python_start|>", "["), ("<|python_end|>",)
    special = (markers[0], *closers)
    another = rf"(?P<name>{_WORD}){WS}\({WS}(?P<next>\)|{_WORD}{WS}(?P<assigned>=))"
    first = rf"(?:<\|python_start\|>{WS})?(?P<list>\[){WS}{another}"
    key, last = rf"{WS}(?P<key>{_WORD}){WS}=", rf"{WS}\)"

    def read_value(self, key: str, start: int) -> tuple[int, str | None] | None:
        for place in range(max(start, self._num_read), len(self._held)):
            character = self._held[place]
            awaited = self._awaited[-1] if self._awaited else ",)"
            quoted, closes = awaited in "'\"", character in awaited and not self._escaped
            ended = closes and not self._awaited
            wrong = character in ")]}" and not quoted and not closes
            if ended or wrong or place - start == MAX_VALUE:
                self._awaited, self._escaped, self._num_read = [], False, 0
                value = python_as_json(self._held[start:place]) if ended else None
                return place + (ended and character == ","), value
            self._escaped = quoted and character == "\\" and not self._escaped
            if closes:
                self._awaited.pop()
            elif character in _CLOSING and not quoted:
                self._awaited.append(_CLOSING[character])
        self._num_read = len(self._held)
        return None


# --- which one --------------------------------------------------------------------------------

# By their names in `vllm serve --tool-call-parser`.
FAMILIES: Mapping[str, type[ToolParser]] = {
    "hermes": Hermes,
    "llama3_json": Llama3Json,
    "mistral": Mistral,
    "openai": ToolParser,  # its calls are found with the reasoning
    "qwen3_coder": Qwen3Coder,
    "seed_oss": SeedOss,
    "minimax_m2": MiniMaxM2,
    "glm45": Glm45,
    "deepseek_v3": DeepSeekV3,
    "kimi_k2": KimiK2,
    "llama4_pythonic": Pythonic,
}
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
    return next((name for name, signs in _SIGNS if all(sign in template for sign in signs)), None)
