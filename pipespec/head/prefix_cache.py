"""Which text is in the KV of every stage, and whose it is: requests that begin alike share it.

The text of a request that has ended or was put back stays at the stages, who are told how much of
it (`Batch.kept`), until its slots are needed or too many such texts are kept: then who was used
least recently is cut from its end on. Slots are counted here as the stages will hold them, each
once however many share it, so nobody is asked.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

# Shorter text is not shared, waited for or kept: vLLM's blocks have so many tokens.
WORTH = 16
# One of so many tokens of a text is cut off at least, so that this is not done in every step.
CUT = 8

_TOKEN = np.dtype(">u4")  # texts are ordered as their bytes are


def as_key(tokens: Sequence[int]) -> bytes:
    """Tokens as bytes that are in order as the tokens are."""
    return np.array(tokens, _TOKEN).tobytes()


def num_tokens(key: bytes) -> int:
    """Of how many tokens it was made."""
    return len(key) // _TOKEN.itemsize


def first_tokens(key: bytes, tokens: int) -> bytes:
    """The key of the first tokens alone."""
    return key[: tokens * _TOKEN.itemsize]


def num_common(one: bytes, other: bytes) -> int:
    """How many tokens two texts begin with alike."""
    length = min(num_tokens(one), num_tokens(other))
    differ = np.frombuffer(one, _TOKEN, length) != np.frombuffer(other, _TOKEN, length)
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length


class Texts:
    """Texts in order, by the numbers of their sequences, to find those that begin alike."""

    def __init__(self) -> None:
        self._ordered: list[tuple[bytes, int]] = []

    def __len__(self) -> int:
        return len(self._ordered)

    def add(self, key: bytes, number: int) -> None:
        insort(self._ordered, (key, number))

    def remove(self, key: bytes, number: int) -> None:
        del self._ordered[bisect_left(self._ordered, (key, number))]

    def alike(self, key: bytes) -> Iterator[tuple[int, int, bytes]]:
        """Who begins with the first token of a text: number, common tokens, text; who has most in
        common comes first. In order, that falls from the text's own place on, to both sides."""
        right = bisect_left(self._ordered, (key,))
        left = right - 1
        before, after = self._common(left, key), self._common(right, key)
        while before or after:
            if before >= after:
                text, number = self._ordered[left]
                yield number, before, text
                left -= 1
                before = self._common(left, key)
            else:
                text, number = self._ordered[right]
                yield number, after, text
                right += 1
                after = self._common(right, key)

    def _common(self, at: int, key: bytes) -> int:
        return num_common(self._ordered[at][0], key) if 0 <= at < len(self._ordered) else 0


@dataclass(slots=True, eq=False)
class Run:
    """KV slots of consecutive positions from `start` on, which one sequence has filled.

    Whoever else holds any of them holds a beginning of the run: up to which position, is in
    `open` and `retained`, by number. While the sequence that fills it is open, the slots are
    counted with it (`Opening.shared`).
    """

    start: int
    filling: bool = True
    open: dict[int, int] = field(default_factory=dict)
    retained: dict[int, int] = field(default_factory=dict)

    @property
    def pinned(self) -> int:
        """Slots that open sequences hold."""
        return max(self.open.values(), default=self.start) - self.start

    @property
    def held(self) -> int:
        """Slots that anybody holds."""
        return max(self.pinned, max(self.retained.values(), default=self.start) - self.start)


