"""Which running states the stages keep, for sequences that begin like others.

Layers with a running state (linear attention, Mamba) can go on from a prefix only where their
state behind it is kept: behind every `interval` tokens, where the chunks of a prompt end, and
before the last token that is known. There are `budget` states, which the head numbers: the one that
is given a used number replaces that one, at every stage with the same batch.

The least recently used state is replaced. Whoever uses a state might have used those of its text
behind fewer tokens, so these count as used later: of a text the longest prefix goes first. One text
takes half of the budget at most. Where it would have more states, every second one of them is given
up, and those that follow are twice as far apart.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class KeptState:
    """A state behind the first `tokens` tokens of all its `owners`: sequences, running or retained,
    that begin alike."""

    number: int
    tokens: int
    owners: set[int]


class KeptStates:
    """The states of all sequences.

    Args:
        budget: how many there are; 0: nothing can be shared.
        interval: tokens of a text behind which one is kept; 0: before the last one alone.
    """

    def __init__(self, budget: int, interval: int):
        self.budget = budget
        self.interval = interval
        self._free = list(range(budget - 1, -1, -1))
        self._used: dict[KeptState, None] = {}  # the least recently used one first
        self._of: dict[int, dict[int, KeptState]] = {}  # by sequence and tokens
        self._intervals: dict[int, int] = {}  # of sequences with one of their own
        self._unsent: dict[int, tuple[int, int]] = {}  # sequence and tokens by number

    def __len__(self) -> int:
        return len(self._used)

    def start(self, sequence: int, parent: int, shared: int) -> None:
        """A sequence starts with the first `shared` tokens of another."""
        mine = {at: each for at, each in self._of.get(parent, {}).items() if at <= shared}
        for state in mine.values():
            state.owners.add(sequence)
        self._of[sequence] = mine
        self.mark_used(sequence)

    def chunk_end(self, sequence: int, start: int, end: int, known: int) -> int:
        """Where a chunk of a text of which `known` tokens are known ends, so that it ends at every
        state."""
        interval = self._interval_of(sequence)
        if not interval or not self.budget:
            return end
        boundary = (start // interval + 1) * interval
        return min(end, boundary) if boundary < known else end

    def read(self, sequence: int, end: int, known: int) -> Collection[int]:
        """The next batch reads a text up to `end`, of which `known` tokens are known: keep a state
        if one is due. Returns the sequences that lose one."""
        tokens, lost = end, set[int]()
        if not self.budget:
            return lost
        if end == known:
            tokens = known - 1
        elif not self._is_due(sequence, end):
            return lost
        elif len(own := self._own(sequence)) >= max(self.budget // 2, 1):
            interval = self._intervals[sequence] = 2 * self._interval_of(sequence)
            for state in own:
                if state.tokens % interval:
                    lost |= self._drop(state)
            if not self._is_due(sequence, end):
                return lost
        if tokens > 0 and tokens not in self._of[sequence]:
            if not self._free:
                lost |= self._drop(next(iter(self._used)))
            state = KeptState(self._free.pop(), tokens, {sequence})
            self._of[sequence][tokens] = state
            self._unsent[state.number] = sequence, tokens
        self.mark_used(sequence)
        return lost

    def longest(self, sequence: int, most: int) -> int:
        """Behind how many of the first `most` tokens of a sequence a state is kept; 0: none."""
        return max(self.places(sequence, most), default=0)

    def next_due(self, sequence: int, start: int, most: int, known: int) -> int:
        """The last place among the first `most` tokens where one will be kept of a text that was
        read up to `start`; 0: there is none."""
        interval = self._interval_of(sequence)
        place = most // interval * interval if interval else 0
        if start < known <= most + 1:
            place = known - 1
        return place if place > start or place == known - 1 else 0

    def places(self, sequence: int, most: int) -> set[int]:
        """The places among the first `most` tokens of a sequence behind which one is kept."""
        return {at for at in self._of.get(sequence, ()) if at <= most}

    def release(self, sequence: int, keep: int = 0) -> None:
        """A sequence holds its first `keep` tokens alone from now on; 0: none."""
        mine = self._of.get(sequence, {})
        for at in [at for at in mine if at > keep]:
            state = mine.pop(at)
            state.owners.remove(sequence)
            if not state.owners:
                self._forget(state)
        self._intervals.pop(sequence, None)
        if not keep:
            self._of.pop(sequence, None)

    def mark_used(self, sequence: int) -> None:
        """The states of a sequence are used, those behind fewer tokens after the others."""
        mine = self._of.get(sequence, {})
        for at in sorted(mine, reverse=True):
            self._used.pop(mine[at], None)
            self._used[mine[at]] = None

    def take_unsent(self) -> tuple[tuple[int, int, int], ...]:
        """What the stages keep with the next batch: sequence, tokens and number."""
        found = tuple((*of, number) for number, of in self._unsent.items())
        self._unsent.clear()
        return found

    def _interval_of(self, sequence: int) -> int:
        return self._intervals.get(sequence, self.interval)

    def _is_due(self, sequence: int, end: int) -> bool:
        interval = self._interval_of(sequence)
        return bool(interval) and end % interval == 0

    def _own(self, sequence: int) -> list[KeptState]:
        """Those that no other sequence started with."""
        return [each for each in self._of[sequence].values() if each.owners == {sequence}]

    def _drop(self, state: KeptState) -> set[int]:
        """Give up a state; returns whose it was."""
        for owner in state.owners:
            del self._of[owner][state.tokens]
        self._forget(state)
        return state.owners

    def _forget(self, state: KeptState) -> None:
        self._used.pop(state)
        self._unsent.pop(state.number, None)
        self._free.append(state.number)
