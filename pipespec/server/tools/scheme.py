"""Calls of a model that must call: the form that it is held to."""

from __future__ import annotations

from pipespec.server.tools.grammar import Characters
from pipespec.server.tools.reader import Reader


class Scheme(Reader):
    """`[{"name": ..., "arguments": {...}}, ...]`, and nothing else."""

    markers = ("[",)

    def read(self, marker: str) -> Characters[None]:
        yield from self.listed()
