"""A source that answers in a thread of its own, while the head goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from pipespec.clock import monotonic_ns
from pipespec.core import Verdict
from pipespec.emulation import wait_until
from pipespec.head.source.protocol import Asked, Candidates, Context, TokenSource


@dataclass(frozen=True, slots=True)
class Answered:
    """What a pass said, one answer for each part that was asked; `paced`: in its emulated time."""

    candidates: list[Candidates | None]
    paced: bool


class Beside:
    """Asks a source for one pass at a time and waits for nothing.

    The thread does in order what it is told: of sequences, of what was decided, of a pass. It has a
    text of each sequence of its own, which is as long as what it was told; so whoever asks must
    have told all that was decided, and must not change the trees that it hands over. What goes
    wrong in the thread is raised by the next `answer`.
    """

    def __init__(self, source: TokenSource, pass_ms: float = 0.0):
        """`pass_ms`: what a pass lasts at least, on an emulated machine."""
        self._source = source
        self._pass_ms = pass_ms
        self._thread = ThreadPoolExecutor(1, "mid-size model")
        self._doing: deque[Future[Any]] = deque()
        self._pass: Future[Answered] | None = None
        self._contexts: dict[int, Context] = {}
        self._texts: dict[int, Context] = {}  # the thread's own
        self._told: dict[int, int] = {}  # tokens of each text, once the thread has done all

    def begin(self, context: Context) -> None:
        """See `TokenSource`, as of `accept` and `end`."""
        number = context.sequence
        text = replace(context, tokens=[*context.tokens], nodes=[*context.nodes])
        self._contexts[number], self._texts[number] = context, text
        self._told[number] = len(text.tokens)
        self._do(self._source.begin, text)

    def accept(self, verdict: Verdict) -> None:
        context = self._contexts[verdict.sequence]
        first = self._told[verdict.sequence]
        self._told[verdict.sequence] = len(context.tokens)
        tokens, nodes = context.tokens[first:], context.nodes[first:]
        self._do(self._accept, self._texts[verdict.sequence], tokens, nodes, verdict)

    def end(self, sequence: int) -> None:
        del self._contexts[sequence], self._texts[sequence], self._told[sequence]
        self._do(self._source.end, sequence)

    def ask(self, asked: Sequence[Asked], children: int) -> None:
        """Begin a pass, after the answer to the last one."""
        assert self._pass is None, "a pass is under way"
        for each in asked:
            told = self._told[each.context.sequence]
            assert told == len(each.context.tokens), "the thread was not told what was decided"
        asked = [replace(each, context=self._texts[each.context.sequence]) for each in asked]
        self._pass = self._do(self._expand, asked, children)

    def answer(self) -> Answered | None:
        """What the pass said, once; None: it is under way, or there was none."""
        ended = self._pass if self._pass is not None and self._pass.done() else None
        # Looked at second: if the pass has ended, so has all before it.
        while self._doing and self._doing[0].done():
            self._doing.popleft().result()
        if ended is None:
            return None
        self._pass = None
        return ended.result()

    def close(self) -> None:
        """Wait for what is under way; the rest is not done."""
        self._thread.shutdown(cancel_futures=True)

    def _do(self, what: Callable[..., Any], *arguments: object) -> Future[Any]:
        self._doing.append(self._thread.submit(what, *arguments))
        return self._doing[-1]

    def _accept(
        self, text: Context, tokens: Sequence[int], nodes: Sequence[int], verdict: Verdict
    ) -> None:
        text.tokens += tokens
        text.nodes += nodes
        self._source.accept(verdict)

    def _expand(self, asked: Sequence[Asked], children: int) -> Answered:
        start = monotonic_ns()
        candidates = self._source.expand(asked, children)
        return Answered(candidates, wait_until(start, self._pass_ms))
