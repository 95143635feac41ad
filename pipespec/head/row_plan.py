"""How the rows of a step are divided among roots, prompts and draft tokens.

Roots come first, the one that has waited longest before all others, then prompts, then draft
tokens. Where prompts are read beside running answers, draft tokens have a share before prompts, a
prompt gets at least one row, and the batch is no larger than keeps the answers at their pace.
Where several tenants decode, one with many answers slows the others down no more than that: its
roots take turns (`_shared_out`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from pipespec.core import NUM_COLUMNS
from pipespec.head.admission import Admission
from pipespec.head.policies.policy import PipelineState, SpeculationPolicy
from pipespec.head.row_budget import RequestCandidates, Selection, select_rows, total_certain
from pipespec.head.scheduler_types import SchedulerConfig
from pipespec.head.sequence import Sequence
from pipespec.head.step_stats import StepStats
from pipespec.head.tree import ROOT

# How many times as long a step may last with rows of prompts, while answers are running; and with
# the roots of a tenant, while those of others are decoded.
MAX_SLOWDOWN = 1.5
# Of such a step's rows beside roots, one of so many is kept for draft tokens that pay, so that
# answers do not fall back to a token per pass; a prompt then takes at most 4/3 of its time.
DRAFT_SHARE = 4


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The rows of one step.

    Attributes:
        nodes: of the tree of each sequence that has read its prompt.
        prompts: sequences that read their prompts, and up to which token.
        selection: the choice among all nodes that were offered.
        max_nodes: rows of trees that the step could have beside its prompts, if more of them were
            worth it.
        state: of the pipeline when it was made.
    """

    nodes: list[tuple[Sequence, np.ndarray]]
    prompts: list[tuple[Sequence, int]]
    selection: Selection
    max_nodes: int
    state: PipelineState

    @property
    def num_prompt_rows(self) -> int:
        return sum(end - each.prefilled for each, end in self.prompts)

    @property
    def is_empty(self) -> bool:
        return not self.prompts and not any(len(nodes) for _, nodes in self.nodes)

    @property
    def unfed_roots(self) -> list[Sequence]:
        """The sequences that have read their prompt and whose root has not been fed."""
        return [each for each, _ in self.nodes if not each.tree.fed[ROOT]]

    def rows(self) -> np.ndarray:
        """As rows of a batch, `[rows, 6]`: those of prompts, then those of trees."""
        rows = [np.empty((0, NUM_COLUMNS), np.int64)]
        rows += [each.context.rows(each.prefilled, end) for each, end in self.prompts]
        rows += [each.tree.rows(each.number, nodes) for each, nodes in self.nodes if len(nodes)]
        return np.concatenate(rows)


def plan_rows(
    config: SchedulerConfig,
    admission: Admission,
    policy: SpeculationPolicy,
    stats: StepStats,
    state: PipelineState,
    *,
    mixes: bool,
) -> RowPlan:
    """The rows to feed now; `mixes`: some request had a token when this step began, so that prompts
    are read beside its answer."""
    sequences = sorted(
        (each for each in admission.sequences.values() if not each.prompt_left),
        key=lambda each: each.root_waits_since,
    )
    sequences, most_rows = _shared_out(sequences, stats)
    candidates = [_candidates(each, policy, state) for each in sequences]
    free_slots = admission.free_slots
    budget = min(config.row_budget(policy, len(candidates)), free_slots)
    num_roots = min(total_certain(candidates), budget)
    batch_rows = config.rows
    mixed = mixes and any(each.prompt_left for each in admission.sequences.values())
    if mixed:  # prompts are read beside running answers
        if candidates:  # as many roots as a batch has rows leave one row for prompts
            num_roots = min(num_roots, max(batch_rows - 1, candidates[0].num_certain))
        in_time = stats.rows_within(MAX_SLOWDOWN, num_roots, stats.without_prompts.value)
        if in_time is not None:
            batch_rows = min(batch_rows, max(in_time, num_roots + 1))
    elif most_rows is not None:
        batch_rows = min(batch_rows, max(most_rows, num_roots))
    # Draft tokens get the slots that no request needs for its text.
    spare_slots = max(free_slots - admission.reserved_slots, 0)
    budget = min(budget, max(num_roots, spare_slots))

    def select(rows: int, prompt_rows: int) -> Selection:
        most = min(budget, rows)
        return select_rows(candidates, most, policy.row_cost, state, prompt_rows)

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
    return RowPlan(nodes, prompts, selection, max_nodes, state)


def _shared_out(sequences: list[Sequence], stats: StepStats) -> tuple[list[Sequence], int | None]:
    """Those that may have rows in this step, and how many rows it may have if there are others.

    A tenant's roots make a step at most `MAX_SLOWDOWN` times as long as the roots of the tenants
    with fewer running answers do; but it has as many as each of these. The roots that have waited
    longest go first.
    """
    if len({each.request.tenant for each in sequences}) < 2:
        return sequences, None
    counts = Counter(each.request.tenant for each in sequences)
    most_rows, total, before = None, 0, 1
    for tenant, count in sorted(counts.items(), key=lambda item: item[1]):
        rows = stats.rows_within(MAX_SLOWDOWN, total) if total else None
        if rows is not None and count > max(rows - total, before):
            most_rows, counts[tenant] = rows, max(rows - total, before)
        before = counts[tenant]
        total += before
    if most_rows is None:
        return sequences, None
    chosen = []
    for each in sequences:
        if not each.tree.fed[ROOT]:
            counts[each.request.tenant] -= 1
        if each.tree.fed[ROOT] or counts[each.request.tenant] >= 0:
            chosen.append(each)
    return chosen, most_rows


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
