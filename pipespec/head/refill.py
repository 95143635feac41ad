"""Whether a draft round before the next batch is worth the time for which the stages wait.

After a miss the tree is a root without children; and where the draft has no device of its own it
works only while the stages wait. A round then delays the batch, and adds candidates to it.
SwiftSpec (Algorithm 1) drafts after a miss before it sends; here measured times decide.
docs/policies.md derives the rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipespec.head.policies.policy import AUTO, Expansion, PipelineState, SpeculationPolicy
from pipespec.head.row_budget import lost_by_waiting, step_ms_of, token_ms
from pipespec.head.row_plan import RowPlan
from pipespec.head.sequence import Sequence

# Rounds that are looked ahead: few rows may save less than they cost where many save more.
LOOK_AHEAD = 8
TINY = 1e-9  # a probability


def worthwhile_refill(
    plan: RowPlan, policy: SpeculationPolicy, rounds: int | str
) -> list[tuple[Sequence, Expansion]]:
    """What a draft round expands of each request that is worth the time for which it delays the
    batch of `plan`; none: nothing is. `rounds` is how many a step may have, or "auto"."""
    state, limit = plan.state, plan.max_nodes
    if not policy.refills or not state.step_ms:
        return []
    if rounds != AUTO and state.rounds >= int(rounds):  # a number counts those that delay too
        return []
    if not state.is_alone:
        if state.target is None:
            return []
        limit = min(limit, state.target.rows)
    offered = plan.selection.probabilities if state.is_alone else None
    beside = plan.num_prompt_rows + plan.num_guests
    batch = NextBatch(_probabilities(plan.nodes), limit, state, offered, beside)
    if batch.least >= 0:  # nothing is more probable than its rows, such as roots under load
        return []
    wanted = []
    for sequence, _ in plan.nodes:
        tree = sequence.tree
        nodes = policy.select_to_refill(tree, sequence.policy_state(state))
        wanted.append((sequence, tree.most_probable(nodes[tree.cum[nodes] > batch.least], limit)))
    if not batch.is_round_worth(_probabilities(wanted)):
        return []
    return [(sequence, Expansion(nodes)) for sequence, nodes in wanted]


def _probabilities(nodes: list[tuple[Sequence, np.ndarray]]) -> np.ndarray:
    """Of nodes of some trees, to be on accepted paths, `[nodes]`."""
    cum = [sequence.tree.cum[each] for sequence, each in nodes]
    return np.exp(np.concatenate([np.empty(0), *cum]))


@dataclass(frozen=True)
class NextBatch:
    """A batch, to which draft rounds could add candidates.

    Attributes:
        rows: the probabilities of the rows that it has without them, `[rows]`.
        limit: rows that it has at most.
        state: the state of the pipeline, with known times of steps.
        offered: the probabilities of all rows that it could have without them, if it is chosen for
            itself.
        prompt_rows: rows of prompts and of guests beside them.
    """

    rows: np.ndarray
    limit: int
    state: PipelineState
    offered: np.ndarray | None = None
    prompt_rows: int = 0

    @cached_property
    def least(self) -> float:
        """The log-probability above which a node's best child enters the batch, and saves more
        than the draft takes for the node."""
        best = self.state.child_probabilities.max(initial=0.0)
        if not best:
            return -np.inf
        least, cost_ms = TINY, self.state.draft_node_ms
        if len(self.rows) >= self.limit:
            least = self.rows.min(initial=1.0)
        elif self.state.is_alone:
            more = np.arange(1, 1 + self.limit - len(self.rows))
            now_ms, *more_ms = self._step_ms(np.array([0, *more]) + len(self.rows)).tolist()
            cost_ms += float(np.min((np.array(more_ms) - now_ms) / more))  # of the cheapest rows
        return float(np.log(max(least, cost_ms / (token_ms(self.state) * self._share)) / best))

    @property
    def _share(self) -> float:
        """The share of a token's worth that a candidate loses which misses this batch."""
        if not self.state.overlap:
            return lost_by_waiting(self.state)
        # It can enter the next, one of the steps of a pass later; and of many requests, others have
        # candidates for its row.
        return 1 / (self.state.num_stages * self.state.requests ** (1 / 3))

    def is_round_worth(self, parents: np.ndarray) -> bool:
        """Whether some number of rounds, of which the first expands nodes with probabilities
        `parents` `[nodes]`, saves more than they take."""
        children = self.state.child_probabilities
        if not len(parents):
            return False
        if not len(children):
            return True  # unknown until the draft has proposed any
        alone = self.state.is_alone and not self.state.overlap
        without_drafts = self.rows.min(initial=1.0) == 1.0 and not self.prompt_rows
        if alone and without_drafts and not self.state.rounds:
            return True  # the policy, which could decode so, has chosen not to
        merged = self.rows if self.offered is None else self.offered
        least, drafting_ms = np.exp(self.least), 0.0
        for _ in range(LOOK_AHEAD if alone else 1):
            drafting_ms += self.state.round_ms(len(parents))
            parents = _top(np.outer(parents, children).ravel(), self.limit)
            merged = _top(np.concatenate((merged, parents)), self.limit)
            if self.saved_ms(merged) > drafting_ms:
                return True
            parents = parents[parents > least]
            if not len(parents):
                break
        return False

    def saved_ms(self, merged: np.ndarray) -> float:
        """The milliseconds that the best batch of `merged` `[candidates]`, probabilities that fall,
        saves beyond what its rows add to the step."""
        saved = token_ms(self.state) * self._share * (np.cumsum(merged) - self.rows.sum())
        before_ms, *after_ms = self._step_ms(
            np.array([len(self.rows), *range(1, 1 + len(merged))])
        ).tolist()
        saved -= np.array(after_ms) - before_ms
        return float(saved.max() if self.state.is_alone else saved[-1])

    def _step_ms(self, rows: np.ndarray) -> np.ndarray:
        """Milliseconds of the step with so many rows of trees. In a longer pipeline other batches
        have the target size, up to which rows add nothing."""
        others = 0
        if self.state.num_stages > 1 and self.state.target is not None:
            others = self.state.target.rows
        return step_ms_of(self.state, np.maximum(self.prompt_rows + rows, others))


def _top(probabilities: np.ndarray, count: int) -> np.ndarray:
    """The largest `count`, at least one, that fall."""
    return -np.sort(-probabilities)[: max(count, 1)]
