"""SpecPipe and PipeDec: one tree level per step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipespec.feed import NOTHING, Growth, check_at_least
from pipespec.tree import Tree


@dataclass(frozen=True)
class Level:
    """Every step feeds the next level: the `width` most probable children of the level above.

    PipeDec 3.3 (dynamic prediction tree), SpecPipe 3.2. What missed the cut of its level is
    never sent later, so a verdict outside the tree empties the pipeline.
    """

    width: int = 16
    children: int = 8

    def __post_init__(self) -> None:
        check_at_least(self, width=1, children=1)

    @property
    def capacity(self) -> int:
        # A level per step in flight; pipelines longer than this are cut by stage groups.
        return self.width * 64

    def grow(self, tree: Tree) -> Growth:
        if not tree.fed.all():
            return Growth(NOTHING)  # the draft never runs more than one level ahead
        deepest = np.flatnonzero((tree.position == tree.position[-1]) & ~tree.expanded)
        return Growth(deepest, self.width)

    def feed(self, tree: Tree) -> np.ndarray:
        unfed = np.flatnonzero(~tree.fed)
        if not len(unfed):
            return NOTHING
        return unfed[tree.position[unfed] == tree.position[unfed[0]]]
