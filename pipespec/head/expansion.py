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
from pipespec.head.tree import Tree


def plan_expansion(
    wanted: Sequence[tuple[TreeSequence, Expansion]],
    policy: SpeculationPolicy,
    budget: Callable[[int], int],
    crowded: Sequence[tuple[TreeSequence, Expansion]] = (),
    most_crowded: int = 0,
) -> ProposalBatch | None:
    """The round that expands the most probable of the wanted nodes; None: there are none. `budget`
    is the number of nodes of all by the number of requests, of which those of crowds are
    `most_crowded` at most."""
    found, beside = _within_text(wanted), _within_text(crowded)
    most = budget(len(found) + len(beside))
    of_crowds = split_expansion(_trees(beside), min(most_crowded, most // 2))
    shares = split_expansion(_trees(found), most - sum(map(len, of_crowds)))
    parts = tuple(
        _part(sequence, nodes, expansion.limit, policy)
        for (sequence, expansion, _), nodes in zip(
            [*found, *beside], [*shares, *of_crowds], strict=True
        )
        if len(nodes)
    )
    urgent = any(expansion.urgent for _, expansion, _ in found)
    return ProposalBatch(parts, policy.children, urgent) if parts else None


def _within_text(
    wanted: Sequence[tuple[TreeSequence, Expansion]],
) -> list[tuple[TreeSequence, Expansion, np.ndarray]]:
    """What is wanted, with the nodes before the end of the text, where there are any."""
    found = [(each, of, each.drop_past_end(of.nodes)) for each, of in wanted]
    return [each for each in found if len(each[2])]


def _trees(
    found: Sequence[tuple[TreeSequence, Expansion, np.ndarray]],
) -> list[tuple[Tree, np.ndarray]]:
    return [(each.tree, nodes) for each, _, nodes in found]


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
