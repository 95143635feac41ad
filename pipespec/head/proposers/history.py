"""What a suffix proposer knows besides the text of a request, and how accurate its matches are."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path

from pipespec.head.proposer import Encode
from pipespec.head.proposers.suffix_automaton import FollowCounts, SuffixAutomaton
from pipespec.system.validation import Unreadable, read_text


def read_corpus(folder: str | None, max_tokens: int, encode: Encode) -> SuffixAutomaton | None:
    """The text files in a folder and below it, in the order of their names, up to `max_tokens`
    tokens; files that are not UTF-8 text are skipped. None: no folder."""
    if folder is None:
        return None
    corpus = SuffixAutomaton()
    for file in sorted(each for each in Path(folder).rglob("*") if each.is_file()):
        left = max_tokens - corpus.length
        if left <= 0:
            break
        try:
            text = read_text(file)
        except Unreadable:
            continue
        corpus.start_text()
        corpus.extend(encode(text)[:left])
    return corpus


# Which text a match is in, the bucket of its length, and how varied its followers are.
Kind = tuple[int, int, int]


class MatchAccuracy:
    """How often the next token was among those that had followed a match before, by the kind of the
    match (escape estimation as in PPMZ, Bloom 1998)."""

    # The weight of the prior, in tokens; it is higher for longer matches.
    PRIOR = 3.0
    # The share of a count that is held when its kind is observed again.
    MEMORY = 0.99

    def __init__(self) -> None:
        self._counts: dict[Kind, tuple[float, float]] = {}  # hits, tokens

    def __len__(self) -> int:
        return len(self._counts)

    @staticmethod
    def kind(origin: int, length: int, counts: FollowCounts) -> Kind:
        """`origin`: the text of the match. There are 12 buckets of lengths and 3 of followers."""
        total, distinct, _ = counts
        several = 2 if distinct > 1 else int(total > 1)
        return origin, length if length < 8 else min(4 + length.bit_length(), 12), several

    def probability(self, kind: Kind) -> float:
        hits, tokens = self._counts.get(kind, (0.0, 0.0))
        origin, length, several = kind
        share = 1 - (0.5 if several == 2 or origin else 0.35) / math.sqrt(length)
        return (hits + self.PRIOR * share) / (tokens + self.PRIOR)

    def observe(self, kind: Kind, *, hit: bool) -> None:
        hits, tokens = self._counts.get(kind, (0.0, 0.0))
        self._counts[kind] = self.MEMORY * hits + hit, self.MEMORY * tokens + 1


class AnswerHistory:
    """Past answers, at most `capacity` tokens of them, in two halves: when the newer half is full,
    it becomes the older one, and the older one is dropped."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.num_rotations = 0  # how often a half was dropped
        self.older, self.newer = SuffixAutomaton(), SuffixAutomaton()
        self._waiting: deque[list[int]] = deque()
        self._read = 0  # tokens read of the first that waits

    @property
    def length(self) -> int:
        return self.older.length + self.newer.length

    def add(self, answer: list[int]) -> None:
        """Queue an answer, which `read` adds little by little."""
        if self.capacity and answer:
            self._waiting.append(answer[-max(self.capacity // 2, 1) :])
            while sum(map(len, self._waiting)) > self.capacity:
                self._waiting.popleft()
                self._read = 0

    def read(self, count: int) -> None:
        """Read so many tokens of the queued answers."""
        while count > 0 and self._waiting:
            answer = self._waiting[0]
            if not self._read:
                if self.newer.length + len(answer) > max(self.capacity // 2, 1):
                    self.older, self.newer = self.newer, SuffixAutomaton()
                    self.num_rotations += 1
                self.newer.start_text()
            piece = answer[self._read : self._read + count]
            self.newer.extend(piece)
            self._read += len(piece)
            count -= len(piece)
            if self._read == len(answer):
                self._waiting.popleft()
                self._read = 0
