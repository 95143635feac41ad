"""A source in a thread of its own: it is waited for by nobody, and sees what it was told alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Event

import numpy as np
import pytest

from pipespec.core import Verdict
from pipespec.head.source.beside import Answered, Beside
from pipespec.head.source.protocol import Asked, Candidates, Context
from pipespec.head.tree import ROOT, Tree


class Slow:
    """A source whose passes end when they are let; it notes what it hears, and in which order."""

    def __init__(self) -> None:
        self.may = Event()
        self.heard: list[tuple[str, list[int]]] = []
        self._contexts: dict[int, Context] = {}

    def begin(self, context: Context) -> None:
        self._contexts[context.sequence] = context
        self.heard.append(("begin", [*context.tokens]))

    def accept(self, verdict: Verdict) -> None:
        if not verdict.tokens:
            raise ValueError("it decided nothing")
        self.heard.append(("accept", [*self._contexts[verdict.sequence].tokens]))

    def end(self, sequence: int) -> None:
        self.heard.append(("end", [sequence]))

    def expand(self, asked: Sequence[Asked], children: int) -> list[Candidates | None]:
        assert self.may.wait(60)
        self.heard.append(("expand", [*asked[0].context.tokens]))
        nodes = asked[0].nodes
        return [Candidates.of(nodes, [[(children, 0.5)]] * len(nodes))]


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def beside(slow: Slow) -> Iterator[Beside]:
    beside = Beside(slow)
    yield beside
    slow.may.set()
    beside.close()


def asked(context: Context) -> list[Asked]:
    root = len(context.tokens) - 1
    return [Asked(context, Tree(root, root - 1, context.tokens[-1], root, fed=True), np.array([0]))]


def decide(beside: Beside, context: Context, token: int) -> None:
    """As the head does: it moves its own text on, and tells that later."""
    context.tokens.append(token)
    context.nodes.append(len(context.nodes))
    beside.accept(Verdict(context.sequence, len(context.tokens) - 1, (token,)))


def answered(beside: Beside) -> Answered:
    while (found := beside.answer()) is None:
        pass
    return found


def test_the_head_goes_on_while_a_pass_is_under_way(slow: Slow, beside: Beside):
    context = Context(3, [7, 8], [0, 1])
    beside.begin(context)
    beside.ask(asked(context), 5)
    assert beside.answer() is None
    decide(beside, context, 9)
    context.tokens.append(10)  # decided, and not told yet
    beside.end(3)
    slow.may.set()
    found = answered(beside)
    (candidates,) = found.candidates
    assert candidates is not None and candidates.parents.tolist() == [ROOT]
    assert candidates.tokens.tolist() == [[5]] and found.paced
    assert beside.answer() is None, "an answer is told once"
    while len(slow.heard) < 4:
        beside.answer()
    assert slow.heard == [
        ("begin", [7, 8]),
        ("expand", [7, 8]),
        ("accept", [7, 8, 9]),
        ("end", [3]),
    ]


def test_what_fails_in_the_thread_ends_the_head(slow: Slow, beside: Beside):
    context = Context(0, [1], [0])
    beside.begin(context)
    beside.accept(Verdict(0, 1, ()))
    beside.ask(asked(context), 1)
    slow.may.set()
    with pytest.raises(ValueError, match="it decided nothing"):
        answered(beside)


def test_nobody_asks_before_all_was_told(beside: Beside):
    context = Context(0, [1], [0])
    beside.begin(context)
    context.tokens.append(2)
    with pytest.raises(AssertionError, match="was not told"):
        beside.ask(asked(context), 1)


def test_a_pass_that_outlasts_its_emulated_time_says_so(slow: Slow):
    slow.may.set()
    beside = Beside(slow, pass_ms=1e-6)
    context = Context(0, [1], [0])
    beside.begin(context)
    beside.ask(asked(context), 1)
    assert not answered(beside).paced
    beside.close()
