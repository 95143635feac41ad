"""Tenants with so many answers that they would slow down those of others.

A tenant, such as an API key, is a *crowd* in a step if its answers want more rows than the tenants
with fewer answers leave them. A crowd has so many rows of each batch and no more: its roots, which
take turns, then its most probable draft tokens. What is measured in steps, and how they decode, is
by the answers of the others, as if these were alone; so one request with many answers slows down
another client's by little more than the time of its rows. docs/how-it-works/scheduler.md has it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from pipespec.head.policies.policy import NO_NODES, PipelineState, SpeculationPolicy
from pipespec.head.row_budget import RequestCandidates, select_rows
from pipespec.head.sequence import Sequence as Decoded
from pipespec.head.step_stats import StepStats
from pipespec.head.tree import ROOT

# How many times as long a step with answers may last with the rows of crowds, or of prompts.
MAX_SLOWDOWN = 1.5


def rows_of_crowds(answers: Mapping[str, int], stats: StepStats, most_rows: int) -> dict[str, int]:
    """The crowds among tenants, and how many rows a batch of at most `most_rows` has of each.

    These make a step at most `MAX_SLOWDOWN` times as long as the rows of the tenants with fewer
    answers do. But each has as many rows as the tenant with the fewest answers has roots, and where
    more rows take no longer, an equal share.

    Args:
        answers: of each tenant, that are decoded.
    """
    if len(answers) < 2:
        return {}
    crowds: dict[str, int] = {}
    taken, fewest, share = 0, min(answers.values()), most_rows // len(answers)
    for tenant, count in sorted(answers.items(), key=lambda item: item[1]):
        wanted = max(round(count * stats.rows_per_answer), count)
        rows = max(min(wanted, share), count)
        if taken and count > fewest:
            in_time = stats.rows_beside(MAX_SLOWDOWN, taken)
            most = most_rows if in_time is None else min(in_time, most_rows)
            if wanted > (room := max(most - taken, fewest)):
                crowds[tenant] = rows = room
        taken += rows
    return crowds


def rows_for_drafts(
    crowds: Mapping[str, int], answers: Mapping[str, int], policy: SpeculationPolicy, steps: int
) -> int:
    """How many of the rows of crowds are left beside their roots, of which each enters one of so
    many steps."""
    if not feeds_single_nodes(policy):
        return 0
    return sum(max(rows - math.ceil(answers[each] / steps), 0) for each, rows in crowds.items())


def guests(
    sequences: Sequence[Decoded],
    crowds: Mapping[str, int],
    policy: SpeculationPolicy,
    state: PipelineState,
    free_slots: int,
    spare_slots: int,
) -> list[tuple[Decoded, np.ndarray]]:
    """What the next batch has of crowds, of whose sequences those are first whose roots have waited
    longest: the nodes of their trees. Their roots may take `free_slots`, and what these leave of
    `spare_slots` may be taken by draft tokens."""
    found: dict[Decoded, np.ndarray] = {}
    for tenant, most_rows in crowds.items():
        own = [each for each in sequences if each.request.tenant == tenant]
        roots = [each for each in own if not each.tree.fed[ROOT]][: min(most_rows, free_slots)]
        found |= {each: np.array([ROOT]) for each in roots}
        free_slots, spare_slots = free_slots - len(roots), spare_slots - len(roots)
        left = min(most_rows - len(roots), free_slots, spare_slots)
        if left <= 0 or not feeds_single_nodes(policy):
            continue
        own = [each for each in own if each in found or each.tree.fed[ROOT]]
        drafts = select_rows([_drafts(each, policy, state) for each in own], left, 0.0, state)
        for each, nodes in zip(own, drafts.nodes, strict=True):
            if len(nodes):
                found[each] = np.concatenate((found.get(each, NO_NODES), nodes))
        num_drafts = sum(map(len, drafts.nodes))
        free_slots, spare_slots = free_slots - num_drafts, spare_slots - num_drafts
    return [*found.items()]


def feeds_single_nodes(policy: SpeculationPolicy) -> bool:
    """Whether a batch may have some draft tokens of a tree now and others later."""
    return policy.keeps_unfed and not policy.whole


def _drafts(
    sequence: Decoded, policy: SpeculationPolicy, state: PipelineState
) -> RequestCandidates:
    nodes = policy.select_to_schedule(sequence.tree, sequence.policy_state(state))
    return RequestCandidates(sequence.tree, sequence.drop_past_end(nodes[nodes != ROOT]))
