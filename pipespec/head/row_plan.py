"""How the rows of a step are divided among roots, prompts and draft tokens.

Roots come first, the one that has waited longest before all others, then prompts, then draft
tokens. Where prompts are read beside running answers, draft tokens have a share before prompts, a
prompt gets at least one row, and the batch is no larger than keeps the answers at their pace.
The rows of crowds (`pipespec.head.crowds`) are beside all of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipespec.core import NUM_COLUMNS
from pipespec.head.admission import Admission
from pipespec.head.crowds import MAX_SLOWDOWN, guests
from pipespec.head.policies.policy import PipelineState, SpeculationPolicy
from pipespec.head.row_budget import RequestCandidates, Selection, select_rows, total_certain
from pipespec.head.scheduler_types import SchedulerConfig
from pipespec.head.sequence import Sequence
from pipespec.head.step_stats import StepStats
from pipespec.head.tree import ROOT

# Of the rows beside roots of a step in which prompts are read too, one of so many is kept for draft
# tokens that pay, so that answers do not fall back to a token per pass; a prompt then takes at most
# 4/3 of its time.
DRAFT_SHARE = 4

# Sequences, and the nodes of their trees that enter a batch.
Fed = list[tuple[Sequence, np.ndarray]]


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The rows of one step.

    Attributes:
        nodes: of the tree of each sequence that has read its prompt, but for those of crowds.
        guests: likewise of sequences of crowds.
        prompts: sequences that read their prompts, and up to which token.
        selection: the choice among all nodes that were offered.
        max_nodes: rows of trees that the step could have beside its prompts, if more of them were
            worth it.
        state: of the pipeline when it was made.
    """

    nodes: Fed
    guests: Fed
    prompts: list[tuple[Sequence, int]]
    selection: Selection
    max_nodes: int
    state: PipelineState

    @property
    def num_prompt_rows(self) -> int:
        return sum(end - each.prefilled for each, end in self.prompts)

    @property
    def num_guests(self) -> int:
        """Rows of crowds."""
        return sum(len(nodes) for _, nodes in self.guests)

    @property
    def fed(self) -> Fed:
        """The sequences of whose trees nodes enter the batch, and these."""
        return [(each, nodes) for each, nodes in (*self.nodes, *self.guests) if len(nodes)]

    @property
    def is_empty(self) -> bool:
        return not self.prompts and not self.guests and not any(len(each) for _, each in self.nodes)

    @property
    def unfed_roots(self) -> list[Sequence]:
        """The sequences that have read their prompt and whose root has not been fed."""
        return [each for each, _ in self.nodes if not each.tree.fed[ROOT]]

    def rows(self, fed: Fed) -> np.ndarray:
        """As rows of a batch, `[rows, 6]`: those of prompts, then those of trees, as of `fed`."""
        rows = [np.empty((0, NUM_COLUMNS), np.int64)]
        rows += [each.context.rows(each.prefilled, end) for each, end in self.prompts]
        rows += [each.tree.rows(each.number, nodes) for each, nodes in fed]
        return np.concatenate(rows)


def plan_rows(
    config: SchedulerConfig,
    admission: Admission,
    policy: SpeculationPolicy,
    stats: StepStats,
    state: PipelineState,
    *,
    mixes: bool,
    crowds: Mapping[str, int],
) -> RowPlan:
    """The rows to feed now; `mixes`: some request had a token when this step began, so that prompts
    are read beside its answer. `crowds`: of `rows_of_crowds`."""
    sequences = sorted(
        (each for each in admission.sequences.values() if not each.prompt_left),
        key=lambda each: each.root_waits_since,
    )
    free_slots, beside, num_guests = admission.free_slots, Fed(), 0
    if crowds:
        ready = sequences
        sequences = [each for each in ready if each.request.tenant not in crowds]
        for_roots = free_slots - sum(not each.tree.fed[ROOT] for each in sequences)
        spare = free_slots - admission.reserved_slots
        beside = guests(ready, crowds, policy, state, max(for_roots, 0), spare)
        num_guests = sum(len(nodes) for _, nodes in beside)
        free_slots -= num_guests
    candidates = [_candidates(each, policy, state) for each in sequences]
    budget = min(config.row_budget(policy, len(candidates)), free_slots)
    num_roots = min(total_certain(candidates), budget)
    batch_rows = config.rows - num_guests
    mixed = mixes and any(each.prompt_left for each in admission.sequences.values())
    if mixed:  # prompts are read beside running answers
        if candidates:  # as many roots as a batch has rows leave one row for prompts
            num_roots = min(num_roots, max(batch_rows - 1, candidates[0].num_certain))
        in_time = stats.rows_within(MAX_SLOWDOWN, num_roots, stats.without_prompts.value)
        if in_time is not None:
            batch_rows = min(batch_rows, max(in_time - num_guests, num_roots + 1))
    # Draft tokens get the slots that no request needs for its text.
    spare_slots = max(free_slots - admission.reserved_slots, 0)
    budget = min(budget, max(num_roots, spare_slots))

    def select(rows: int, prompt_rows: int) -> Selection:
        most = min(budget, rows)
        return select_rows(candidates, most, policy.row_cost, state, prompt_rows + num_guests)

    num_kept = num_shared = num_roots
    if mixed:
        num_shared += (batch_rows - num_roots) // DRAFT_SHARE
        share = select(num_shared, batch_rows - num_shared)
        num_kept = max(num_roots, sum(map(len, share.nodes)))
    prompts = _prompts(config, admission, min(batch_rows, free_slots) - num_kept, state.step)
    prompt_rows = sum(end - each.prefilled for each, end in prompts)
    selection = select(batch_rows - prompt_rows, prompt_rows)
    max_nodes = min(budget, max(num_shared, batch_rows - prompt_rows))
    nodes = list(zip(sequences, selection.nodes, strict=True))
    return RowPlan(nodes, beside, prompts, selection, max_nodes, state)


def _prompts(
    config: SchedulerConfig, admission: Admission, num_rows: int, step: int
) -> list[tuple[Sequence, int]]:
    """Up to where prompts are read next, in `num_rows` rows: those of the tenant that was served
    least first. Of its prompts the first one to be read changes from step to step, so that a short
    prompt does not wait for a long one."""
    num_rows = min(num_rows, config.prefill_chunk)
    reading = [each for each in admission.sequences.values() if each.prompt_left]
    first = step % max(len(reading), 1)
    prompts = []
    served = admission.served
    by_turns = (*reading[first:], *reading[:first])
    for sequence in sorted(by_turns, key=lambda each: served[each.request.tenant]):
        end = min(sequence.prefilled + num_rows, sequence.committed_len)
        end = admission.cache.chunk_end(sequence.number, sequence.prefilled, end)
        if end > sequence.prefilled:
            prompts.append((sequence, end))
            num_rows -= end - sequence.prefilled
    return prompts


def _candidates(
    sequence: Sequence, policy: SpeculationPolicy, state: PipelineState
) -> RequestCandidates:
    nodes = policy.select_to_schedule(sequence.tree, sequence.policy_state(state))
    return RequestCandidates(
        sequence.tree,
        sequence.drop_past_end(nodes),
        policy.whole,
        context_len=len(sequence.context.tokens),
    )
