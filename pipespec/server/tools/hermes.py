"""Calls as Hermes and Qwen 2.5 and 3 write them."""

from __future__ import annotations

from pipespec.server.tools.grammar import Characters, Unlike, solid
from pipespec.server.tools.reader import Reader


class Hermes(Reader):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them."""

    markers = ("<tool_call>",)
    closers = ("</tool_call>",)

    def read(self, marker: str) -> Characters[None]:
        if (yield from solid()) != "{":
            raise Unlike
        yield from self.call()
