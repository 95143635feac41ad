"""Tool calls whose arguments are JSON: Hermes, Qwen 2.5 and 3, Llama 3, Mistral, DeepSeek V3 and
Kimi K2."""

from __future__ import annotations

import re
from string import ascii_letters, digits

from pipespec.server.tool_parsers.abstract_tool_parser import ToolParser
from pipespec.server.tool_parsers.incremental_json import (
    BLANKS,
    Characters,
    NotAToolCall,
    expect,
    next_nonblank,
    until,
)


class Hermes(ToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them."""

    markers = ("<tool_call>",)
    closers = ("</tool_call>",)

    def read(self, marker: str) -> Characters[None]:
        if (yield from next_nonblank()) != "{":
            raise NotAToolCall
        yield from self.call()


class Llama3Json(ToolParser):
    """`{"name": ..., "parameters": {...}}`, several with `;` between them, each perhaps after
    `<|python_tag|>`."""

    markers = ("<|python_tag|>", "{")
    closers = (";",)

    def read(self, marker: str) -> Characters[None]:
        if marker != "{" and (yield from next_nonblank()) != "{":
            raise NotAToolCall
        yield from self.call()


NAME_CHARACTERS = ascii_letters + digits + "_-./:"


class Mistral(ToolParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or, as newer ones do, for each call
    `[TOOL_CALLS]name[ARGS]{...}`, where `[ARGS]` may be missing or follow `[CALL_ID]...`."""

    markers = ("[TOOL_CALLS]",)

    def read(self, marker: str) -> Characters[None]:
        first = yield from next_nonblank()
        if first == "[":
            yield from self.listed()
        elif first == "{":
            yield from self.call()
        else:
            yield from self._named(first)

    def _named(self, first: str) -> Characters[None]:
        name = ""
        after = first
        while after in NAME_CHARACTERS:
            name += after
            after = yield
        if after in BLANKS:
            after = yield from next_nonblank()
        if after == "[":
            after = yield
            if after == "C":
                yield from expect("ALL_ID]")
                while (yield) != "[":
                    pass
                after = yield
            if after != "A":
                raise NotAToolCall
            yield from expect("RGS]")
            after = yield from next_nonblank()
        if after != "{":
            raise NotAToolCall
        yield from self.arguments(name)


_NAME = re.compile(r"[\w.:/-]+")
_KIMI_ID = re.compile(r"(?:functions\.)?([\w.-]+?)(?::\d+)?")


class DeepSeekV3(ToolParser):
    """`<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>...
    <｜tool▁calls▁end｜>`, as V3.1 writes it; V3 and R1 have `function` in place of the name, which
    then stands in a line before a block of JSON."""

    markers = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    closers = ("<｜tool▁calls▁end｜>",)

    def read(self, marker: str) -> Characters[None]:
        if marker == self.markers[0]:
            yield from _next(self.markers[1])
        name = (yield from until("<｜tool▁sep｜>")).strip()
        if name == "function":
            name = (yield from until("\n")).strip()
            yield from _next("```json")
        if not _NAME.fullmatch(name) or (yield from next_nonblank()) != "{":
            raise NotAToolCall
        yield from self.arguments(name)
        yield from until("<｜tool▁call▁end｜>")


class KimiK2(ToolParser):
    """`<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>
    {...}<|tool_call_end|>...<|tool_calls_section_end|>`."""

    markers = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    closers = ("<|tool_calls_section_end|>",)

    def read(self, marker: str) -> Characters[None]:
        if marker == self.markers[0]:
            yield from _next(self.markers[1])
        written = (yield from until("<|tool_call_argument_begin|>")).strip()
        name = _KIMI_ID.fullmatch(written)
        if name is None or (yield from next_nonblank()) != "{":
            raise NotAToolCall
        yield from self.arguments(name[1])
        yield from until("<|tool_call_end|>")


def _next(text: str) -> Characters[None]:
    """Exactly this text, after white space."""
    if (yield from next_nonblank()) != text[0]:
        raise NotAToolCall
    yield from expect(text[1:])
