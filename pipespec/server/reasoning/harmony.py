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


def continues_message(prompt: str) -> bool:
    """Whether a prompt ends within the text of a message."""
    return MESSAGE in prompt and not _MARKER.search(prompt, prompt.rindex(MESSAGE) + len(MESSAGE))


class Harmony(Splitter):
    """`<|channel|>analysis<|message|>...<|end|>` and so on: the channel analysis is reasoning, what
    is for a function a call, all else text.

    With `calls` False a call is text, as no tool was offered. With `begun` the prompt ends within
    a message, which the answer continues.
    """

    def __init__(self, *, calls: bool, begun: bool = False):
        self._calls = calls
        self._num_calls = 0
        self._held = ""
        # Of the message that begins; None: its text has begun.
        self._header: str | None = None if begun else ""
        self._in_messages = begun
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
        return made + self._without_messages()

    def _text(self, text: str) -> list[SplitDelta]:
        if self._header is not None:
            self._header += text
            return []
        if not text:
            return []
        if self._kind == "call":
            return [CallDelta(self._num_calls - 1, arguments=text)]
        return [Thought(text) if self._kind == "reasoning" else text]

    def _without_messages(self) -> list[SplitDelta]:
        """The text of an answer that ends without ever having begun a message."""
        text, self._header = self._header, ""
        return [text] if text and not self._in_messages else []

    def _marker(self, marker: str) -> list[SplitDelta]:
        if marker in ENDS:
            made, self._in_messages = self._without_messages(), True
            return made
        self._in_messages = True
        if marker == START:
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
