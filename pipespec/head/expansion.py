"""The nodes of all requests that one draft round expands, by policy and grammar."""

from __future__ import annotations

import collections.abc
from collections.abc import Callable, Iterable
from dataclasses import replace

from pipespec.head.policies.policy import Expansion, SpeculationPolicy
from pipespec.head.row_budget import RequestCandidates, split_expansion
from pipespec.head.scheduler_types import ProposalBatch, ProposalPart
from pipespec.head.sequence import Sequence


def next_proposal_batch(
    sequences: Iterable[Sequence],
    policy: SpeculationPolicy,
    select: Callable[[Sequence], Expansion],
    budget: Callable[[int], int],
) -> tuple[ProposalBatch | None, bool]:
    """The draft round that is wanted, and whether the pipeline idles until it is done.

    `select` gives the nodes of a request to expand, `budget` the number of nodes of all by the
    number of requests. A token that a grammar determines is added to the tree without the proposer.
    """
    among = list(sequences)
    while True:
        parts, urgent = _wanted(among, policy, select, budget)
        guided = [each for part in parts if (each := _guided(part, policy)) is not None]
        if guided or not parts:  # else the grammars determined all of these; look further
            return (ProposalBatch(tuple(guided), policy.children) if guided else None), urgent


def _wanted(
    sequences: collections.abc.Sequence[Sequence],
    policy: SpeculationPolicy,
    select: Callable[[Sequence], Expansion],
    budget: Callable[[int], int],
) -> tuple[list[ProposalPart], bool]:
    """The most probable nodes that are wanted."""
    wanted: list[tuple[Sequence, int | None, RequestCandidates]] = []
    urgent = False
    for sequence in sequences:
        expansion = select(sequence)
        nodes = sequence.drop_past_end(expansion.nodes)
        if len(nodes):
            wanted.append((sequence, expansion.limit, RequestCandidates(sequence.tree, nodes)))
            urgent |= expansion.urgent
    shares = split_expansion([offer for _, _, offer in wanted], budget(len(wanted)))
    parts = [
        ProposalPart(
            sequence, nodes, limit, max_path_tokens=_max_path_tokens(sequence, policy) * len(nodes)
        )
        for (sequence, limit, _), nodes in zip(wanted, shares, strict=True)
        if len(nodes)
    ]
    return parts, urgent


def _max_path_tokens(sequence: Sequence, policy: SpeculationPolicy) -> int:
    """How many draft tokens below its children a node may bring along: as many as children.

    0 where a policy takes level by level or a tree of fixed shape, and where a grammar limits what
    may follow each draft token.
    """
    takes_any = policy.keeps_unfed and not policy.whole
    return policy.children if takes_any and sequence.guide is None else 0


def _guided(part: ProposalPart, policy: SpeculationPolicy) -> ProposalPart | None:
    """The part of a round within the grammar of its request, if it has one; None: the grammar
    determines all."""
    sequence, nodes = part.sequence, part.nodes
    if sequence.guide is None:
        return part
    if policy.keeps_unfed:
        nodes, allowed = sequence.guide.extend(sequence.tree, nodes, sequence.last_position)
    else:  # the draft keeps to one level
        allowed = sequence.guide.allowed(sequence.tree, nodes)
    return replace(part, nodes=nodes, allowed=allowed) if len(nodes) else None
