"""Prompt lookup: what followed the last tokens where they stood before in the same text.

It needs no model and no GPU, and pays where the answer repeats the prompt or itself: code
that is edited, text that is summarised, tables. Probabilities are those of prediction by
partial matching (Cleary and Witten 1984, escape method C).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipespec.core import Verdict
from pipespec.head.feed.rounds import check_rounds
from pipespec.head.source.protocol import Asked, Candidates, Context, TokenSource
from pipespec.head.tree import ROOT, Tree
from pipespec.limits import check_whole

# Tokens of a match at most: what is remembered grows with the square of it.
MAX_MATCH = 256


@dataclass(frozen=True)
class NGram:
    """Settings: `rounds`, tree expansions per step at most; `longest`, tokens of a match;
    `foresight`, whether what will be drawn is ranked with the target's own noise."""

    rounds: int | str = 4
    longest: int = 4
    foresight: bool = True

    def __post_init__(self) -> None:
        check_rounds(self.rounds)
        check_whole("source.longest", self.longest, 1, MAX_MATCH)

    @property
    def needs_draft(self) -> bool:
        return False

    @property
    def synthetic(self) -> bool:
        return False

    def make(self, draft: TokenSource | None, vocabulary: int) -> TokenSource:
        return NGramSource(self.longest, foresight=self.foresight)


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

        The longest ending of `text` that stood somewhere before is asked first. With n
        occurrences and d different continuations, one that was seen c times gets c / (n + d);
        the share d / (n + d) is left to what followed shorter endings.
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

    def __init__(self, longest: int, *, foresight: bool = True):
        self.longest = longest
        self.foresight = foresight
        self._occurrences: dict[int, Occurrences] = {}

    def begin(self, context: Context) -> None:
        self._occurrences[context.sequence] = Occurrences(self.longest)

    def accept(self, verdict: Verdict) -> None:
        """The context holds the new tokens; they are read when next asked."""

    def end(self, sequence: int) -> None:
        del self._occurrences[sequence]

    def expand(self, asked: Sequence[Asked], children: int) -> list[Candidates | None]:
        return [self._of_one(each.context, each.tree, each.nodes, children) for each in asked]

    def _of_one(self, context: Context, tree: Tree, nodes: np.ndarray, children: int) -> Candidates:
        occurrences = self._occurrences[context.sequence]
        occurrences.read(context.tokens)
        endings = (self._ending(context, tree, node) for node in nodes.tolist())
        found = Candidates.of(nodes, [occurrences.next(text, children) for text in endings])
        if self.foresight and context.drawn:
            return self._foreseen(context, tree, found)
        return found

    def _foreseen(self, context: Context, tree: Tree, found: Candidates) -> Candidates:
        """The candidates as the target's own noise weighs them."""
        import torch  # whoever only reads settings can do without

        from pipespec.sampling.foresight import reweigh

        logps = reweigh(
            torch.from_numpy(found.logps),
            torch.from_numpy(found.tokens),
            (tree.position[found.parents] + 1).tolist(),
            context.sampling.seed,
        )
        return replace(found, logps=logps.numpy())

    def _ending(self, context: Context, tree: Tree, node: int) -> list[int]:
        """The last `longest` tokens of the text that ends with `node`."""
        path: list[int] = []
        while node != ROOT and len(path) < self.longest:
            path.append(int(tree.token[node]))
            node = int(tree.parent[node])
        decided = context.tokens[len(context.tokens) - (self.longest - len(path)) :]
        if len(path) == self.longest:
            decided = []
        return decided + path[::-1]
