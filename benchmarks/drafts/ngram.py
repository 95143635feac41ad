"""Prompt lookup by n-grams, beside which `benchmarks.drafts.repeating_texts` puts the automaton.

It proposes what followed earlier occurrences of the last one to `longest` tokens in the same text
(prompt lookup decoding, Saxena 2023); probabilities are those of prediction by partial matching
(Cleary and Witten 1984, escape method C).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from pipespec.core import Verdict
from pipespec.head.proposers.proposer import Context, Proposal, ProposalRequest
from pipespec.head.tree import ROOT, Tree


class Occurrences:
    """How often which token followed every run of 1 to `longest` tokens in a growing text."""

    def __init__(self, longest: int):
        self.longest = longest
        self._after: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        self._length = 0

    def read(self, text: Sequence[int]) -> None:
        """Count the tokens of `text` that are new since the last call."""
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


class NGramProposer:
    """Looks a node's path up in the decided text of its sequence, prompt and output."""

    def __init__(self, longest: int = 4):
        self.longest = longest
        self._occurrences: dict[int, Occurrences] = {}

    def start_sequence(self, context: Context) -> None:
        self._occurrences[context.sequence] = Occurrences(self.longest)

    def accept_verdict(self, verdict: Verdict) -> None:
        """The context holds the new tokens; they are read when next requests."""

    def end_sequence(self, sequence: int) -> None:
        del self._occurrences[sequence]

    def propose(self, requests: Sequence[ProposalRequest], children: int) -> list[Proposal | None]:
        return [self._propose_one(request, children) for request in requests]

    def _propose_one(self, request: ProposalRequest, children: int) -> Proposal:
        occurrences = self._occurrences[request.context.sequence]
        occurrences.read(request.context.tokens)
        endings = (
            self._ending(request.context, request.tree, node) for node in request.nodes.tolist()
        )
        return Proposal.from_lists(
            request.nodes, [occurrences.next(text, children) for text in endings]
        )

    def _ending(self, context: Context, tree: Tree, node: int) -> list[int]:
        """The last `longest` tokens of the text that ends with `node`."""
        path: list[int] = []
        while node != ROOT and len(path) < self.longest:
            path.append(int(tree.token[node]))
            node = int(tree.parent[node])
        decided = context.tokens[len(context.tokens) - (self.longest - len(path)) :]
        return ([] if len(path) == self.longest else decided) + path[::-1]
