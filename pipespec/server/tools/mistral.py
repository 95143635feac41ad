"""Calls as the models of Mistral write them."""

from __future__ import annotations

from string import ascii_letters, digits

from pipespec.server.tools.grammar import BLANKS, Characters, Unlike, expect, solid
from pipespec.server.tools.reader import Reader

OF_NAMES = ascii_letters + digits + "_-./:"


class Mistral(Reader):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or, as newer ones do, for each call
    `[TOOL_CALLS]name[ARGS]{...}`, of which `[ARGS]` may be missing, and `[CALL_ID]...` may stand
    before it."""

    markers = ("[TOOL_CALLS]",)

    def read(self, marker: str) -> Characters[None]:
        first = yield from solid()
        if first == "[":
            yield from self.listed()
        elif first == "{":
            yield from self.call()
        else:
            yield from self._named(first)

    def _named(self, first: str) -> Characters[None]:
        name = ""
        after = first
        while after in OF_NAMES:
            name += after
            after = yield
        if after in BLANKS:
            after = yield from solid()
        if after == "[":
            after = yield
            if after == "C":
                yield from expect("ALL_ID]")
                while (yield) != "[":
                    pass
                after = yield
            if after != "A":
                raise Unlike
            yield from expect("RGS]")
            after = yield from solid()
        if after != "{":
            raise Unlike
        yield from self.arguments(name)
