"""SpecInfer, and the static tree over a pipeline (STPP) that SpecPipe is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import ClassVar

import numpy as np

from pipespec.errors import ConfigError
from pipespec.head.feed.policy import NOTHING, Expansion, PipelineState
from pipespec.head.tree import ROOT, Tree
from pipespec.limits import MAX_NODES, MAX_ROWS, check_whole


@dataclass(frozen=True)
class StaticTree:
    """Feed a whole tree of fixed shape, wait for its verdict, feed the next.

    Every node at depth i has its `shape[i]` most probable children in the tree; the default is
    SpecInfer's (section 6.1). `[1] * k` is classic speculative decoding with k guesses.

    While a tree is in the pipeline the draft grows the next ones: below its nodes hang the
    candidates that were not fed (`children` is how many it proposes), and the token that ends
    the verdict is one of them if the draft had it at all. What is missing when the verdict
    has come is drafted while the pipeline idles.
    """

    shape: list[int] = field(default_factory=lambda: [1, 1, 3, 1, 1, 1, 1, 1])
    width: int = 64
    children: int = 8
    capacity: int = 2048
    keeps_unfed: ClassVar[bool] = True
    whole: ClassVar[bool] = True
    shared: ClassVar[bool] = False
    row_cost: ClassVar[float | None] = 0.0

    def __post_init__(self) -> None:
        if not self.shape or min(self.shape) < 1:
            raise ConfigError(
                f"feed.shape is {self.shape}, but must be whole numbers from 1 up, one per level."
            )
        check_whole("feed.width", self.width, 1, MAX_ROWS)
        if self.max_rows > self.width:
            raise ConfigError(
                f"feed.shape {self.shape} is a tree of {self.max_rows} nodes, but a batch holds "
                f"feed.width={self.width} rows; cut the shape or raise feed.width."
            )
        most = MAX_NODES // (2 * self.max_rows)
        check_whole("feed.children", self.children, max(self.shape), most)
        check_whole("feed.capacity", self.capacity, 2 * self.max_rows * self.children, MAX_NODES)

    @property
    def max_rows(self) -> int:
        """Nodes of the whole tree, its root included."""
        return 1 + sum(accumulate(self.shape, mul))

    def grow(self, tree: Tree, state: PipelineState) -> Expansion:
        level = self._level(tree)
        inside = (level >= 0) & (level < len(self.shape)) & (tree.position < state.end)
        wanted = np.flatnonzero(inside & ~tree.expanded)
        if not tree.fed[ROOT]:
            next_level = wanted[tree.position[wanted] == tree.position[wanted].min(initial=2**62)]
            return Expansion(next_level, urgent=True)
        # Room is left for the next tree, so that nothing of it has to be trimmed.
        room = (self.capacity - len(tree)) // self.children - self.max_rows
        return Expansion(tree.best(wanted, min(self.max_rows, max(room, 0))))

    def feed(self, tree: Tree, state: PipelineState) -> np.ndarray:
        if tree.fed[ROOT]:
            return NOTHING
        level = self._level(tree)
        inside = (level >= 0) & (tree.position < state.end)
        whole = tree.expanded[inside & (level < len(self.shape))].all()
        return np.flatnonzero(inside) if whole else NOTHING

    def _level(self, tree: Tree) -> np.ndarray:
        """The level of each node in a tree of this shape below its nearest possible root,
        `[nodes]`; -1: in none.

        The root is one while it is unfed; later every unfed child of a fed node may become it.
        """
        branching = np.array([*self.shape, 0])
        rank = _rank_among_siblings(tree)
        level = np.full(len(tree), -1)
        if not tree.fed[ROOT]:
            level[ROOT] = 0
        ends = np.flatnonzero(np.diff(tree.position)) + 1
        for nodes in np.split(np.arange(len(tree)), ends)[1:]:
            parent = tree.parent[nodes]
            above = level[parent]
            inside = (above >= 0) & (rank[nodes] < branching[above])
            level[nodes] = np.where(inside, above + 1, -1)
            level[nodes[tree.fed[parent]]] = 0
            level[nodes[tree.fed[nodes]]] = -1
        return level


def _rank_among_siblings(tree: Tree) -> np.ndarray:
    """How many siblings of each node are more probable, `[nodes]`; ties go to the lower index."""
    parent = tree.parent.copy()
    parent[ROOT] = -1  # it is no sibling of its children
    order = np.lexsort((np.arange(len(tree)), -tree.logp, parent))
    first = np.flatnonzero(np.diff(parent[order], prepend=-2))
    rank = np.empty(len(tree), np.int64)
    rank[order] = np.arange(len(tree)) - np.repeat(first, np.diff([*first, len(tree)]))
    return rank
