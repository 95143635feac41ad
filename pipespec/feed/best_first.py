"""pipespec's own: whatever is most probable and not yet in the pipeline, of any depth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipespec.feed import Growth, check_at_least
from pipespec.tree import Tree


@dataclass(frozen=True)
class BestFirst:
    """Every step feeds the `width` unfed nodes of highest cumulative probability.

    A node that was passed over can still be sent later, so a miss costs part of a refill;
    and when the draft expands the tree several times per step, one batch holds parents and
    children, and a step can yield more than one token.
    """

    width: int = 16
    children: int = 8
    capacity: int = 2048

    def __post_init__(self) -> None:
        check_at_least(self, width=1, children=1, capacity=2 * self.width)

    def grow(self, tree: Tree) -> Growth:
        unexpanded = np.flatnonzero(~tree.expanded)
        room = self.capacity - int(np.count_nonzero(tree.expanded | tree.fed))
        return Growth(tree.best(unexpanded, min(self.width, max(room, 0))))

    def feed(self, tree: Tree) -> np.ndarray:
        return tree.best(np.flatnonzero(~tree.fed), self.width)
