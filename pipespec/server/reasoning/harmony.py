"""gpt-oss's messages in channels ("harmony"): reasoning, calls and the answer."""

from __future__ import annotations

import re

from pipespec.server.reasoning.abstract_splitter import SplitDelta, Splitter, Thought, held_back
from pipespec.server.tool_parsers.abstract_tool_parser import CallDelta

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
SPECIAL = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
_MARKER = re.compile("|".join(map(re.escape, SPECIAL)))
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"\bto=functions\.([\w-]+)")


class Harmony(Splitter):
    """`<|channel|>analysis<|message|>...<|end|>` and so on: the channel analysis is reasoning, what
    is for a function a call, all else text.

    With `calls` False a call is text, as no tool was offered.
    """

    def __init__(self, *, calls: bool):
        self._calls = calls
        self._num_calls = 0
        self._held = ""
        self._header: str | None = ""  # of the message that begins; None: its text has begun
        self._kind = "text"

    def push(self, text: str) -> list[SplitDelta]:
        self._held += text
        made: list[SplitDelta] = []
        while found := _MARKER.search(self._held):
            made += self._text(self._held[: found.start()])
            self._held = self._held[found.end() :]
            made += self._marker(found[0])
        certain = len(self._held) - held_back(self._held, SPECIAL)
        made += self._text(self._held[:certain])
        self._held = self._held[certain:]
        return made

    def finish(self) -> list[SplitDelta]:
        made = self._text(self._held)
        self._held = ""
        if self._header and CHANNEL not in self._header:  # it wrote no messages at all
            made.append(self._header)
        return made

    def _text(self, text: str) -> list[SplitDelta]:
        if self._header is not None:
            self._header += text
            return []
        if not text:
            return []
        if self._kind == "call":
            return [CallDelta(self._num_calls - 1, arguments=text)]
        return [Thought(text) if self._kind == "reasoning" else text]

    def _marker(self, marker: str) -> list[SplitDelta]:
        if marker in ENDS or marker == START:
            self._header = ""
            return []
        if marker != MESSAGE or self._header is None:
            self._header = (self._header or "") + marker
            return []
        channel, function = _CHANNEL.search(self._header), _FUNCTION.search(self._header)
        self._header = None
        self._kind = "reasoning" if channel and channel[1] == "analysis" else "text"
        if function is None or not self._calls:
            return []
        self._kind = "call"
        self._num_calls += 1
        return [CallDelta(self._num_calls - 1, function[1])]
