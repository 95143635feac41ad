"""Calls as Llama 3.1, 3.2 and 3.3 write them."""

from __future__ import annotations

from pipespec.server.tools.grammar import Characters, Unlike, solid
from pipespec.server.tools.reader import Reader


class Llama3Json(Reader):
    """`{"name": ..., "parameters": {...}}`, several with `;` between them, each perhaps after
    `<|python_tag|>`."""

    markers = ("<|python_tag|>", "{")
    closers = (";",)

    def read(self, marker: str) -> Characters[None]:
        if marker != "{" and (yield from solid()) != "{":
            raise Unlike
        yield from self.call()
