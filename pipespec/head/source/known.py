"""What a suffix source knows beside the text of a request, and how far it trusts what it finds."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path

from pipespec.head.source.automaton import Seen, SuffixAutomaton
from pipespec.head.source.protocol import Encode
from pipespec.system.reading import Unreadable, read_text


def read_corpus(folder: str | None, most: int, encode: Encode) -> SuffixAutomaton | None:
    """The text files of a folder and below it, in the order of their names, up to so many tokens;
    what is no UTF-8 text is passed over. None: no folder."""
    if folder is None:
        return None
    corpus = SuffixAutomaton()
    for file in sorted(each for each in Path(folder).rglob("*") if each.is_file()):
        left = most - corpus.length
        if left <= 0:
            break
        try:
            text = read_text(file)
        except Unreadable:
            continue
        corpus.begin()
        corpus.read(encode(text)[:left])
    return corpus


# Which text, how long a run, what came after it.
Kind = tuple[int, int, int]


class Trust:
    """How often the token that came was among those that had followed a run before, by where the
    run stood, its length and what followed it (escape estimation as in PPMZ, Bloom 1998)."""

    # As if so many tokens had come; of those after longer runs more are taken to be among them.
    PRIOR = 3.0
    # The share of what was observed that is held after one more token of the same kind.
    MEMORY = 0.99

    def __init__(self) -> None:
        self._seen: dict[Kind, tuple[float, float]] = {}  # hits, tokens

    def __len__(self) -> int:
        return len(self._seen)

    @staticmethod
    def kind(origin: int, length: int, seen: Seen) -> Kind:
        """`origin`: which text; 12 lengths and 3 kinds of what followed are told apart."""
        total, distinct, _ = seen
        several = 2 if distinct > 1 else int(total > 1)
        return origin, length if length < 8 else min(4 + length.bit_length(), 12), several

    def of(self, kind: Kind) -> float:
        hits, tokens = self._seen.get(kind, (0.0, 0.0))
        origin, length, several = kind
        share = 1 - (0.5 if several == 2 or origin else 0.35) / math.sqrt(length)
        return (hits + self.PRIOR * share) / (tokens + self.PRIOR)

    def learn(self, kind: Kind, *, hit: bool) -> None:
        hits, tokens = self._seen.get(kind, (0.0, 0.0))
        self._seen[kind] = self.MEMORY * hits + hit, self.MEMORY * tokens + 1


class Past:
    """Answers that are over, `most` tokens of them at most, in two halves: when the newer is full
    it becomes the older, and what nobody has said again since is forgotten."""

    def __init__(self, most: int):
        self.most = most
        self.turns = 0  # how often a half was forgotten
        self.older, self.newer = SuffixAutomaton(), SuffixAutomaton()
        self._waiting: deque[list[int]] = deque()
        self._read = 0  # of the first that waits

    @property
    def length(self) -> int:
        return self.older.length + self.newer.length

    def add(self, answer: list[int]) -> None:
        """An answer is over; it is read little by little."""
        if self.most and answer:
            self._waiting.append(answer[-(self.most // 2) :] if self.most > 1 else answer[-1:])
            while sum(map(len, self._waiting)) > self.most:
                self._waiting.popleft()
                self._read = 0

    def read(self, count: int) -> None:
        """Read so many tokens of what waits."""
        while count > 0 and self._waiting:
            answer = self._waiting[0]
            if not self._read:
                if self.newer.length + len(answer) > max(self.most // 2, 1):
                    self.older, self.newer = self.newer, SuffixAutomaton()
                    self.turns += 1
                self.newer.begin()
            piece = answer[self._read : self._read + count]
            self.newer.read(piece)
            self._read += len(piece)
            count -= len(piece)
            if self._read == len(answer):
                self._waiting.popleft()
                self._read = 0