class PrefixCache:
    """The texts of open and of retained sequences, and the slots that they share.

    Args:
        most: sequences whose text may be retained; 0: nothing is shared at all.

    `pinned` and `held` count the slots in runs that nobody fills any more: those that open
    sequences hold, and those that anybody does. `queries` and `hits` are the tokens that were
    looked up for requests, and those of them that were found.
    """

    def __init__(self, most: int):
        self.most = most
        self.pinned = 0
        self.held = 0
        self.queries = 0
        self.hits = 0
        self.open_texts = Texts()  # as known when they were opened
        self.texts = Texts()  # retained; none begins with another whole one
        self._keys: dict[int, bytes] = {}  # the same by number, who was used last stands last
        self._runs: dict[int, list[Run]] = {}  # of each sequence, in the order of the positions
        self._untold: dict[int, int] = {}  # what the stages do not know of what stays

    def open(self, number: int, key: bytes, parent: int, shared: int) -> None:
        """A sequence is opened and holds the first `shared` tokens of another."""
        if not self.most:
            return
        self.open_texts.add(key, number)
        runs = self._hold(number, self._runs[parent] if shared else [], shared, retained=False)
        self._runs[number] = [*runs, Run(shared)]
        if parent in self._keys:
            self._use(parent)

    def leave(self, number: int, known: bytes, key: bytes) -> None:
        """An open sequence leaves, of which `known` was known when it was opened; the text `key`
        of it is in the KV of every stage, and stays if it is worth it."""
        if not self.most:
            return
        self.open_texts.remove(known, number)
        runs = self._runs.pop(number)
        self._count(runs, -1)
        runs[-1].filling = False
        self._count(runs, +1)
        self._retain(number, runs, key)
        while len(self._keys) > self.most:
            self._cut(next(iter(self._keys)), 0)

    def free(self, slots: int) -> None:
        """Free so many slots of retained text that no open sequence holds, or all of them."""
        least = self.held - slots
        while self.held > least and self._keys:
            number, key = next(iter(self._keys.items()))
            tokens = num_tokens(key)
            self._cut(number, tokens - max(self.held - least, tokens // CUT))

    def newly_pinned(self, parent: int, shared: int) -> int:
        """Slots which nobody who is open holds, but would if one began with these tokens."""
        found = 0
        for run, end in _ends(self._runs[parent] if shared else [], shared):
            if not run.filling:
                found += max(end - run.start - run.pinned, 0)
        return found

    def tell(self) -> tuple[tuple[int, int], ...]:
        """How much text stays of whom, as far as the stages do not know; they are told."""
        told = tuple(self._untold.items())
        self._untold.clear()
        return told

    def _retain(self, number: int, runs: list[Run], key: bytes) -> None:
        """Keep a text unless another begins with it; it replaces one that it begins with."""
        tokens = num_tokens(key)
        other, common, text = next(self.texts.alike(key), (number, 0, b""))
        if common == tokens:
            if common:
                self._use(other)
            tokens = 0
        elif common == num_tokens(text) and common:
            self._cut(other, 0)
        if tokens < WORTH:
            tokens = 0
        if runs := self._hold(number, runs, tokens, retained=True):
            self._runs[number] = runs
            self._keys[number] = key
            self.texts.add(key, number)
            self._untold[number] = tokens

    def _cut(self, number: int, tokens: int) -> None:
        """Of a retained text so many tokens stay."""
        key = self._keys[number]
        self.texts.remove(key, number)
        runs = self._runs.pop(number)
        self._untold[number] = 0
        self._retain(number, runs, first_tokens(key, max(tokens, 0)))
        if not self._untold[number]:
            del self._keys[number]

    def _use(self, number: int) -> None:
        self._keys[number] = self._keys.pop(number)

    def _hold(self, number: int, runs: list[Run], tokens: int, *, retained: bool) -> list[Run]:
        """A sequence holds so many tokens of the text in these runs, and no more; the runs that
        it holds any slot of."""
        self._count(runs, -1)
        for run in runs:
            run.open.pop(number, None)
            run.retained.pop(number, None)
        held = []
        for run, end in _ends(runs, tokens):
            (run.retained if retained else run.open)[number] = end
            held.append(run)
        self._count(runs, +1)
        return held

    def _count(self, runs: list[Run], sign: int) -> None:
        for run in runs:
            if not run.filling:
                self.pinned += sign * run.pinned
                self.held += sign * run.held


def _ends(runs: list[Run], tokens: int) -> Iterator[tuple[Run, int]]:
    """Which runs the first tokens of a text are in, and up to which position."""
    ends = [*(run.start for run in runs[1:]), tokens]
    for run, end in zip(runs, ends, strict=False):
        if run.start < min(end, tokens):
            yield run, min(end, tokens)
