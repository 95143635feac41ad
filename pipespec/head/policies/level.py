"""SpecPipe and PipeDec: one tree level, or several, per step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipespec.head.policies.policy import (
    CHILDREN,
    NO_NODES,
    WIDTH,
    Expansion,
    PipelineState,
    SpeculationPolicy,
)
from pipespec.head.tree import Tree
from pipespec.limits import MAX_CHILDREN, MAX_NODES, MAX_ROWS, check_whole
from pipespec.settings import check_settings, setting

MAX_LEVELS = 64
AFTER, BEFORE = "after", "before"


@dataclass(frozen=True)
class Level(SpeculationPolicy):
    """Every step computes the next `levels` levels: of each the `width` most probable nodes.

    A node that is cut from its level never enters a later batch, so a verdict outside the tree
    empties the pipeline. `cut` says when a level is cut to `width`: `after` the verdict has pruned
    it (PipeDec 3.3.3, 3.3.4), which leaves more nodes on the accepted path, or `before` it, when
    the draft proposes it (SpecPipe, Algorithm 1).

    With many requests each has a level of that width, or all of them together if
    `shared`. Several levels a step take as many draft rounds, and can yield as many tokens.
    """

    keeps_unfed = False

    width: int = setting(16, WIDTH, "rows", limits=(1, MAX_ROWS))
    children: int = setting(8, CHILDREN, "tokens", limits=(1, MAX_CHILDREN), experimental=True)
    levels: int = setting(
        1,
        "Tree levels that a step computes, each of policy.width nodes.",
        "levels",
        limits=(1, MAX_LEVELS),
        experimental=True,
    )
    cut: str = setting(
        AFTER,
        "Whether a level is cut to the width after the verdict has pruned it (PipeDec, §3.3.4), or "
        "before (SpecPipe, Algorithm 1).",
        choices=(AFTER, BEFORE),
        experimental=True,
    )
    shared: bool = setting(
        False,
        "Whether policy.width is that of all requests together, not of each.",
        experimental=True,
    )

    def __post_init__(self) -> None:
        check_settings("policy", self)
        check_whole("policy.width * policy.children", self.width * self.children, 1, MAX_NODES)
        check_whole("policy.width * policy.levels", self.max_rows, 1, MAX_ROWS)

    @property
    def max_rows(self) -> int:
        return self.width * self.levels

    @property
    def needs_one_round(self) -> bool:
        return self.levels == 1

    @property
    def max_nodes(self) -> int:
        # A batch per step in flight (longer pipelines are divided into stage groups), and the
        # candidates for the next one.
        return self.max_rows * (64 + self.children)

    def select_to_expand(self, tree: Tree, state: PipelineState) -> Expansion:
        # The draft never runs further ahead than one batch.
        first = tree.position[~tree.fed].min(initial=2**62)
        if tree.position[-1] - first >= self.levels - 1:
            return Expansion(NO_NODES)
        deepest = np.flatnonzero((tree.position == tree.position[-1]) & ~tree.expanded)
        limit = self.width if self.cut == BEFORE else None
        return Expansion(tree.most_probable(deepest, self.width), limit)

    def select_to_schedule(self, tree: Tree, state: PipelineState) -> np.ndarray:
        unfed = np.flatnonzero(~tree.fed)
        # The survivors of the most probable nodes of a level are the most probable survivors. So
        # the parents of the next level's nodes, the best when it was drafted, have been fed.
        positions = tree.position[unfed]
        levels = positions.min(initial=2**62) + np.arange(self.levels)
        return np.concatenate(
            [tree.most_probable(unfed[positions == level], self.width) for level in levels]
        )
