"""SpecPipe and PipeDec: one tree level, or several, per step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pipespec.errors import ConfigError
from pipespec.head.feed.policy import NOTHING, Expansion, PipelineState
from pipespec.head.tree import Tree
from pipespec.limits import MAX_CHILDREN, MAX_NODES, MAX_ROWS, check_whole

AFTER, BEFORE = "after", "before"


@dataclass(frozen=True)
class Level:
    """Every step feeds the next level: the `width` most probable children of the level above.

    What missed the cut of its level is never sent later, so a verdict outside the tree empties
    the pipeline. `cut` says when a level is cut to `width`: `after` the verdict has pruned it
    (PipeDec 3.3.3, 3.3.4), which leaves more nodes on the accepted path, or `before` it, when the
    draft proposes it (SpecPipe, Algorithm 1).

    `levels_per_step` (SpecPipe 3.4) feeds so many levels at once, which needs as many draft
    rounds per step; a step with fewer feeds what there is.

    With many requests each has a level of that width (SpecPipe-DB), or, `shared`, all of them
    together.
    """

    width: int = 16
    children: int = 8
    levels_per_step: int = 1
    cut: str = AFTER
    shared: bool = False
    keeps_unfed: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    row_cost: ClassVar[float | None] = 0.0

    def __post_init__(self) -> None:
        check_whole("feed.width", self.width, 1, MAX_ROWS)
        check_whole("feed.children", self.children, 1, MAX_CHILDREN)
        hint = f", as feed.width is {self.width}"
        check_whole("feed.levels_per_step", self.levels_per_step, 1, MAX_ROWS // self.width, hint)
        if self.cut not in (AFTER, BEFORE):
            raise ConfigError(f"feed.cut is {self.cut!r}, but must be {AFTER} or {BEFORE}.")
        check_whole("feed.width * feed.children", self.width * self.children, 1, MAX_NODES)

    @property
    def max_rows(self) -> int:
        return self.width * self.levels_per_step

    @property
    def capacity(self) -> int:
        # A feed per step in flight (pipelines longer than this are cut by stage groups), and the
        # candidates for the next one.
        return self.max_rows * (64 + self.children)

    def grow(self, tree: Tree, state: PipelineState) -> Expansion:
        # The draft never runs further ahead than one feed.
        if len(np.unique(tree.position[~tree.fed])) >= self.levels_per_step:
            return Expansion(NOTHING)
        deepest = np.flatnonzero((tree.position == tree.position[-1]) & ~tree.expanded)
        limit = self.width if self.cut == BEFORE else None
        return Expansion(tree.best(deepest, self.width), limit)

    def feed(self, tree: Tree, state: PipelineState) -> np.ndarray:
        unfed = np.flatnonzero(~tree.fed)
        position = tree.position[unfed]
        levels = np.unique(position)[: self.levels_per_step]
        # What survived of the most probable of a level is the most probable of what survived, so
        # the parents of the next level's nodes, which were the best when it was drafted, are fed.
        chosen = [tree.best(unfed[position == level], self.width) for level in levels]
        return np.concatenate([NOTHING, *chosen])
