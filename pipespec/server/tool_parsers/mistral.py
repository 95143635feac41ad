"""The tool calls of Mistral's models."""

from __future__ import annotations

from string import ascii_letters, digits

from pipespec.server.tool_parsers.abstract_tool_parser import ToolParser
from pipespec.server.tool_parsers.incremental_json import (
    BLANKS,
    Characters,
    NotAToolCall,
    expect,
    next_nonblank,
)

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
