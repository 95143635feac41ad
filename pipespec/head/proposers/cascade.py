"""A cascade: a mid-size model scores anew what a small draft has proposed.

The small draft expands the trees in the head, round by round. The mid-size model works beside it on
a device of its own, and the head never waits for it. A pass scores the likeliest nodes of all
depths that have no score; it takes several steps, and the tree changes meanwhile: nodes are
identified by their ids, and scores of pruned nodes are dropped.

For nodes with scores of both models, the decided tokens show which model predicts better. The
scores of the mid-size model replace those of the small draft as long as it does.
"""

from __future__ import annotations

import collections.abc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from pipespec.core import Verdict
from pipespec.head.paths import NOT_IN_TREE
from pipespec.head.policies.policy import SpeculationPolicy
from pipespec.head.proposer import Context, Proposal, ProposalRequest, Proposer
from pipespec.head.proposers.calibration import CalibratedProposer
from pipespec.head.proposers.draft_model import DraftModelConfig
from pipespec.head.proposers.node_records import drop_pruned
from pipespec.head.row_budget import split_expansion
from pipespec.head.sequence import Sequence
from pipespec.head.tree import MIN_PROBABILITY, Tree
from pipespec.limits import MAX_ROWS
from pipespec.settings import setting

if TYPE_CHECKING:
    from pipespec.head.proposers.async_proposer import AsyncProposer

# Nodes that one pass scores, unless a setting says otherwise.
MID_ROWS = 64
MID_ROWS_HELP = "Nodes that one pass of the mid-size model scores; 0 is a small draft alone."

# The advantage of the mid-size model is the log of how much more probable than the small draft it
# found the decided tokens: its value at the start, its largest change by one token, and the share
# of it that remains after one more token.
HEAD_START = 2.0
MAX_CHANGE = 3.0
MEMORY = 0.998


@dataclass(frozen=True)
class CascadeModelConfig(DraftModelConfig):
    """Settings of a small draft model with a mid-size model beside it."""

    mid_rows: int = setting(
        MID_ROWS, MID_ROWS_HELP, "nodes", limits=(0, MAX_ROWS), experimental=True
    )

    @property
    def needs_mid(self) -> bool:
        return self.mid_rows > 0

    def make_mid(self, mid: Proposer | None, vocabulary: int) -> Proposer:
        assert mid is not None
        return CalibratedProposer(mid)


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


class CascadeProposer:
    """Both models of a cascade: a `Proposer` that is the small draft, and the scores of the
    mid-size model. Both know every sequence."""

    def __init__(self, draft: Proposer, mid: AsyncProposer, rows: int, end: int):
        """A pass scores `rows` nodes, none of them at position `end` or beyond."""
        self._draft = draft
        self._mid = mid
        self.parts = draft, mid
        self._rows = rows
        self._end = end
        # Of the pass under way: each sequence, its tree, and the request with a copy of that.
        self._pass: list[tuple[Sequence, Tree, ProposalRequest]] = []
        self._advantage = HEAD_START
        # The children by the small draft and by the mid-size model, by tree and node id.
        self._stated: WeakKeyDictionary[Tree, dict[int, tuple[ChildLogprobs, ChildLogprobs]]] = (
            WeakKeyDictionary()
        )

    def start_sequence(self, context: Context) -> None:
        self._draft.start_sequence(context)
        self._mid.start_sequence(context)

    def propose(
        self, requests: collections.abc.Sequence[ProposalRequest], children: int
    ) -> list[Proposal | None]:
        return self._draft.propose(requests, children)

    def accept_verdict(self, verdict: Verdict) -> None:
        self._draft.accept_verdict(verdict)
        self._mid.accept_verdict(verdict)

    def end_sequence(self, sequence: int) -> None:
        self._draft.end_sequence(sequence)
        self._mid.end_sequence(sequence)

    def request_scores(self, sequences: Iterable[Sequence], policy: SpeculationPolicy) -> None:
        """Begin to score the most probable nodes without scores, unless a pass is under way.

        The ancestors of each are scored before it or with it. A policy that takes level by level or
        a tree of fixed shape has no use for new children of upper nodes, nor has a request with a
        grammar.
        """
        if self._pass or not self._rows or not policy.children:
            return
        if not policy.keeps_unfed or policy.whole:
            return
        among = [sequence for sequence in sequences if sequence.guide is None]
        offers = [(each.tree, self._unscored(each)) for each in among]
        for sequence, nodes in zip(among, split_expansion(offers, self._rows), strict=True):
            if len(nodes):
                tree = sequence.tree
                tree.scored[nodes] = True
                request = ProposalRequest(sequence.context, tree.copy(), nodes)
                self._pass.append((sequence, tree, request))
        if self._pass:
            self._mid.submit([request for _, _, request in self._pass], policy.children)

    def _unscored(self, sequence: Sequence) -> np.ndarray:
        """Rising indices of the most probable nodes of a tree that could be scored."""
        tree = sequence.tree
        return tree.most_probable(
            sequence.drop_past_end(tree.nodes_before(self._end, ~tree.scored)), self._rows
        )

    def take_scores(self, running: Mapping[int, Sequence], capacity: int) -> int | None:
        """Add the scores that have arrived to the trees, of at most `capacity` nodes each, if the
        mid-size model predicts better; returns how many nodes got one, None: none have arrived.

        A sequence that is not among the `running`, by number, is left out, also if it has entered
        the pipeline again. Nodes without scores (None: the prompt is still being read) may be
        requested again.
        """
        result = self._mid.poll()
        if result is None:
            return None
        parts, self._pass = self._pass, []
        count = 0
        for (sequence, tree, request), answer in zip(parts, result.proposals, strict=True):
            sequence.counts["overruns"] += not result.paced
            if sequence.tree is not tree or running.get(sequence.number) is not sequence:
                continue
            ids = request.tree.id
            scored_ids = np.zeros(0, np.int64) if answer is None else ids[answer.parents]
            unscored = tree.indices(np.setdiff1d(ids[request.nodes], scored_ids))
            tree.scored[unscored[unscored != NOT_IN_TREE]] = False
            if answer is None:
                continue
            place = tree.indices(scored_ids)
            here = place != NOT_IN_TREE
            place, tokens, logps = place[here], answer.tokens[here], answer.logps[here]
            self._remember(tree, place, tokens, logps)
            if self._advantage >= 0:
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

    def tokens_decided(self, tree: Tree, text: Context, first: int) -> None:
        """Compare the models by the tokens that were decided, from the position `first` on."""
        held = self._stated.get(tree, {})
        for above, token in zip(text.nodes[first - 1 :], text.tokens[first:], strict=False):
            if (children := held.pop(above, None)) is not None:
                small, mid = (each.logp(token) for each in children)
                change = min(max(mid - small, -MAX_CHANGE), MAX_CHANGE)
                self._advantage = MEMORY * self._advantage + change

    def close(self) -> None:
        self._mid.close()
