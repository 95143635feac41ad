"""pipespec's own: whatever is most probable and not yet in the pipeline, of any depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pipespec.errors import ConfigError
from pipespec.head.feed.policy import Expansion, PipelineState
from pipespec.head.tree import Tree
from pipespec.limits import MAX_CHILDREN, MAX_NODES, MAX_ROWS, check_whole

NODES_PER_ROW = 64
SMALLEST_TREE = 2048


@dataclass(frozen=True)
class BestFirst:
    """Every step feeds the unfed nodes of highest cumulative probability: `width` or fewer.

    A node that was passed over can still be sent later, so a miss costs part of a refill;
    and when the draft expands the tree several times per step, one batch holds parents and
    children, and a step can yield more than one token.

    `capacity` is how many nodes the tree may hold. With fewer than NODES_PER_ROW for each row of
    the width, several draft rounds per step push each other's candidates out before they can be
    fed; so many are the default.

    `row_cost` is what one more row adds to a step, as a share of the step; None takes the
    step times measured so far. A row is fed only if the time that it can be expected to save
    is worth that (docs/feeding.md).
    """

    width: int = 16
    children: int = 8
    capacity: int = 0
    row_cost: float | None = None
    keeps_unfed: ClassVar[bool] = True
    whole: ClassVar[bool] = False
    shared: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole("feed.width", self.width, 1, MAX_ROWS)
        check_whole("feed.children", self.children, 1, MAX_CHILDREN)
        if self.capacity == 0:
            object.__setattr__(self, "capacity", max(SMALLEST_TREE, NODES_PER_ROW * self.width))
        check_whole("feed.capacity", self.capacity, 2 * self.width, MAX_NODES)
        if self.row_cost is not None and not 0 <= self.row_cost < 1:
            raise ConfigError(
                f"feed.row_cost is {self.row_cost}, but must be a share of a step from 0 to "
                "below 1, or null (measured)."
            )

    @property
    def max_rows(self) -> int:
        return self.width

    def grow(self, tree: Tree, state: PipelineState) -> Expansion:
        unexpanded = tree.before(state.end, ~tree.expanded)
        room = self.capacity - int(np.count_nonzero(tree.expanded | tree.fed))
        return Expansion(tree.best(unexpanded, min(self.width, max(room, 0))))

    def feed(self, tree: Tree, state: PipelineState) -> np.ndarray:
        return tree.best(tree.before(state.end, ~tree.fed), self.width)
