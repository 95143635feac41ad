"""The texts in the KV cache of a draft model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipespec.core import Verdict
from pipespec.head.kept_states import KeptStates
from pipespec.head.proposer import Context

if TYPE_CHECKING:  # the runner imports models, which reading settings does not need
    from pipespec.engine.slice.runner import SliceRunner


class DraftTexts:
    """Starts and ends the sequences of a draft, and retains the KV of those that have ended until
    its slots are needed, least recently used first.

    The head chooses with whose text a new sequence starts; what is no longer retained here is
    computed again. With running states (`states`) texts are shared and retained up to one of them.
    """

    def __init__(self, runner: SliceRunner, max_retained: int, states: KeptStates | None):
        self._runner = runner
        self._max_retained = max_retained
        self.states = states
        self._known: dict[int, int] = {}  # tokens of each text when its sequence started
        self._retained: dict[int, None] = {}  # sequences, the most recently used last

    def start(self, context: Context) -> None:
        """Start a sequence with as much as there is of the text that it shares."""
        shared = min(context.shared_len, self._runner.length(context.parent))
        if context.parent in self._runner.memory.failed:
            shared = 0
        if self.states is not None:
            shared = self.states.longest(context.parent, shared)
            self.states.start(context.sequence, context.parent, shared)
        self._known[context.sequence] = known = len(context.tokens)
        tip = context.nodes[shared - 1] if shared else None
        self._runner.start_sequence(context.sequence, context.parent, shared, known, tip)
        self._retained.pop(context.parent, None)
        if context.parent in self._runner.cached:
            self._retained[context.parent] = None
        self._runner.apply([Verdict(context.sequence, 0, tuple(context.tokens))])

    def end(self, sequence: int) -> None:
        """End a sequence; its text is retained."""
        retains = self._max_retained and sequence not in self._runner.memory.failed
        kept = self._runner.length(sequence) if retains else 0
        if self._shorten(sequence, kept):
            self._retained[sequence] = None
        if len(self._retained) > self._max_retained:
            self._release_oldest()
        del self._known[sequence]

    def chunk(self, sequence: int, rows: np.ndarray) -> np.ndarray:
        """Of rows of decided text those to compute in one pass, which ends where a running state is
        to be kept."""
        if self.states is None:
            return rows
        start, known = self._runner.length(sequence), self._known[sequence]
        if not len(rows) or start >= known:
            return rows
        end = self.states.chunk_end(sequence, start, start + len(rows), known)
        for other in self.states.read(sequence, min(end, known), known):
            if other in self._retained and not self._shorten(other, self._runner.length(other)):
                del self._retained[other]
        return rows[: end - start]

    def take_unsent(self) -> tuple[tuple[int, int, int], ...]:
        """The running states to keep in the next pass, as `Batch.kept_states`."""
        return () if self.states is None else self.states.take_unsent()

    def make_room(self, rows: int) -> int:
        """Free so many slots, as far as retained sequences hold them; returns how many are free."""
        while self._runner.slots.num_free < rows and self._retained:
            self._release_oldest()
        return self._runner.slots.num_free

    def _shorten(self, sequence: int, keep: int) -> int:
        """Retain the first `keep` tokens of a sequence, or as many of them as others can share;
        returns how many."""
        if self.states is not None:
            keep = self.states.longest(sequence, keep)
            self.states.release(sequence, keep)
        self._runner.release(sequence, keep)
        return keep

    def _release_oldest(self) -> None:
        oldest = next(iter(self._retained))
        del self._retained[oldest]
        self._shorten(oldest, 0)
