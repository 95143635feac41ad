"""The tool calls of Llama 3.1, 3.2 and 3.3."""

from __future__ import annotations

from pipespec.server.tool_parsers.abstract_tool_parser import ToolParser
from pipespec.server.tool_parsers.incremental_json import Characters, NotAToolCall, next_nonblank


class Llama3Json(ToolParser):
    """`{"name": ..., "parameters": {...}}`, several with `;` between them, each perhaps after
    `<|python_tag|>`."""

    markers = ("<|python_tag|>", "{")
    closers = (";",)

    def read(self, marker: str) -> Characters[None]:
        if marker != "{" and (yield from next_nonblank()) != "{":
            raise NotAToolCall
        yield from self.call()
