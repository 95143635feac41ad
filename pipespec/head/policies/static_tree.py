"""SpecInfer, and the static tree over a pipeline (STPP) that PipeDec is compared with (4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import ClassVar

import numpy as np

from pipespec.errors import ConfigError
from pipespec.head.policies.policy import NO_NODES, Expansion, PipelineState, SpeculationPolicy
from pipespec.head.tree import ROOT, Tree
from pipespec.limits import MAX_ROWS
from pipespec.settings import setting

LEAST_CHILDREN = 8
SMALLEST_TREE = 2048  # nodes


@dataclass(frozen=True)
class StaticTree(SpeculationPolicy):
    """Computes a whole tree of fixed shape, waits for its verdict, computes the next.

    Every node at depth i has its `shape[i]` most probable children in the tree; the default is
    SpecInfer's (section 6.1). `[1] * k` is classic speculative decoding with k draft
    tokens.

    While a tree is in the pipeline the draft grows the next ones below the candidates that were
    not fed: the token that ends the verdict is one of these, if the draft proposed it at all. What
    is missing when the verdict arrives is drafted first, beside the batches of other requests.
    """

    has_fixed_size: ClassVar[bool] = True
    whole = True

    shape: list[int] = setting(
        [1, 1, 3, 1, 1, 1, 1, 1],
        "Children of each node, level by level; [1,1,1,1] is a chain of four draft tokens.",
        "tokens",
        experimental=True,
    )

    def __post_init__(self) -> None:
        if not self.shape or min(self.shape) < 1:
            raise ConfigError(
                f"policy.shape is {self.shape}, but must be whole numbers from 1 up, one per level."
            )
        if self.max_rows > MAX_ROWS:
            raise ConfigError(
                f"policy.shape {self.shape} is a tree of {self.max_rows} nodes, but a batch holds "
                f"{MAX_ROWS} rows; cut the shape."
            )

    @property
    def children(self) -> int:
        return max(LEAST_CHILDREN, *self.shape)

    @property
    def max_nodes(self) -> int:
        """Of a tree and those drafted ahead of it."""
        return max(SMALLEST_TREE, 2 * self.max_rows * self.children)

    @property
    def max_rows(self) -> int:
        """Nodes of the whole tree, its root included."""
        return 1 + sum(accumulate(self.shape, mul))

    def select_to_expand(self, tree: Tree, state: PipelineState) -> Expansion:
        level = self._level(tree)
        inside = (level >= 0) & (level < len(self.shape)) & (tree.position < state.end)
        wanted = np.flatnonzero(inside & ~tree.expanded)
        if not tree.fed[ROOT]:
            next_level = wanted[tree.position[wanted] == tree.position[wanted].min(initial=2**62)]
            return Expansion(next_level, urgent=True)
        # Leave room for the next tree, so that nothing of it has to be trimmed.
        room = (self.max_nodes - len(tree)) // self.children - self.max_rows
        return Expansion(tree.most_probable(wanted, min(self.max_rows, max(room, 0))))

    def select_to_schedule(self, tree: Tree, state: PipelineState) -> np.ndarray:
        if tree.fed[ROOT]:
            return NO_NODES
        level = self._level(tree)
        inside = (level >= 0) & (tree.position < state.end)
        whole = tree.expanded[inside & (level < len(self.shape))].all()
        return np.flatnonzero(inside) if whole else NO_NODES

    def _level(self, tree: Tree) -> np.ndarray:
        """The level of each node in a tree of this shape below its nearest possible root,
        `[nodes]`; -1: in none.

        The root of the tree is one while it is unfed; later every unfed child of a fed node is.
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
    parent[ROOT] = -1  # it is not a sibling of its children
    order = np.lexsort((np.arange(len(tree)), -tree.logp, parent))
    first = np.flatnonzero(np.diff(parent[order], prepend=-2))
    rank = np.empty(len(tree), np.int64)
    rank[order] = np.arange(len(tree)) - np.repeat(first, np.diff([*first, len(tree)]))
    return rank
