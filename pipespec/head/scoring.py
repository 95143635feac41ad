"""The scores of a cascade: which nodes the mid-size model scores, and whether its scores are used.

A small draft expands the tree; the mid-size model scores its most probable nodes of all depths in
one pass. A pass takes several steps, and the tree changes meanwhile: nodes are identified by their
ids, and scores of pruned nodes are dropped.

For nodes with scores of both models, the decided tokens show which model predicts better. The
scores of the mid-size model are used as long as it does.
"""

from __future__ import annotations

import collections.abc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from pipespec.head.paths import NOT_IN_TREE
from pipespec.head.policies.policy import SpeculationPolicy
from pipespec.head.proposers.node_records import drop_pruned
from pipespec.head.proposers.proposer import Proposal, ProposalRequest
from pipespec.head.row_budget import RequestCandidates, split_expansion
from pipespec.head.sequence import Sequence
from pipespec.head.tree import MIN_PROBABILITY, ROOT, Tree

# Nodes that one pass scores, unless a setting says otherwise.
MID_ROWS = 64
MID_ROWS_HELP = "Nodes that one pass of the mid-size model scores; 0 is a small draft alone."

# The advantage of the mid-size model is the log of how much more probable than the small draft it
# found the decided tokens: its value at the start, its largest change by one token, and the share
# of it that remains after one more token.
HEAD_START = 2.0
MAX_CHANGE = 3.0
MEMORY = 0.998


@dataclass(frozen=True, slots=True)
class ScorePart:
    """A pass's part for one sequence; `request` holds a copy of its `tree`, as it was then."""

    sequence: Sequence
    tree: Tree
    request: ProposalRequest


@dataclass(frozen=True, slots=True)
class ScoreBatch:
    """One pass of the mid-size model: `children` children for the nodes of each part."""

    parts: tuple[ScorePart, ...]
    children: int

    @property
    def requests(self) -> list[ProposalRequest]:
        return [part.request for part in self.parts]


@dataclass(frozen=True, slots=True)
class ChildLogprobs:
    """The children of a node by one model: `tokens` and `logps`, `[children]`; entries with
    log-probability -inf are padding."""

    tokens: np.ndarray
    logps: np.ndarray

    def logp(self, token: int) -> float:
        """The log-probability of a token; one that is not among the children is at most as probable
        as the least of them, and as the remaining probability."""
        named = self.logps > -np.inf
        if (here := named & (self.tokens == token)).any():
            return float(self.logps[here][0])
        rest = np.log(max(1 - np.exp(self.logps).sum(), MIN_PROBABILITY))
        return float(min(rest, self.logps[named].min(initial=0.0)))


class Scoring:
    """Chooses the nodes that the mid-size model scores, and applies its scores.

    Args:
        rows: nodes of one pass.
        end: nodes from this position on are not scored.
    """

    def __init__(self, rows: int, end: int):
        self._rows = rows
        self._end = end
        self._advantage = HEAD_START
        # The children by the small draft and by the mid-size model, by tree and node id.
        self._stated: WeakKeyDictionary[Tree, dict[int, tuple[ChildLogprobs, ChildLogprobs]]] = (
            WeakKeyDictionary()
        )

    @property
    def trusted(self) -> bool:
        """Whether scores of the mid-size model are used: it found the decided tokens more probable
        than the small draft did."""
        return self._advantage >= 0

    def next_batch(
        self, sequences: Iterable[Sequence], policy: SpeculationPolicy
    ) -> ScoreBatch | None:
        """The most probable nodes that were not scored; None: there are none.

        The ancestors of each are scored before it or with it. A policy that takes level by level or
        a tree of fixed shape has no use for new children of upper nodes, nor has a request with a
        grammar.
        """
        if not self._rows or not policy.children or not policy.keeps_unfed or policy.whole:
            return None
        among = [sequence for sequence in sequences if sequence.guide is None]
        offers = [RequestCandidates(each.tree, self._unscored(each)) for each in among]
        parts = []
        for sequence, nodes in zip(among, split_expansion(offers, self._rows), strict=True):
            if len(nodes):
                tree = sequence.tree
                tree.scored[nodes] = True
                request = ProposalRequest(sequence.context, tree.copy(), nodes)
                parts.append(ScorePart(sequence, tree, request))
        return ScoreBatch(tuple(parts), policy.children) if parts else None

    def _unscored(self, sequence: Sequence) -> np.ndarray:
        """Rising indices of the most probable nodes of a tree that could be scored."""
        tree = sequence.tree
        return tree.most_probable(
            sequence.drop_past_end(tree.nodes_before(self._end, ~tree.scored)), self._rows
        )

    def update(
        self,
        batch: ScoreBatch,
        answers: collections.abc.Sequence[Proposal | None],
        is_open: Callable[[Sequence], bool],
        capacity: int,
    ) -> int:
        """Add the scores of a pass to the trees, if the mid-size model is trusted; returns the
        number of nodes that got one.

        A sequence that has left the pipeline is left out, also if it has entered it again. Nodes
        without scores (None: the prompt is still being read) may be requested again.
        """
        count = 0
        for part, answer in zip(batch.parts, answers, strict=True):
            tree = part.sequence.tree
            if tree is not part.tree or not is_open(part.sequence):
                continue
            ids = part.request.tree.id
            scored_ids = np.zeros(0, np.int64) if answer is None else ids[answer.parents]
            unscored = tree.indices(np.setdiff1d(ids[part.request.nodes], scored_ids))
            tree.scored[unscored[unscored != NOT_IN_TREE]] = False
            if answer is None:
                continue
            place = tree.indices(scored_ids)
            here = place != NOT_IN_TREE
            place, tokens, logps = place[here], answer.tokens[here], answer.logps[here]
            self._remember(tree, place, tokens, logps)
            if self.trusted:
                tree.add_children(place, tokens, logps)
                tree.trim(capacity)
                count += len(place)
        return count

    def _remember(
        self, tree: Tree, nodes: np.ndarray, tokens: np.ndarray, logps: np.ndarray
    ) -> None:
        """Keep both models' children of the `nodes` that the small draft has expanded."""
        held = self._stated.setdefault(tree, {})
        drop_pruned(held, tree.id)
        both = np.flatnonzero(tree.expanded[nodes])
        children = tree.children(nodes[both])
        for i, node, mine in zip(
            both.tolist(), tree.id[nodes[both]].tolist(), children, strict=True
        ):
            small = ChildLogprobs(tree.token[mine], tree.logp[mine])
            held[node] = small, ChildLogprobs(tokens[i], logps[i])

    def token_decided(self, tree: Tree, token: int) -> None:
        """Compare the models by the token that was decided after the root of a tree."""
        children = self._stated.get(tree, {}).pop(int(tree.id[ROOT]), None)
        if children is not None:
            small, mid = (each.logp(token) for each in children)
            change = min(max(mid - small, -MAX_CHANGE), MAX_CHANGE)
            self._advantage = MEMORY * self._advantage + change
