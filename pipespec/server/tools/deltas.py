"""What is read out of a model's text: text of the message, and calls of tools as they grow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class CallDelta:
    """What is new of the call `index` of a message: at first its `name`, then text of its
    arguments."""

    index: int
    name: str | None = None
    arguments: str = ""


# Text of the message, or what is new of a call.
Delta = str | CallDelta


class ToolParser(Protocol):
    """Reads one answer. What it has told is never taken back, wherever the pieces' borders lie."""

    def feed(self, text: str) -> list[Delta]:
        """What the next piece of the text makes certain."""
        ...

    def finish(self) -> list[Delta]:
        """What was held back, at the end of the text."""
        ...


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """The same with neighbours of one kind joined. The name of a call stands alone, as in
    OpenAI's streams."""
    joined: list[Delta] = []
    for delta in deltas:
        last = joined[-1] if joined else None
        if isinstance(delta, str) and isinstance(last, str):
            joined[-1] = last + delta
        elif (
            isinstance(delta, CallDelta)
            and isinstance(last, CallDelta)
            and delta.name is None is last.name
        ):
            assert delta.index == last.index, "a call that follows another has a name"
            joined[-1] = CallDelta(last.index, arguments=last.arguments + delta.arguments)
        else:
            joined.append(delta)
    return joined
