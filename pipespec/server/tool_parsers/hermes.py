"""The tool calls of Hermes, Qwen 2.5 and Qwen 3."""

from __future__ import annotations

from pipespec.server.tool_parsers.abstract_tool_parser import ToolParser
from pipespec.server.tool_parsers.incremental_json import Characters, NotAToolCall, next_nonblank


class Hermes(ToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them."""

    markers = ("<tool_call>",)
    closers = ("</tool_call>",)

    def read(self, marker: str) -> Characters[None]:
        if (yield from next_nonblank()) != "{":
            raise NotAToolCall
        yield from self.call()
