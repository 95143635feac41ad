"""The nodes of all requests that one draft round expands, by policy and grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from pipespec.head.policies.policy import Expansion, SpeculationPolicy
from pipespec.head.row_budget import RequestCandidates, split_expansion
from pipespec.head.scheduler_types import ProposalPart
from pipespec.head.sequence import Sequence as TreeSequence
from pipespec.head.structured_output import LookAhead, add_ahead

# The nodes of a request that a round expands.
Select = Callable[[TreeSequence], Expansion]


def plan_expansion(
    sequences: Sequence[TreeSequence],
    policy: SpeculationPolicy,
    select: Select,
    budget: Callable[[int], int],
) -> tuple[list[ProposalPart], bool]:
    """The most probable nodes that `select` gives, and whether the pipeline idles until they are
    expanded; `budget` is the number of nodes of all by the number of requests."""
    wanted: list[tuple[TreeSequence, int | None, RequestCandidates]] = []
    urgent = False
    for sequence in sequences:
        expansion = select(sequence)
        nodes = sequence.drop_past_end(expansion.nodes)
        if len(nodes):
            wanted.append((sequence, expansion.limit, RequestCandidates(sequence.tree, nodes)))
            urgent |= expansion.urgent
    shares = split_expansion([offer for _, _, offer in wanted], budget(len(wanted)))
    parts = []
    for (sequence, limit, _), nodes in zip(wanted, shares, strict=True):
        if not len(nodes):
            continue
        guide, tree = sequence.guide, sequence.tree
        num_path_tokens, allowed = 0, None
        ahead: tuple[LookAhead, ...] = ()
        if guide is None:
            # A policy that takes level by level or a tree of fixed shape has no use for paths.
            if policy.keeps_unfed and not policy.whole:
                num_path_tokens = policy.children * len(nodes)
        elif policy.keeps_unfed:
            ahead = guide.look_ahead(tree, nodes, sequence.last_position)
        else:  # the draft keeps to one level
            allowed = guide.allowed(tree, nodes)
        parts.append(ProposalPart(sequence, nodes, limit, allowed, num_path_tokens, ahead))
    return parts, urgent


def add_determined(part: ProposalPart) -> ProposalPart | None:
    """Add the tokens that a grammar determines below the nodes of a part to the tree; returns the
    part of what may follow these, None: nothing."""
    if not part.ahead:
        return part
    nodes, allowed = add_ahead(part.sequence.tree, part.ahead)
    return replace(part, nodes=nodes, allowed=allowed, ahead=()) if len(nodes) else None
