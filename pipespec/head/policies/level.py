"""SpecPipe and PipeDec: one tree level, or several, per step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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

AFTER, BEFORE = "after", "before"


@dataclass(frozen=True)
class Level(SpeculationPolicy):
    """Every step computes the next level: the `width` most probable of its nodes.

    A node that is cut from its level never enters a later batch, so a verdict outside the tree
    empties the pipeline. `cut` says when a level is cut to `width`: `after` the verdict has pruned
    it (PipeDec 3.3.3, 3.3.4), which leaves more nodes on the accepted path, or `before` it, when
    the draft proposes it (SpecPipe, Algorithm 1).

    With many requests each has a level of that width, or all of them together if
    `shared`.
    """

    needs_one_round: ClassVar[bool] = True
    keeps_unfed = False

    width: int = setting(16, WIDTH, "rows", limits=(1, MAX_ROWS))
    children: int = setting(8, CHILDREN, "tokens", limits=(1, MAX_CHILDREN), experimental=True)
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

    @property
    def max_rows(self) -> int:
        return self.width

    @property
    def max_nodes(self) -> int:
        # A batch per step in flight (longer pipelines are divided into stage groups), and the
        # candidates for the next one.
        return self.max_rows * (64 + self.children)

    def select_to_expand(self, tree: Tree, state: PipelineState) -> Expansion:
        # The draft never runs further ahead than one batch.
        if not tree.fed.all():
            return Expansion(NO_NODES)
        deepest = np.flatnonzero((tree.position == tree.position[-1]) & ~tree.expanded)
        limit = self.width if self.cut == BEFORE else None
        return Expansion(tree.most_probable(deepest, self.width), limit)

    def select_to_schedule(self, tree: Tree, state: PipelineState) -> np.ndarray:
        unfed = np.flatnonzero(~tree.fed)
        # The survivors of the most probable nodes of a level are the most probable survivors. So
        # the parents of the next level's nodes, the best when it was drafted, have been fed.
        level = unfed[tree.position[unfed] == tree.position[unfed].min(initial=2**62)]
        return tree.most_probable(level, self.width)
