"""Speculation policies: which nodes the draft expands, and which the next batch contains.

A policy is a frozen dataclass with two pure methods of the head's tree and the state of the
pipeline. Everything that makes up a decoding method is in its policy; the loops, the wire and the
workers are the same for all. A new policy is a subclass of `SpeculationPolicy`, in any module, and
a file in `conf/policy/` that names it; commands, `pipespec plan` and the tests find it there.
`docs/policies.md` derives the rules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from pipespec.head.tree import Tree
from pipespec.limits import check_whole
from pipespec.timing.batch_times import Points

# Draft rounds of a step: as many as fit.
AUTO = "auto"
MAX_ROUNDS = 1000
NO_NODES = np.empty(0, np.int64)
NO_PROBABILITIES = np.empty(0)
# What a setting of several policies means.
CHILDREN = "Candidate tokens that the proposer returns for a tree node."
WIDTH = (
    "Most tree nodes that a step computes, each of which is a row of its batch; auto, with "
    "best_first, is 64, of which measured times may take fewer."
)


@dataclass(frozen=True, slots=True, eq=False)
class OfferedRows:
    """The rows that could have entered a batch, the most probable first, averaged over steps.

    Attributes:
        probabilities: that the first, second, ... of them is on an accepted path, `[rows]`.
        certain: the share of steps in which it was on one for certain, as a root is, `[rows]`.
        kv_slots: KV slots that it reads beside those of the rows before it, `[rows]`.
        fed: how many of them entered a batch.
        present: the share of steps in which there were so many rows, `[rows]`; None: all of them.
    """

    probabilities: np.ndarray
    certain: np.ndarray
    kv_slots: np.ndarray
    fed: float
    present: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class TargetBatch:
    """The size that batches should have, in rows and in KV slots that their certain rows read, and
    the time of a token with them."""

    rows: int
    kv_slots: float
    ms_per_token: float


@dataclass(frozen=True, slots=True)
class PipelineState:
    """The state of the pipeline and its measurements, on which policies decide besides the tree.

    Times are milliseconds. A measurement that is None has not been made yet; the policies have a
    rule for that. `StepStats.state` (`pipespec.head.step_stats`) makes all but `end`, which
    `Sequence.policy_state` sets near the end of a text.

    Attributes, of which the scheduler states these:
        step: the pipeline step.
        requests: how many have their first token.
        end: the position at which the text ends at the latest; no row is needed from there on.
        elapsed_ms: how long this step has lasted.
        target: the size that the batches of this step should have, where rows cost what is
            measured; None: it is unknown, or any size is good.

    these are how the step decodes (`pipespec.head.decoding_modes`):
        num_stages: steps from a batch to its verdict: as many batches are in flight.
        most_held: nodes of a tree that the draft can hold.
        one_tree: a request has one batch at a time in the pipeline, of its whole tree; a pass then
            counts as a step through one stage.
        overlap: draft rounds are made beside the stages.
        speculates: whether speculation is measured as the faster way, or is to be measured.
        trial_rows: the size that is tried in this step; None: none.

    and these are counted and measured in steps:
        rounds: draft rounds that this step has had already.
        draft_ms, draft_nodes, draft_node_ms: a draft round of the mean size, that size, and what
            each node that is expanded takes of it.
        drafting_ms: how long the draft rounds of a step take whatever else the step does.
        verdict_ms: from the start of a step until its verdict arrives, in steps that decide tokens.
        tokens_per_step: tokens decided per step, of all requests, while speculating.
        step_ms: a whole step by the largest batch in the pipeline, `(rows, ms)` by rising rows,
            without what the KV slots add; empty if unknown.
        by_mean: `step_ms` is by the mean of the batches in the pipeline, as ranks share cores.
        slot_ms: what each KV slot that is read adds to a step.
        offered: the rows that could have entered batches so far; None: unknown.
        token_ms: a token at present, speculating or not.
        child_probabilities: of the first, second, ... candidate for a node on the accepted path,
            averaged over the proposals; empty if unknown.
    """

    num_stages: int
    step: int
    one_tree: bool = False
    requests: int = 1
    overlap: bool = True
    end: int = 2**62
    rounds: int = 0
    elapsed_ms: float = 0.0
    draft_ms: float | None = None
    draft_nodes: float = 0.0
    draft_node_ms: float = 0.0
    verdict_ms: float | None = None
    tokens_per_step: float | None = None
    step_ms: Points = ()
    by_mean: bool = False
    trial_rows: int | None = None
    speculates: bool = True
    slot_ms: float = 0.0
    offered: OfferedRows | None = field(default=None, compare=False)
    drafting_ms: float = 0.0
    target: TargetBatch | None = None
    most_held: int = 2**62
    token_ms: float | None = None
    child_probabilities: np.ndarray = field(default_factory=lambda: NO_PROBABILITIES, compare=False)

    @property
    def is_alone(self) -> bool:
        """Whether a batch is chosen for itself: no other is in the pipeline when it is sent, and no
        request gains by waiting, as one does whose tree grows beside the batches of others."""
        return self.num_stages == 1 and (self.requests == 1 or not self.overlap)

    def round_ms(self, nodes: float) -> float:
        """What a draft round takes that expands so many nodes; 0 if unknown."""
        return (self.draft_ms or 0.0) + self.draft_node_ms * (nodes - self.draft_nodes)

    @property
    def nodes_in_time(self) -> float:
        """How many nodes a draft round may expand that is to end before the verdict arrives."""
        if self.draft_ms is None or self.verdict_ms is None or not self.draft_node_ms:
            return np.inf
        left_ms = self.verdict_ms - self.elapsed_ms - self.draft_ms
        return self.draft_nodes + left_ms / self.draft_node_ms


@dataclass(frozen=True, slots=True)
class Expansion:
    """A draft round: expand `nodes` (indices) and keep the best `limit` candidates.

    `urgent`: the request has no batch until it is done. So its nodes come before those of others;
    and if the whole pipeline would idle, it is done whatever time it takes.
    """

    nodes: np.ndarray
    limit: int | None = None
    urgent: bool = False


class SpeculationPolicy(ABC):
    """The interface of a policy, as the scheduler uses it.

    A row is decided or pruned once it has passed the last stage, so a stage never holds more than
    `max_rows` nodes for every step that a batch takes through the pipeline.

    Attributes:
        has_fixed_size: width and children do not change what is selected.
    """

    has_fixed_size: ClassVar[bool] = False

    @property
    @abstractmethod
    def max_rows(self) -> int:
        """Rows per step at most, of one request or, if `shared`, of all."""

    @property
    @abstractmethod
    def children(self) -> int:
        """Candidates that the draft proposes for a node."""

    @property
    def needs_one_round(self) -> bool:
        """Whether further draft rounds in a step do not change what is selected."""
        return False

    @property
    @abstractmethod
    def max_nodes(self) -> int:
        """Nodes that a tree may hold."""

    def max_held(self, num_stages: int) -> int:
        """Nodes of a tree that the draft holds at most: those that were expanded or entered a
        batch. Each takes a KV slot of its model."""
        return self.max_nodes

    @property
    def shared(self) -> bool:
        """Whether all requests share `max_rows`."""
        return False

    @property
    def keeps_unfed(self) -> bool:
        """Whether a node that one batch leaves out may enter a later one; else it is dropped."""
        return True

    @property
    def whole(self) -> bool:
        """Whether the selected nodes enter a batch all together or not at all."""
        return False

    @property
    def refills(self) -> bool:
        """Whether draft rounds may delay a batch where that pays (`select_to_refill`)."""
        return False

    @property
    def row_cost(self) -> float | None:
        """What one more row adds to a step, as a share of the step, and what a row must be worth to
        enter it. 0: nothing, so all rows do; None: as measured."""
        return 0.0

    @abstractmethod
    def select_to_expand(self, tree: Tree, state: PipelineState) -> Expansion:
        """The next draft round; no nodes: the tree is as large as the policy wants it."""

    def select_to_refill(self, tree: Tree, state: PipelineState) -> np.ndarray:
        """Indices of the nodes that a draft round may expand before the next batch is sent, while
        the stages wait for it; none: batches are never delayed. `pipespec.head.refill` decides
        whether that pays."""
        return NO_NODES

    @abstractmethod
    def select_to_schedule(self, tree: Tree, state: PipelineState) -> np.ndarray:
        """Indices of the nodes that may enter the next batch, parents first; none: wait.

        The parent of each has entered a batch or precedes it in the result. The row budget then
        selects from those of all requests (`pipespec.head.row_budget`).
        """


# --- how many draft rounds fit into a step --------------------------------------------------------

# A round is free as long as it ends before the step's verdict arrives. SwiftSpec 3.1 fixes d
# rounds per verification from times measured beforehand; `auto` measures while it decodes.


def check_rounds(rounds: int | str) -> None:
    """Raise ConfigError unless `rounds` is "auto" or a whole number within its limits."""
    if rounds != AUTO:
        check_whole("proposer.rounds", rounds, 1, MAX_ROUNDS, f", or {AUTO}")


def has_time_for_round(rounds: int | str, state: PipelineState) -> bool:
    """Whether this step has time for another draft round.

    A number allows so many. `auto` allows one round, and more as long as the next one is expected
    to end before the verdict arrives; until both times are measured it allows one.
    """
    if rounds != AUTO:
        return state.rounds < int(rounds)
    if not state.rounds:
        return True
    if state.draft_ms is None or state.verdict_ms is None:
        return False
    return state.elapsed_ms + state.draft_ms <= state.verdict_ms
