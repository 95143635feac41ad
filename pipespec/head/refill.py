"""Whether a draft round before the next batch is worth the time for which the stages wait.

Draft rounds beside the stages cost nothing. After a miss, however, the tree is a root without
children; and where the draft has no device of its own it works only while the stages wait. A round
then delays the batch, and adds candidates to it. SwiftSpec (Algorithm 1) drafts after a miss before
it sends; here measured times decide. Everything is pure; docs/policies.md derives the rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipespec.head.expansion import next_proposal_batch
from pipespec.head.policies.draft_rounds import may_delay_batch
from pipespec.head.policies.policy import Expansion, PipelineState, SpeculationPolicy
from pipespec.head.row_budget import lost_by_waiting, step_ms_of
from pipespec.head.row_plan import RowPlan
from pipespec.head.scheduler_types import ProposalBatch
from pipespec.head.sequence import Sequence


def next_refill(
    plan: RowPlan,
    policy: SpeculationPolicy,
    state: PipelineState,
    rounds: int | str,
    budget: Callable[[int], int],
    *,
    overlap: bool = True,
) -> ProposalBatch | None:
    """The draft round that is worth the time for which it delays the batch of `plan`; None: there
    is none. `rounds` is how many a step may have, or "auto"; `budget` gives rows and nodes by the
    number of requests; `overlap`: the draft works beside the stages too."""
    if not policy.refills or state.target is None or not may_delay_batch(rounds, state):
        return None
    limit = min(budget(len(plan.nodes)), state.target.rows)
    batch = NextBatch(_probabilities(plan.nodes), limit, state, overlap)
    if batch.least >= 0:  # nothing is more probable than its rows, such as roots under load
        return None

    def select(sequence: Sequence) -> Expansion:
        tree = sequence.tree
        nodes = policy.select_to_refill(tree, sequence.policy_state(state))
        return Expansion(tree.most_probable(nodes[tree.cum[nodes] > batch.least], limit))

    sequences = [sequence for sequence, _ in plan.nodes]
    parents = _probabilities([(each, select(each).nodes) for each in sequences])
    if batch.gain_ms(parents) <= (state.draft_ms or 0.0):
        return None
    work, _ = next_proposal_batch(sequences, policy, select, budget)
    return work


def _probabilities(nodes: list[tuple[Sequence, np.ndarray]]) -> np.ndarray:
    """Of nodes of some trees, to be on accepted paths, `[nodes]`."""
    cum = [sequence.tree.cum[each] for sequence, each in nodes]
    return np.exp(np.concatenate([np.empty(0), *cum]))


@dataclass(frozen=True)
class NextBatch:
    """A batch, to which a draft round could add candidates.

    Attributes:
        rows: the probabilities of the rows that it has without them, `[rows]`.
        limit: rows that it has at most.
        state: the state of the pipeline, with a target batch.
        overlap: the draft works beside the stages too.
    """

    rows: np.ndarray
    limit: int
    state: PipelineState
    overlap: bool = True

    @property
    def least(self) -> float:
        """The log-probability above which a node's best child enters the batch."""
        best = self.state.child_probabilities.max(initial=0.0)
        if len(self.rows) < self.limit or not best:
            return -np.inf
        return float(np.log(self.rows.min(initial=1.0) / best))

    def gain_ms(self, parents: np.ndarray) -> float:
        """The milliseconds that the children of nodes with probabilities `parents` `[nodes]` save,
        beyond what their rows add to the step; inf: unknown until the draft has proposed any."""
        target, children = self.state.target, self.state.child_probabilities
        assert target is not None
        if not len(parents):
            return 0.0
        if not len(children):
            return np.inf
        candidates = np.outer(parents, children).ravel()
        merged = -np.sort(-np.concatenate((self.rows, candidates)))[: max(self.limit, 1)]
        share = lost_by_waiting(self.state)
        if self.overlap:
            # A candidate that misses this batch can enter the next, one of the steps of a pass
            # later; and of many requests, others have candidates for its row.
            share = 1 / (self.state.num_stages * self.state.requests ** (1 / 3))
        saved_ms = target.ms_per_token * share
        # In a longer pipeline other batches have the target size, up to which rows add nothing.
        others = target.rows if self.state.num_stages > 1 else 0
        sizes = np.maximum([len(self.rows), len(merged)], others)
        before_ms, after_ms = step_ms_of(self.state, sizes).tolist()
        return float(saved_ms * (merged.sum() - self.rows.sum()) - (after_ms - before_ms))
