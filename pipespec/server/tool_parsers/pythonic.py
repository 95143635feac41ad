"""The tool calls of Llama 4: a list of calls in Python."""

from __future__ import annotations

import ast
import json
from string import ascii_letters, digits

from pipespec.server.tool_parsers.abstract_tool_parser import ToolParser
from pipespec.server.tool_parsers.incremental_json import (
    BLANKS,
    Characters,
    NotAToolCall,
    next_nonblank,
)

NAME_CHARACTERS = ascii_letters + digits + "_.-"
CLOSING = {"(": ")", "[": "]", "{": "}"}


class Pythonic(ToolParser):
    """`[name(key=value, ...), ...]`, perhaps between `<|python_start|>` and `<|python_end|>`. Each
    argument is returned when it is whole, as JSON."""

    markers = ("<|python_start|>", "[")
    closers = ("<|python_end|>",)

    def read(self, marker: str) -> Characters[None]:
        if marker != "[" and (yield from next_nonblank()) != "[":
            raise NotAToolCall
        after = ","
        while after == ",":
            self._undecided = True
            yield from self._call_of((yield from next_nonblank()))
            after = yield from next_nonblank()
        if after != "]":
            raise NotAToolCall

    def _call_of(self, first: str) -> Characters[None]:
        """One call, whose name begins with `first`."""
        name, after = yield from _name(first)
        if after != "(":
            raise NotAToolCall
        after = yield from next_nonblank()
        before = "{"
        while after != ")":
            key, equals = yield from _name(after)
            if equals != "=":
                raise NotAToolCall
            written, after = yield from _literal()
            try:
                # Escapes of Python can name half characters, which JSON writes as escapes.
                value = json.dumps(ast.literal_eval(written.strip()), allow_nan=False)
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                raise NotAToolCall from None
            if before == "{":
                self.begin(name)
            self._add_arguments(f"{before}{json.dumps(key)}: {value}")
            before = ", "
            if after == ",":
                after = yield from next_nonblank()
        if before == "{":
            self.begin(name)
        self._add_arguments("{}" if before == "{" else "}")


def _name(first: str) -> Characters[tuple[str, str]]:
    """A name that begins with `first`, and the character that follows it, blanks aside."""
    name, after = "", first
    while after in NAME_CHARACTERS:
        name += after
        after = yield
    if not name:
        raise NotAToolCall
    return name, (yield from next_nonblank()) if after in BLANKS else after


def _literal() -> Characters[tuple[str, str]]:
    """The text of a value, and the comma or bracket that ends it."""
    written: list[str] = []
    awaited: list[str] = []
    quote, escaped = "", False
    while True:
        character = yield
        if quote:
            quote = "" if character == quote and not escaped else quote
            escaped = character == "\\" and not escaped
        elif character in "\"'":
            quote = character
        elif character in CLOSING:
            awaited.append(CLOSING[character])
        elif not awaited and character in ",)":
            return "".join(written), character
        elif character in CLOSING.values() and (not awaited or character != awaited.pop()):
            raise NotAToolCall
        written.append(character)
