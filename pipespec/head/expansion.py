"""The nodes of all requests that one draft round expands, by policy and grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from pipespec.head.policies.policy import Expansion, SpeculationPolicy
from pipespec.head.proposer import ProposalRequest
from pipespec.head.row_budget import split_expansion
from pipespec.head.scheduler_types import ProposalBatch, ProposalPart
from pipespec.head.sequence import Sequence as TreeSequence
from pipespec.head.structured_output import LookAhead, add_ahead


def plan_expansion(
    wanted: Sequence[tuple[TreeSequence, Expansion]],
    policy: SpeculationPolicy,
    budget: Callable[[int], int],
) -> ProposalBatch | None:
    """The round that expands the most probable of the wanted nodes, urgent ones first; None: there
    are none. `budget` is the number of nodes of all by the number of requests."""
    found = [
        (sequence, expansion, nodes)
        for sequence, expansion in wanted
        if len(nodes := sequence.drop_past_end(expansion.nodes))
    ]
    offers = [(each.tree, nodes) for each, _, nodes in found]
    urgent = [expansion.urgent for _, expansion, _ in found]
    shares = split_expansion(offers, budget(len(found)), urgent)
    parts = tuple(
        _part(sequence, nodes, expansion.limit, policy)
        for (sequence, expansion, _), nodes in zip(found, shares, strict=True)
        if len(nodes)
    )
    return ProposalBatch(parts, policy.children, any(urgent)) if parts else None


def _part(
    sequence: TreeSequence, nodes: np.ndarray, limit: int | None, policy: SpeculationPolicy
) -> ProposalPart:
    guide, tree = sequence.guide, sequence.tree
    request = ProposalRequest(sequence.context, tree, nodes)
    ahead: tuple[LookAhead, ...] = ()
    if guide is None:
        # A policy that takes level by level or a tree of fixed shape has no use for paths.
        if policy.keeps_unfed and not policy.whole:
            request = replace(request, max_path_tokens=policy.children * len(nodes))
    elif policy.keeps_unfed:
        ahead = guide.look_ahead(tree, nodes, sequence.last_position)
    else:  # the draft keeps to one level
        request = replace(request, allowed=guide.allowed(tree, nodes))
    return ProposalPart(sequence, request, limit, ahead)


def add_determined(part: ProposalPart) -> ProposalPart | None:
    """Add the tokens that a grammar determines below the nodes of a part to the tree; returns the
    part of what may follow these, None: nothing."""
    if not part.ahead:
        return part
    nodes, allowed = add_ahead(part.sequence.tree, part.ahead)
    request = replace(part.request, nodes=nodes, allowed=allowed)
    return replace(part, request=request, ahead=()) if len(nodes) else None
