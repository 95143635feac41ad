"""What the mid-size model of a cascade is asked, what becomes of its answer, and who is right.

A small draft grows the tree; the mid-size model says anew what follows its likeliest nodes, of all
depths in one pass. A pass takes several steps, so the tree has moved on when it answers: nodes are
named by their ids, and what was said of those that are gone is dropped.

Of the nodes that both have spoken of, what was decided after them tells who guesses better. The
mid-size model is believed as long as it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from pipespec.head.choice import Offer, share
from pipespec.head.feed.policy import FeedPolicy
from pipespec.head.paths import NOWHERE
from pipespec.head.sequence import Sequence
from pipespec.head.source.protocol import Asked, Candidates, forget
from pipespec.head.tree import ROOT, SMALLEST, Tree

# Nodes that one pass scores, unless a setting says otherwise.
MID_ROWS = 64

# Of the mid-size model before anything was decided, how much more likely than the small draft's
# word its own makes what comes, as a logarithm; the most that one token adds or takes; and the
# share of it all that is still held after one more token.
HEAD_START = 2.0
MOST = 3.0
MEMORY = 0.998


@dataclass(frozen=True, slots=True)
class ScorePart:
    """What a pass does for one sequence: `asked` holds a copy of its `tree`, as it was then."""

    sequence: Sequence
    tree: Tree
    asked: Asked


@dataclass(frozen=True, slots=True)
class ScoreWork:
    """One pass of the mid-size model: `children` children for the nodes of each part."""

    parts: tuple[ScorePart, ...]
    children: int

    @property
    def asked(self) -> list[Asked]:
        return [part.asked for part in self.parts]


@dataclass(frozen=True, slots=True)
class Words:
    """What one model said may follow a node: `tokens` and `logps`, `[children]`; with
    log-probability -inf it is none."""

    tokens: np.ndarray
    logps: np.ndarray

    def of(self, token: int) -> float:
        """A token that was not named is no likelier than the least that was, nor than the rest."""
        named = self.logps > -np.inf
        if (here := named & (self.tokens == token)).any():
            return float(self.logps[here][0])
        rest = np.log(max(1 - np.exp(self.logps).sum(), SMALLEST))
        return float(min(rest, self.logps[named].min(initial=0.0)))


class Scoring:
    """The mid-size model of a cascade, as the scheduler sees it: `rows` nodes in a pass, at
    positions below `end`; 0: there is none."""

    def __init__(self, rows: int, end: int):
        self._rows = rows
        self._end = end
        self._advantage = HEAD_START
        # What the small draft said and what the mid-size model did, by tree and node id.
        self._said: WeakKeyDictionary[Tree, dict[int, tuple[Words, Words]]] = WeakKeyDictionary()

    @property
    def believed(self) -> bool:
        """Whether what the mid-size model says counts: what was decided was likelier by its word
        than by the small draft's."""
        return self._advantage >= 0

    def work(self, sequences: Iterable[Sequence], policy: FeedPolicy) -> ScoreWork | None:
        """The likeliest nodes that the mid-size model was not asked about; None: there is none.

        Above each of them are nodes that it was asked about or is asked about now. A policy that
        takes level by level or a tree of fixed shape has no use for children of nodes above, nor
        has a request whose form decides what may follow.
        """
        if not self._rows or not policy.children or not policy.keeps_unfed or policy.whole:
            return None
        among = [sequence for sequence in sequences if sequence.guide is None]
        offers = [Offer(each.tree, self._unscored(each)) for each in among]
        parts = []
        for sequence, nodes in zip(among, share(offers, self._rows), strict=True):
            if len(nodes):
                tree = sequence.tree
                tree.scored[nodes] = True
                asked = Asked(sequence.context, tree.copy(), nodes)
                parts.append(ScorePart(sequence, tree, asked))
        return ScoreWork(tuple(parts), policy.children) if parts else None

    def _unscored(self, sequence: Sequence) -> np.ndarray:
        """Rising indices of the likeliest nodes of a tree that could be scored."""
        tree = sequence.tree
        return tree.best(sequence.useful(tree.before(self._end, ~tree.scored)), self._rows)

    def restate(
        self,
        work: ScoreWork,
        answers: ListOf[Candidates | None],
        is_open: Callable[[Sequence], bool],
        capacity: int,
    ) -> int:
        """Hang what the mid-size model said into the trees, if it is believed; how many nodes have
        its word now.

        A sequence that is not open any more, or was opened again, is left out. What was not
        answered (None: the prompt is still being read) may be asked again.
        """
        count = 0
        for part, answer in zip(work.parts, answers, strict=True):
            tree = part.sequence.tree
            if tree is not part.tree or not is_open(part.sequence):
                continue
            ids = part.asked.tree.id
            said = np.zeros(0, np.int64) if answer is None else ids[answer.parents]
            unsaid = tree.indices(np.setdiff1d(ids[part.asked.nodes], said))
            tree.scored[unsaid[unsaid != NOWHERE]] = False
            if answer is None:
                continue
            place = tree.indices(said)
            here = place != NOWHERE
            place, tokens, logps = place[here], answer.tokens[here], answer.logps[here]
            self._remember(tree, place, tokens, logps)
            if self.believed:
                tree.append(place, tokens, logps)
                tree.trim(capacity)
                count += len(place)
        return count

    def _remember(
        self, tree: Tree, nodes: np.ndarray, tokens: np.ndarray, logps: np.ndarray
    ) -> None:
        """What either said, of those `nodes` that the small draft has expanded."""
        held = self._said.setdefault(tree, {})
        forget(held, tree.id)
        both = np.flatnonzero(tree.expanded[nodes])
        children = tree.children(nodes[both])
        for i, node, mine in zip(
            both.tolist(), tree.id[nodes[both]].tolist(), children, strict=True
        ):
            small = Words(tree.token[mine], tree.logp[mine])
            held[node] = small, Words(tokens[i], logps[i])

    def decided(self, tree: Tree, token: int) -> None:
        """A token is decided after the root of a tree."""
        words = self._said.get(tree, {}).pop(int(tree.id[ROOT]), None)
        if words is not None:
            small, mid = (each.of(token) for each in words)
            more = min(max(mid - small, -MOST), MOST)
            self._advantage = MEMORY * self._advantage + more
