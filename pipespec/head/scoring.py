"""What the mid-size model of a cascade is asked, and what becomes of its answer.

A small draft grows the tree; the mid-size model says anew what follows its likeliest nodes, of all
depths in one pass. A pass takes several steps, so the tree has moved on when it answers: nodes are
named by their ids, and what was said of those that are gone is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass

import numpy as np

from pipespec.head.choice import Offer, share
from pipespec.head.feed.policy import FeedPolicy
from pipespec.head.paths import NOWHERE
from pipespec.head.sequence import Sequence
from pipespec.head.source.protocol import Asked, Candidates
from pipespec.head.tree import Tree

# Nodes that one pass scores, unless a setting says otherwise.
MID_ROWS = 64


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


def score_work(
    sequences: Iterable[Sequence], policy: FeedPolicy, rows: int, end: int
) -> ScoreWork | None:
    """The likeliest `rows` nodes, at positions below `end`, that the mid-size model was not asked
    about; None: there is none.

    Above each of them are nodes that it was asked about or is asked about now. A policy that takes
    level by level or a tree of fixed shape has no use for children of nodes above, nor has a
    request whose form decides what may follow.
    """
    if not policy.children or not policy.keeps_unfed or policy.whole:
        return None
    among = [sequence for sequence in sequences if sequence.guide is None]
    offers = [Offer(each.tree, _unscored(each, rows, end)) for each in among]
    parts = []
    for sequence, nodes in zip(among, share(offers, rows), strict=True):
        if len(nodes):
            tree = sequence.tree
            tree.scored[nodes] = True
            asked = Asked(sequence.context, tree.copy(), nodes)
            parts.append(ScorePart(sequence, tree, asked))
    return ScoreWork(tuple(parts), policy.children) if parts else None


def _unscored(sequence: Sequence, rows: int, end: int) -> np.ndarray:
    """Rising indices of the likeliest nodes of a tree that could be scored."""
    tree = sequence.tree
    return tree.best(sequence.useful(tree.before(end, ~tree.scored)), rows)


def restate(
    work: ScoreWork,
    answers: ListOf[Candidates | None],
    is_open: Callable[[Sequence], bool],
    capacity: int,
) -> int:
    """Hang what the mid-size model said into the trees; how many nodes it said it of.

    A sequence that is not open any more, or was opened again, is left out. What was not answered
    (None: the prompt is still being read) may be asked again.
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
        tree.append(place[here], answer.tokens[here], answer.logps[here])
        tree.trim(capacity)
        count += int(np.count_nonzero(here))
    return count
