"""How each family of models writes its calls of tools, and which family a model is of."""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Mapping
from string import ascii_letters, digits
from typing import ClassVar

from pipespec.server.tool_parsers.tool_parser import (
    Characters,
    NotAToolCall,
    ToolParser,
    expect,
    expect_next,
    next_nonblank,
    until,
    word,
)

LETTERS = ascii_letters + digits

# --- arguments in JSON ------------------------------------------------------------------------


class Hermes(ToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them."""

    markers, closers = ("<tool_call>",), ("</tool_call>",)

    def read(self, marker: str) -> Characters[None]:
        yield from expect_next("{")
        yield from self.call()


class Llama3Json(ToolParser):
    """`{"name": ..., "parameters": {...}}`, several with `;` between them, each perhaps after
    `<|python_tag|>`."""

    markers, closers = ("<|python_tag|>", "{"), (";",)
    special = ("<|python_tag|>",)

    def read(self, marker: str) -> Characters[None]:
        if marker != "{":
            yield from expect_next("{")
        yield from self.call()


class Mistral(ToolParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or, as newer ones do, for each call
    `[TOOL_CALLS]name[ARGS]{...}`, where `[ARGS]` may be missing or follow `[CALL_ID]...`."""

    markers = ("[TOOL_CALLS]",)
    special = (*markers, "[CALL_ID]", "[ARGS]")

    new_id = staticmethod(lambda name, number: "".join(secrets.choice(LETTERS) for _ in range(9)))

    def read(self, marker: str) -> Characters[None]:
        first = yield from next_nonblank()
        if first == "[":
            yield from self.listed()
        elif first == "{":
            yield from self.call()
        else:
            yield from self._named(first)

    def _named(self, first: str) -> Characters[None]:
        name, after = yield from word(first, LETTERS + "_-./:")
        if after == "[":
            after = yield
            if after == "C":
                yield from expect("ALL_ID]")
                yield from until("[")
                after = yield
            if after != "A":
                raise NotAToolCall
            yield from expect("RGS]")
            after = yield from next_nonblank()
        if after != "{":
            raise NotAToolCall
        yield from self.arguments(name)


class DeepSeekV3(ToolParser):
    """`<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>...
    <｜tool▁calls▁end｜>`, as V3.1 writes it; V3 and R1 have `function` in place of the name, which
    then stands in a line before a block of JSON."""

    markers = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    closers = ("<｜tool▁calls▁end｜>",)
    separator, end = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    special = (*markers, *closers, separator, end)
    block: str | None = "function"

    def read(self, marker: str) -> Characters[None]:
        if marker == self.markers[0]:
            yield from expect_next(self.markers[1])
        name = (yield from until(self.separator)).strip()
        if name == self.block:
            name = (yield from until("\n")).strip()
            yield from expect_next("```json")
        name = self.name_of(name)
        yield from expect_next("{")
        yield from self.arguments(name)
        yield from until(self.end)

    def name_of(self, written: str) -> str:
        if not re.fullmatch(r"[\w.:/-]+", written):
            raise NotAToolCall
        return written


class KimiK2(DeepSeekV3):
    """`<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>
    {...}<|tool_call_end|>...<|tool_calls_section_end|>`."""

    markers = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    closers = ("<|tool_calls_section_end|>",)
    separator, end = "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    special = (*markers, *closers, separator, end)
    block = None
    new_id = staticmethod("functions.{}:{}".format)

    def name_of(self, written: str) -> str:
        found = re.fullmatch(r"(?:functions\.)?([\w.-]+?)(?::\d+)?", written)
        if found is None:
            raise NotAToolCall
        return found[1]


class ForcedJson(ToolParser):
    """`[{"name": ..., "arguments": {...}}, ...]`, and no other text: required calls."""

    markers = ("[",)
    special = ()

    def read(self, marker: str) -> Characters[None]:
        yield from self.listed()


# --- arguments that are tagged texts ----------------------------------------------------------


class TaggedArguments(ToolParser):
    """Each argument is returned when it is whole, as JSON: as a string if the tool declares it as
    one or its text is no JSON."""

    markers: ClassVar[tuple[str, ...]] = ("<tool_call>",)

    def checked(self, name: str) -> str:
        if not re.fullmatch(r"[\w.-]+", name):
            raise NotAToolCall
        return name

    def add_text(self, key: str, text: str) -> None:
        declared = key in self.strings.get(self.name, ())
        is_json = not declared and _is_json(text)
        self.add_argument(key, text if is_json else json.dumps(text, ensure_ascii=False))


class Qwen3Coder(TaggedArguments):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`, with
    line breaks between the parts."""

    closers = ("</tool_call>",)
    tag, before_name, before_key = "function", "=", "="

    def read(self, marker: str) -> Characters[None]:
        if marker == self.markers[0]:
            yield from expect_next(f"<{self.tag}{self.before_name}")
        self.begin(self.checked((yield from until(">")).strip("\"'")))
        while True:
            yield from expect_next("<")
            kind = yield
            if kind == "/":
                yield from expect(f"{self.tag}>")
                self.end_arguments()
                return
            if kind != "p":
                raise NotAToolCall
            yield from expect(f"arameter{self.before_key}")
            key = (yield from until(">")).strip("\"'")
            value = yield from until("</parameter>")
            self.add_text(key, value.removeprefix("\n").removesuffix("\n"))


class SeedOss(Qwen3Coder):
    """As Qwen 3 Coder, between `<seed:tool_call>` and `</seed:tool_call>`."""

    markers, closers = ("<seed:tool_call>",), ("</seed:tool_call>",)


class MiniMaxM2(Qwen3Coder):
    """`<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter>...</invoke>
    ...</minimax:tool_call>`, with line breaks between the parts."""

    markers = ("<minimax:tool_call>", "<invoke name=")
    closers = ("</minimax:tool_call>",)
    special = (markers[0], *closers)
    tag, before_name, before_key = "invoke", " name=", " name="


class Glm45(TaggedArguments):
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>`, with line
    breaks between the parts."""

    special = (
        *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"),
        *("<arg_value>", "</arg_value>"),
    )

    def read(self, marker: str) -> Characters[None]:
        name = self.checked((yield from until("<")).strip())
        while True:
            first = yield
            if first not in "/a":
                raise NotAToolCall
            yield from expect("tool_call>" if first == "/" else "rg_key>")
            if self.undecided:
                self.begin(name)
            if first == "/":
                self.end_arguments()
                return
            key = (yield from until("</arg_key>")).strip()
            yield from expect_next("<arg_value>")
            self.add_text(key, (yield from until("</arg_value>")))
            yield from expect_next("<")


def _is_json(text: str) -> bool:
    def refuse(constant: str) -> None:
        raise ValueError(constant)  # NaN and infinities are no JSON

    try:
        json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return True


# --- arguments in Python ----------------------------------------------------------------------


class Pythonic(ToolParser):
    """`[name(key=value, ...), ...]`, perhaps between `<|python_start|>` and `<|python_end|>`. Each
    argument is returned when it is whole, as JSON."""

    markers, closers = ("<|python_start|>", "["), ("<|python_end|>",)
    special = (markers[0], *closers)
    letters = LETTERS + "_.-"

    def read(self, marker: str) -> Characters[None]:
        if marker != "[":
            yield from expect_next("[")
        after = ","
        while after == ",":
            self.undecided = True
            yield from self._call_of((yield from next_nonblank()))
            after = yield from next_nonblank()
        if after != "]":
            raise NotAToolCall

    def _call_of(self, first: str) -> Characters[None]:
        name, after = yield from word(first, self.letters)
        if not name or after != "(":
            raise NotAToolCall
        after = yield from next_nonblank()
        while after != ")":
            key, equals = yield from word(after, self.letters)
            if not key or equals != "=":
                raise NotAToolCall
            written, after = yield from _literal()
            try:
                # Escapes of Python can name half characters, which JSON writes as escapes.
                value = json.dumps(ast.literal_eval(written.strip()), allow_nan=False)
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                raise NotAToolCall from None
            if self.undecided:
                self.begin(name)
            self.add_argument(key, value)
            if after == ",":
                after = yield from next_nonblank()
        if self.undecided:
            self.begin(name)
        self.end_arguments()


def _literal() -> Characters[tuple[str, str]]:
    """The text of a value, and the comma or bracket that ends it."""
    written: list[str] = []
    awaited: list[str] = []
    closing, quote, escaped = {"(": ")", "[": "]", "{": "}"}, "", False
    while True:
        character = yield
        if quote:
            quote = "" if character == quote and not escaped else quote
            escaped = character == "\\" and not escaped
        elif character in "\"'":
            quote = character
        elif character in closing:
            awaited.append(closing[character])
        elif not awaited and character in ",)":
            return "".join(written), character
        elif character in closing.values() and (not awaited or character != awaited.pop()):
            raise NotAToolCall
        written.append(character)


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
