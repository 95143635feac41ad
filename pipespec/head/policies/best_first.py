"""pipespec's own policy: the most probable nodes that are not in the pipeline yet, of any depth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipespec.errors import ConfigError
from pipespec.head.policies.policy import (
    AUTO,
    CHILDREN,
    NO_NODES,
    WIDTH,
    Expansion,
    PipelineState,
    SpeculationPolicy,
)
from pipespec.head.policies.root import Root
from pipespec.head.tree import ROOT, Tree
from pipespec.limits import MAX_CHILDREN, MAX_NODES, MAX_ROWS, check_whole
from pipespec.settings import check_settings, setting

# Rows of a batch at most where the width is AUTO; measured times choose among them.
AUTO_ROWS = 64
NODES_PER_ROW = 128
SMALLEST_TREE = 2048
# Of the nodes that are not in the pipeline, so many times as many as enter it within a pass are
# worth expanding; and so many times as many the draft holds, those in the pipeline included.
PASSES_AHEAD, PASSES_HELD = 2, 4
# A shorter pipeline counts as one of so many stages there: beside a step of few stages there are
# several rounds of nodes, and the verdict rules out most of them.
LEAST_STAGES = 4
TINY = 1e-9  # ms

PLAIN = Root()


@dataclass(frozen=True)
class BestFirst(SpeculationPolicy):
    """Every step computes the nodes of highest cumulative probability, at most `width`.

    A node that is left out can still enter a later batch, so a miss costs part of a refill. When
    the draft expands the tree several times per step, one batch holds parents and children, and a
    step can yield more than one token.

    `row_cost` is what one more row adds to a step, as a share of the step; None takes the
    step times measured so far. A row enters the batch only if the time that it is expected to save
    is worth that (docs/policies.md). So the width is only a limit, and AUTO suits every machine.

    With a `capacity` of fewer than NODES_PER_ROW nodes for each row of the width the candidates of
    several draft rounds per step would displace each other before they can be computed. What a
    draft adds beyond PASSES_AHEAD passes through the pipeline is hardly ever computed.

    With measured times nothing is drafted while that decodes faster, and a batch waits for the
    verdict of the one before it where one tree a pass does (`pipespec.head.decoding_modes`).
    """

    shared = True

    width: int | str = setting(AUTO, WIDTH, "rows")
    children: int = setting(8, CHILDREN, "tokens", limits=(1, MAX_CHILDREN), experimental=True)
    capacity: int = setting(
        0,
        "Nodes that a tree may hold; 0 is 128 for each row of policy.width, at least 2048.",
        "nodes",
        limits=(0, MAX_NODES),
        experimental=True,
    )
    row_cost: float | None = setting(
        None,
        "How much longer one more row makes a step, as a share of the step; null measures it.",
        "share",
        experimental=True,
    )

    def __post_init__(self) -> None:
        if self.width != AUTO:
            check_whole("policy.width", self.width, 1, MAX_ROWS, f", or {AUTO}")
        check_settings("policy", self)
        if self.capacity:
            check_whole("policy.capacity", self.capacity, 2 * self.max_rows, MAX_NODES, ", or 0")
        if self.row_cost is not None and not 0 <= self.row_cost < 1:
            raise ConfigError(
                f"policy.row_cost is {self.row_cost}, but must be a share of a step from 0 to "
                "below 1, or null (measured)."
            )

    @property
    def max_rows(self) -> int:
        return AUTO_ROWS if self.width == AUTO else int(self.width)

    @property
    def max_nodes(self) -> int:
        return self.capacity or max(SMALLEST_TREE, NODES_PER_ROW * self.max_rows)

    @property
    def refills(self) -> bool:
        return self.row_cost is None  # measured times say what a delay costs

    def max_held(self, num_stages: int) -> int:
        return min(self.max_nodes, PASSES_HELD * _at_least(num_stages) * self.max_rows)

    def select_to_expand(self, tree: Tree, state: PipelineState) -> Expansion:
        if not self._speculates(state):
            return PLAIN.select_to_expand(tree, state)
        room = self._room(tree, state)
        rows = self.max_rows if state.target is None else min(self.max_rows, state.target.rows)
        unexpanded = tree.nodes_before(state.end, ~tree.expanded)
        most = max(rows, self.children)
        if self.refills and state.overlap:  # and no more than end before the verdict arrives
            most = max(int(min(most, state.nodes_in_time)), 1)
        nodes = tree.most_probable(unexpanded, min(most, room))
        if self.refills and state.draft_ms is not None:
            nodes = tree.most_probable(nodes, _most_per_ms(np.exp(tree.cum[nodes]), state))
        ahead = max(PASSES_AHEAD * _at_least(state.num_stages) * rows, self.children)
        return Expansion(nodes[tree.cum[nodes] >= tree.least_of(~tree.fed, ahead)])

    def select_to_refill(self, tree: Tree, state: PipelineState) -> np.ndarray:
        if not self._speculates(state) or self._waits(tree, state):
            return NO_NODES
        unexpanded = tree.nodes_before(state.end, ~tree.expanded)
        return tree.most_probable(unexpanded, self._room(tree, state))

    def _room(self, tree: Tree, state: PipelineState) -> int:
        """How many nodes the draft may still expand."""
        held = int(np.count_nonzero(tree.expanded | tree.fed))
        return max(min(self.max_held(state.num_stages), state.most_held) - held, 0)

    def select_to_schedule(self, tree: Tree, state: PipelineState) -> np.ndarray:
        if not self._speculates(state):
            return PLAIN.select_to_schedule(tree, state)
        if self._waits(tree, state):
            return NO_NODES
        return tree.most_probable(tree.nodes_before(state.end, ~tree.fed), self.max_rows)

    @staticmethod
    def _waits(tree: Tree, state: PipelineState) -> bool:
        """Whether the tree waits for the verdict of its batch in the pipeline."""
        return state.one_tree and bool(tree.fed[ROOT])

    def _speculates(self, state: PipelineState) -> bool:
        """Whether this step does; with a `row_cost` that is stated it goes by no measurement."""
        return self.row_cost is not None or state.speculates


def _most_per_ms(probabilities: np.ndarray, state: PipelineState) -> int:
    """Of how many nodes of these probabilities a draft round expands the most probability in a
    millisecond: more make it longer, and the tree grows by one level in each."""
    if len(probabilities) < 2:
        return len(probabilities)
    more = np.arange(1, len(probabilities) + 1)
    ms = np.maximum(state.round_ms(0) + state.draft_node_ms * more, TINY)
    return 1 + int(np.argmax(np.cumsum(-np.sort(-probabilities)) / ms))


def _at_least(num_stages: int) -> int:
    """The stages by which a tree is bounded."""
    return max(num_stages, LEAST_STAGES)
