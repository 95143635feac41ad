"""Plain pipeline parallelism: compute the root, wait for its verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pipespec.head.policies.policy import NO_NODES, Expansion, PipelineState, SpeculationPolicy
from pipespec.head.tree import ROOT, Tree


@dataclass(frozen=True)
class Root(SpeculationPolicy):
    """Only the last accepted token is computed, without speculation."""

    has_fixed_size: ClassVar[bool] = True
    needs_one_round = True

    max_rows = 1
    children = 0
    max_nodes = 1

    def select_to_expand(self, tree: Tree, state: PipelineState) -> Expansion:
        return Expansion(NO_NODES)

    def select_to_schedule(self, tree: Tree, state: PipelineState) -> np.ndarray:
        return NO_NODES if tree.fed[ROOT] else np.array([ROOT])
