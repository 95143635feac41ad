"""What all splitters share: an answer's text is divided into thoughts, text and calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from pipespec.server.tool_parsers.abstract_tool_parser import ParsedDelta


@dataclass(frozen=True)
class Thought:
    """Text of the reasoning before an answer."""

    text: str


# What is new in an answer.
SplitDelta = ParsedDelta | Thought


class Splitter(ABC):
    """Splits one answer as it arrives, and never takes back what it has returned."""

    @abstractmethod
    def push(self, text: str) -> list[SplitDelta]:
        """Split the next part of the text; what is certain now."""

    @abstractmethod
    def finish(self) -> list[SplitDelta]:
        """End the text; what was held back."""


def held_back(text: str, markers: Sequence[str]) -> int:
    """The length of the longest end of a text that may begin one of the markers."""
    longest = max(map(len, markers)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
