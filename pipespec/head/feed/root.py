"""Plain pipeline parallelism: feed the root, wait for its verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pipespec.head.feed.policy import NOTHING, Expansion, PipelineState
from pipespec.head.tree import ROOT, Tree


@dataclass(frozen=True)
class Root:
    """Only the last accepted token is computed; no guess is made."""

    max_rows: int = 1
    children: int = 0
    capacity: int = 1
    keeps_unfed: ClassVar[bool] = True
    whole: ClassVar[bool] = False
    shared: ClassVar[bool] = False
    row_cost: ClassVar[float | None] = 0.0

    def grow(self, tree: Tree, state: PipelineState) -> Expansion:
        return Expansion(NOTHING)

    def feed(self, tree: Tree, state: PipelineState) -> np.ndarray:
        return NOTHING if tree.fed[ROOT] else np.array([ROOT])
