"""Tool calls whose arguments are tagged texts instead of JSON: Qwen 3 Coder, Seed-OSS, MiniMax M2
and GLM 4.5."""

from __future__ import annotations

import json
import re
from typing import ClassVar

from pipespec.server.tool_parsers.abstract_tool_parser import ToolParser
from pipespec.server.tool_parsers.incremental_json import (
    Characters,
    NotAToolCall,
    expect,
    next_nonblank,
    until,
)

FUNCTION_NAME = re.compile(r"[\w.-]+")


class TaggedArguments(ToolParser):
    """What the families share: each argument is returned when it is whole, as JSON.

    The text of an argument that the tool declares as a string is that string; any other one is JSON
    if it can be, else a string.
    """

    markers: ClassVar[tuple[str, ...]] = ("<tool_call>",)

    def begin_named(self, name: str) -> None:
        """Begin a call of this name."""
        if not FUNCTION_NAME.fullmatch(name):
            raise NotAToolCall
        self.begin(name)
        self._name, self._num_arguments = name, 0

    def add_argument(self, key: str, text: str) -> None:
        """Return an argument."""
        declared = key in self.strings.get(self._name, ())
        made = text if not declared and _is_json(text) else json.dumps(text, ensure_ascii=False)
        before = ", " if self._num_arguments else "{"
        self._num_arguments += 1
        self._add_arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: {made}")

    def end_arguments(self) -> None:
        """Return the end of the arguments."""
        self._add_arguments("}" if self._num_arguments else "{}")

    def parameters(self, before_key: str, closing: str) -> Characters[None]:
        """Parse `NAME><parameter...KEY>VALUE</parameter>...</closing>`; names may be quoted."""
        self.begin_named((yield from until(">")).strip("\"'"))
        while True:
            if (yield from next_nonblank()) != "<":
                raise NotAToolCall
            kind = yield
            if kind == "/":
                yield from expect(f"{closing}>")
                self.end_arguments()
                return
            if kind != "p":
                raise NotAToolCall
            yield from expect(f"arameter{before_key}")
            key = (yield from until(">")).strip("\"'")
            value = yield from until("</parameter>")
            self.add_argument(key, value.removeprefix("\n").removesuffix("\n"))


class Qwen3Coder(TaggedArguments):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`, with
    line breaks between the parts."""

    closers = ("</tool_call>",)

    def read(self, marker: str) -> Characters[None]:
        yield from _next_tag("function=")
        yield from self.parameters("=", "function")


class SeedOss(Qwen3Coder):
    """As Qwen 3 Coder, between `<seed:tool_call>` and `</seed:tool_call>`."""

    markers = ("<seed:tool_call>",)
    closers = ("</seed:tool_call>",)


class MiniMaxM2(TaggedArguments):
    """`<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter>...</invoke>
    ...</minimax:tool_call>`, with line breaks between the parts."""

    markers = ("<minimax:tool_call>", "<invoke name=")
    closers = ("</minimax:tool_call>",)

    def read(self, marker: str) -> Characters[None]:
        if marker == self.markers[0]:
            yield from _next_tag("invoke name=")
        yield from self.parameters(" name=", "invoke")


class Glm45(TaggedArguments):
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>`, with line
    breaks between the parts."""

    def read(self, marker: str) -> Characters[None]:
        name = (yield from until("<")).strip()
        if not FUNCTION_NAME.fullmatch(name):
            raise NotAToolCall
        begun = False
        while True:
            first = yield
            if first == "/":
                yield from expect("tool_call>")
                if not begun:
                    self.begin_named(name)
                self.end_arguments()
                return
            if first != "a":
                raise NotAToolCall
            yield from expect("rg_key>")
            if not begun:
                self.begin_named(name)
                begun = True
            key = (yield from until("</arg_key>")).strip()
            yield from _next_tag("arg_value>")
            self.add_argument(key, (yield from until("</arg_value>")))
            if (yield from next_nonblank()) != "<":
                raise NotAToolCall


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    """NaN and infinities are no JSON."""
    raise ValueError(constant)


def _next_tag(tag: str) -> Characters[None]:
    """A tag, after white space."""
    if (yield from next_nonblank()) != "<":
        raise NotAToolCall
    yield from expect(tag)
