"""SpecPipe and PipeDec: one tree level, or several, per step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipespec.head.feed.policy import NOTHING, Expansion, PipelineState
from pipespec.head.tree import Tree
from pipespec.limits import MAX_CHILDREN, MAX_ROWS, check_whole


@dataclass(frozen=True)
class Level:
    """Every step feeds the next level: the `width` most probable children of the level above.

    PipeDec 3.3 (dynamic prediction tree), SpecPipe 3.2. What missed the cut of its level is
    never sent later, so a verdict outside the tree empties the pipeline.

    `levels_per_step` (SpecPipe 3.4) feeds so many levels at once, which needs as many draft
    rounds per step; a step with fewer feeds what there is.
    """

    width: int = 16
    children: int = 8
    levels_per_step: int = 1

    def __post_init__(self) -> None:
        check_whole("feed.width", self.width, 1, MAX_ROWS)
        check_whole("feed.children", self.children, 1, MAX_CHILDREN)
        hint = f", as feed.width is {self.width}"
        check_whole("feed.levels_per_step", self.levels_per_step, 1, MAX_ROWS // self.width, hint)

    @property
    def max_rows(self) -> int:
        return self.width * self.levels_per_step

    @property
    def capacity(self) -> int:
        # A feed per step in flight; pipelines longer than this are cut by stage groups.
        return self.max_rows * 64

    def grow(self, tree: Tree, state: PipelineState) -> Expansion:
        # The draft never runs further ahead than one feed.
        if len(np.unique(tree.position[~tree.fed])) >= self.levels_per_step:
            return Expansion(NOTHING)
        deepest = np.flatnonzero((tree.position == tree.position[-1]) & ~tree.expanded)
        return Expansion(deepest, self.width)

    def feed(self, tree: Tree, state: PipelineState) -> np.ndarray:
        unfed = np.flatnonzero(~tree.fed)
        if not len(unfed):
            return NOTHING
        return unfed[tree.position[unfed] < tree.position[unfed[0]] + self.levels_per_step]
