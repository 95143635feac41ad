"""The prefix cache: which texts are in the KV cache of every stage, and which sequences hold them.

Requests with a common prefix share its KV slots. The text of a request that has ended or was
preempted is retained by the stages, which learn from the head how much of it
(`Batch.retained_prefixes`), until its slots are needed or too many texts are retained: then the
least recently used one is shortened, from its end. Slots are counted here as the stages will hold
them, each once however many sequences share it.

Texts of different salts (`Request.cache_salt`) have nothing in common, whatever their tokens.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pipespec.head.kept_states import KeptStates

# Shorter prefixes are not shared, waited for or retained; the size of a block of vLLM.
MIN_SHARED_TOKENS = 16
# At least 1/MIN_CUT of a text is freed at once, so that this does not happen in every step.
MIN_CUT = 8

_TOKEN = np.dtype(">u4")  # texts are ordered as their bytes are


class TextKey(NamedTuple):
    """A text as it is compared: its salt, and its tokens as bytes of the same order."""

    salt: str = ""
    tokens: bytes = b""


NO_TEXT = TextKey()


def text_key(tokens: Sequence[int], salt: str = "") -> TextKey:
    return TextKey(salt, np.array(tokens, _TOKEN).tobytes())


def num_tokens(key: TextKey) -> int:
    return len(key.tokens) // _TOKEN.itemsize


def first_tokens(key: TextKey, tokens: int) -> TextKey:
    return TextKey(key.salt, key.tokens[: tokens * _TOKEN.itemsize])


def num_common(one: TextKey, other: TextKey) -> int:
    """The length of the common prefix of two texts; 0 if their salts differ."""
    if one.salt != other.salt:
        return 0
    length = min(num_tokens(one), num_tokens(other))
    differ = np.frombuffer(one.tokens, _TOKEN, length) != np.frombuffer(
        other.tokens, _TOKEN, length
    )
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length


class PrefixIndex:
    """Sorted texts with the numbers of their sequences, to find common prefixes."""

    def __init__(self) -> None:
        self._ordered: list[tuple[TextKey, int]] = []

    def __len__(self) -> int:
        return len(self._ordered)

    def add(self, key: TextKey, number: int) -> None:
        insort(self._ordered, (key, number))

    def remove(self, key: TextKey, number: int) -> None:
        del self._ordered[bisect_left(self._ordered, (key, number))]

    def match_prefix(self, key: TextKey) -> Iterator[tuple[int, int, TextKey]]:
        """The sequences that share a prefix with a text: number, common tokens, text; the longest
        prefix first. In sorted order these are the neighbours of the text on both sides."""
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

    def _common(self, at: int, key: TextKey) -> int:
        return num_common(self._ordered[at][0], key) if 0 <= at < len(self._ordered) else 0


@dataclass(slots=True, eq=False)
class SlotRun:
    """KV slots of consecutive positions from `start` on, which the sequence `filler` has filled.

    Other sequences may hold the beginning of the run: `running` and `retained` are the positions up
    to which they do, by number. While the sequence that fills it is running, the slots count as its
    own (`SequenceStart.shared_len`).
    """

    start: int
    filler: int
    filling: bool = True
    running: dict[int, int] = field(default_factory=dict)
    retained: dict[int, int] = field(default_factory=dict)

    @property
    def pinned(self) -> int:
        """Slots that running sequences hold."""
        return max(self.running.values(), default=self.start) - self.start

    @property
    def held(self) -> int:
        """Slots that any sequence holds."""
        return max(self.pinned, max(self.retained.values(), default=self.start) - self.start)


class PrefixCache:
    """The texts of running and of retained sequences, and the slots that they share.

    Args:
        max_retained: sequences whose text may be retained; 0: nothing is shared.
        states: the running states that are kept of texts, if layers have some: then a prefix is
            shared only where there is one, and a text is retained up to the last one.

    `pinned` and `held` count the slots of runs that are no longer filled: those that running
    sequences hold, and those that any sequence holds. `queries` and `hits` count the tokens that
    were looked up for requests, and those of them that were found.
    """

    def __init__(self, max_retained: int, states: KeptStates | None = None):
        self.max_retained = max_retained
        self.states = states
        self.pinned = 0
        self.held = 0
        self.queries = 0
        self.hits = 0
        self.running_texts = PrefixIndex()  # as known when they started
        self.retained_texts = PrefixIndex()  # none is a prefix of another
        # Of retained texts by number, least recently used first.
        self._keys: dict[int, TextKey] = {}
        self._runs: dict[int, list[SlotRun]] = {}  # of each sequence, in the order of the positions
        self._known: dict[int, TextKey] = {}  # of running texts, as in `running_texts`
        self._unsent: dict[int, int] = {}  # retained tokens that the stages do not know of

    def start(self, number: int, key: TextKey, parent: int, shared: int) -> None:
        """A sequence starts and holds the first `shared` tokens of another."""
        if not self.max_retained:
            return
        self.running_texts.add(key, number)
        self._known[number] = key
        if self.states is not None:
            self.states.start(number, parent, shared)
        runs = self._hold(number, self._runs[parent] if shared else [], shared, retained=False)
        self._runs[number] = [*runs, SlotRun(shared, number)]
        if parent in self._keys:
            self._mark_used(parent)

    def shareable(self, number: int, common: int, read: int) -> int:
        """How many of the first `common` tokens of a sequence another one can share, if the
        sequence has read its first `read` tokens."""
        if self.states is None:
            return min(common, read)
        return self.states.longest(number, min(common, read))

    def wanted(self, number: int, common: int, read: int) -> int:
        """How many tokens a running sequence, which has read `read`, must have read before it is
        worth sharing `common` of them; 0: it never will be."""
        if self.states is None:
            return common - MIN_SHARED_TOKENS + 1  # less is not worth the wait
        known = num_tokens(self._known[number])
        place = self.states.next_due(number, read, common, known)
        return place and place + (place == known - 1)

    def chunk_end(self, number: int, start: int, end: int) -> int:
        """Where a chunk of a running sequence's text from `start` to `end` must end."""
        if self.states is None or not self.max_retained:
            return end
        return self.states.chunk_end(number, start, end, num_tokens(self._known[number]))

    def read(self, number: int, end: int) -> None:
        """The next batch reads the text of a running sequence up to `end`."""
        if self.states is None or not self.max_retained:
            return
        for other in self.states.read(number, end, num_tokens(self._known[number])):
            if other in self._keys:  # retained, of which less can be shared now
                self._shorten(other, num_tokens(self._keys[other]))

    def finish(self, number: int, known: TextKey, key: TextKey) -> None:
        """A running sequence leaves. `known` was its text when it started; its text `key` is in the
        KV cache of every stage, and is retained if it is long enough."""
        if not self.max_retained:
            return
        self.running_texts.remove(known, number)
        del self._known[number]
        runs = self._runs.pop(number)
        self._count(runs, -1)
        runs[-1].filling = False
        self._count(runs, +1)
        self._retain(number, runs, key)
        while len(self._keys) > self.max_retained:
            self._shorten(next(iter(self._keys)), 0)

    def drop(self, number: int) -> list[int]:
        """Retain nothing of the slots that a sequence has filled; returns the running sequences
        that hold some, itself included."""
        held = self._runs.items()
        holders = [each for each, runs in held if number in [run.filler for run in runs]]
        for each in holders:
            if each in self._keys:
                self._shorten(each, 0)
        return [each for each in holders if each in self._known]

    def free(self, slots: int) -> None:
        """Free so many slots of retained texts that no running sequence holds, or all of them."""
        least = self.held - slots
        while self.held > least and self._keys:
            number, key = next(iter(self._keys.items()))
            tokens = num_tokens(key)
            self._shorten(number, tokens - max(self.held - least, tokens // MIN_CUT))

    def newly_pinned(self, parent: int, shared: int) -> int:
        """Slots that no running sequence holds, and one that shared these tokens would."""
        found = 0
        for run, end in _run_ends(self._runs[parent] if shared else [], shared):
            if not run.filling:
                found += max(end - run.start - run.pinned, 0)
        return found

    def take_changes(self) -> tuple[tuple[int, int], ...]:
        """Sequences and their retained tokens, as far as they have changed since the last call."""
        changes = tuple(self._unsent.items())
        self._unsent.clear()
        return changes

    def _retain(self, number: int, runs: list[SlotRun], key: TextKey) -> None:
        """Retain a text unless it is a prefix of another; it replaces one that is its prefix. With
        running states it is cut at the last one, and one that has states at places where the other
        has none is of use beside it."""
        tokens = num_tokens(key)
        if self.states is not None:
            tokens = self.states.longest(number, tokens)
            key = first_tokens(key, tokens)
        other, common, text = next(self.retained_texts.match_prefix(key), (number, 0, NO_TEXT))
        if common == tokens and self._has_states_of(other, number, common):
            if common:
                self._mark_used(other)
            tokens = 0
        elif common == num_tokens(text) and common and self._has_states_of(number, other, common):
            self._shorten(other, 0)
        if tokens < MIN_SHARED_TOKENS:
            tokens = 0
        if self.states is not None:
            self.states.release(number, tokens)
        if runs := self._hold(number, runs, tokens, retained=True):
            self._runs[number] = runs
            self._keys[number] = key
            self.retained_texts.add(key, number)
            self._unsent[number] = tokens

    def _has_states_of(self, number: int, other: int, common: int) -> bool:
        """Whether states are kept of one text wherever they are of another, in the `common` tokens
        with which both begin."""
        if self.states is None:
            return True
        return self.states.places(other, common) <= self.states.places(number, common)

    def _shorten(self, number: int, tokens: int) -> None:
        key = self._keys[number]
        self.retained_texts.remove(key, number)
        runs = self._runs.pop(number)
        self._unsent[number] = 0
        self._retain(number, runs, first_tokens(key, max(tokens, 0)))
        if not self._unsent[number]:
            del self._keys[number]

    def _mark_used(self, number: int) -> None:
        self._keys[number] = self._keys.pop(number)
        if self.states is not None:
            self.states.mark_used(number)

    def _hold(
        self, number: int, runs: list[SlotRun], tokens: int, *, retained: bool
    ) -> list[SlotRun]:
        """Let a sequence hold the first `tokens` of the text in these runs, and no more; returns
        the runs of which it holds a slot."""
        self._count(runs, -1)
        for run in runs:
            run.running.pop(number, None)
            run.retained.pop(number, None)
        held = []
        for run, end in _run_ends(runs, tokens):
            (run.retained if retained else run.running)[number] = end
            held.append(run)
        self._count(runs, +1)
        return held

    def _count(self, runs: list[SlotRun], sign: int) -> None:
        for run in runs:
            if not run.filling:
                self.pinned += sign * run.pinned
                self.held += sign * run.held


def _run_ends(runs: list[SlotRun], tokens: int) -> Iterator[tuple[SlotRun, int]]:
    """The runs that hold the first tokens of a text, and up to which position."""
    ends = [*(run.start for run in runs[1:]), tokens]
    for run, end in zip(runs, ends, strict=False):
        if run.start < min(end, tokens):
            yield run, min(end, tokens)
