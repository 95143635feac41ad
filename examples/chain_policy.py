"""A speculation policy: one chain of draft tokens, which `own_policy.py` uses."""

from dataclasses import dataclass

import numpy as np

from pipespec.head.policies.policy import NO_NODES, Expansion, PipelineState, SpeculationPolicy
from pipespec.head.tree import Tree


@dataclass(frozen=True)
class Chain(SpeculationPolicy):
    """The draft's most probable token after each token, `length` of them ahead of the verdicts."""

    length: int = 8
    children = 1
    max_rows = 1

    @property
    def max_nodes(self) -> int:
        return 2 * self.length

    def select_to_expand(self, tree: Tree, state: PipelineState) -> Expansion:
        deepest = np.flatnonzero(~tree.expanded)
        return Expansion(deepest if len(tree) < self.length else NO_NODES)

    def select_to_schedule(self, tree: Tree, state: PipelineState) -> np.ndarray:
        return np.flatnonzero(~tree.fed)[:1]
