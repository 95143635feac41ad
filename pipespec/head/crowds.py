"""Tenants with so many answers that they would slow down those of others.

A tenant, such as an API key, is a *crowd* in a step if its answers want more rows than the tenants
with fewer answers leave them. A crowd has so many rows of each batch and no more: its roots, which
take turns, then its most probable draft tokens. What is measured in steps, and how they decode, is
by the answers of the others, as if these were alone; so one request with many answers slows down
another client's by little more than the time of its rows. docs/how-it-works/scheduler.md has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from pipespec.head.policies.policy import PipelineState, SpeculationPolicy
from pipespec.head.row_budget import RequestCandidates, select_rows
from pipespec.head.sequence import Sequence
from pipespec.head.step_stats import StepStats
from pipespec.head.tree import ROOT

# How many times as long a step may last with the rows of crowds as without them.
MAX_SLOWDOWN = 1.5

# Sequences and the nodes of their trees.
Nodes = list[tuple[Sequence, np.ndarray]]


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
            in_time = stats.rows_within(MAX_SLOWDOWN, taken)
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
    if policy.whole or not policy.keeps_unfed:
        return 0
    return sum(max(rows - math.ceil(answers[each] / steps), 0) for each, rows in crowds.items())


def guests(
    sequences: Iterable[Sequence],
    crowds: Mapping[str, int],
    policy: SpeculationPolicy,
    state: PipelineState,
    free_slots: int,
) -> Nodes:
    """What the next batch has of crowds; `sequences` are in the order in which their roots go."""
    found: Nodes = []
    for tenant, rows in crowds.items():
        own = [each for each in sequences if each.request.tenant == tenant]
        left = min(rows, free_slots)
        roots = [each for each in own if not each.tree.fed[ROOT]]
        nodes = {each: np.array([ROOT]) for each in roots[:left]}
        left -= len(nodes)
        if left and policy.keeps_unfed and not policy.whole:
            ready = [each for each in own if each in nodes or each.tree.fed[ROOT]]
            candidates = [_drafts(each, policy, state) for each in ready]
            drafts = select_rows(candidates, left, 0.0, state).nodes
            for each, more in zip(ready, drafts, strict=True):
                if len(more):
                    nodes[each] = np.concatenate((nodes.get(each, more[:0]), more))
                    left -= len(more)
        free_slots -= sum(map(len, nodes.values()))
        found += nodes.items()
    return found


def _drafts(
    sequence: Sequence, policy: SpeculationPolicy, state: PipelineState
) -> RequestCandidates:
    nodes = policy.select_to_schedule(sequence.tree, sequence.policy_state(state))
    return RequestCandidates(sequence.tree, sequence.drop_past_end(nodes[nodes != ROOT]))
