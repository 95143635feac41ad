"""Prompt lookup by n-grams, with which `benchmarks.repeating` compares the suffix automaton.

What followed the last one to `longest` tokens where they stood before in the same text (prompt
lookup decoding, Saxena 2023); probabilities are those of prediction by partial matching (Cleary and
Witten 1984, escape method C).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from pipespec.core import Verdict
from pipespec.head.source.protocol import Asked, Candidates, Context
from pipespec.head.tree import ROOT, Tree


class Occurrences:
    """What followed every run of 1 to `longest` tokens, and how often, in a growing text."""

    def __init__(self, longest: int):
        self.longest = longest
        self._after: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        self._length = 0

    def read(self, text: Sequence[int]) -> None:
        """Take in the tokens of `text` that were not there at the last call."""
        for end in range(self._length, len(text)):
            for start in range(max(0, end - self.longest), end):
                self._after[tuple(text[start:end])][text[end]] += 1
        self._length = len(text)

    def next(self, text: Sequence[int], count: int) -> list[tuple[int, float]]:
        """At most `count` (token, probability) that may follow `text`, the likeliest first.

        With n occurrences of an ending and d different continuations, one that was seen c times
        gets c / (n + d); the share d / (n + d) is left to what followed shorter endings.
        """
        found: list[tuple[int, float]] = []
        seen: set[int] = set()
        share = 1.0
        for length in range(min(self.longest, len(text)), 0, -1):
            after = self._after.get(tuple(text[len(text) - length :]), Counter())
            fresh = [(token, times) for token, times in after.items() if token not in seen]
            if not fresh:
                continue
            total = sum(times for _, times in fresh) + len(fresh)
            found += [(token, share * times / total) for token, times in fresh]
            if len(found) >= count:
                break
            seen.update(token for token, _ in fresh)
            share *= len(fresh) / total
        return sorted(found, key=lambda pair: -pair[1])[:count]


class NGramSource:
    """Looks a node's path up in the decided text of its sequence, prompt and output."""

    def __init__(self, longest: int = 4):
        self.longest = longest
        self._occurrences: dict[int, Occurrences] = {}

    def begin(self, context: Context) -> None:
        self._occurrences[context.sequence] = Occurrences(self.longest)

    def accept(self, verdict: Verdict) -> None:
        """The context holds the new tokens; they are read when next asked."""

    def end(self, sequence: int) -> None:
        del self._occurrences[sequence]

    def expand(self, asked: Sequence[Asked], children: int) -> list[Candidates | None]:
        return [self._of_one(each, children) for each in asked]

    def _of_one(self, asked: Asked, children: int) -> Candidates:
        occurrences = self._occurrences[asked.context.sequence]
        occurrences.read(asked.context.tokens)
        endings = (self._ending(asked.context, asked.tree, node) for node in asked.nodes.tolist())
        return Candidates.of(asked.nodes, [occurrences.next(text, children) for text in endings])

    def _ending(self, context: Context, tree: Tree, node: int) -> list[int]:
        """The last `longest` tokens of the text that ends with `node`."""
        path: list[int] = []
        while node != ROOT and len(path) < self.longest:
            path.append(int(tree.token[node]))
            node = int(tree.parent[node])
        decided = context.tokens[len(context.tokens) - (self.longest - len(path)) :]
        return ([] if len(path) == self.longest else decided) + path[::-1]
