"""What one draft round expands: nodes of all requests, as policy and forms want it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListOf
from dataclasses import replace

from pipespec.head.choice import Offer, share
from pipespec.head.feed.policy import FeedPolicy, PipelineState
from pipespec.head.sequence import Sequence
from pipespec.head.work import DraftPart, DraftWork


def draft_work(
    sequences: Iterable[Sequence],
    policy: FeedPolicy,
    state: PipelineState,
    budget: Callable[[int], int],
) -> tuple[DraftWork | None, bool]:
    """The draft round that a policy wants, and whether the pipeline idles until then.

    `budget` says how many nodes are expanded for so many requests. What must follow a node is hung
    below it without asking the source.
    """
    among = list(sequences)
    while True:
        parts, urgent = _wanted(among, policy, state, budget)
        asked = [each for part in parts if (each := _guided(part, policy)) is not None]
        if asked or not parts:  # else nobody needs to be asked about any of them
            return (DraftWork(tuple(asked), policy.children) if asked else None), urgent


def _wanted(
    sequences: ListOf[Sequence],
    policy: FeedPolicy,
    state: PipelineState,
    budget: Callable[[int], int],
) -> tuple[list[DraftPart], bool]:
    """The likeliest nodes that the policy wants to be expanded."""
    wanted: list[tuple[Sequence, int | None, Offer]] = []
    urgent = False
    for sequence in sequences:
        expansion = policy.grow(sequence.tree, sequence.own(state))
        nodes = sequence.useful(expansion.nodes)
        if len(nodes):
            wanted.append((sequence, expansion.limit, Offer(sequence.tree, nodes)))
            urgent |= expansion.urgent
    shares = share([offer for _, _, offer in wanted], budget(len(wanted)))
    parts = [
        DraftPart(sequence, nodes, limit, deeper=_deeper(sequence, policy) * len(nodes))
        for (sequence, limit, _), nodes in zip(wanted, shares, strict=True)
        if len(nodes)
    ]
    return parts, urgent


def _deeper(sequence: Sequence, policy: FeedPolicy) -> int:
    """Guesses below its children that a node may bring along: as many as children.

    None where a policy takes level by level or a tree of fixed shape, nor where a form decides what
    may follow each guess.
    """
    takes_any = policy.keeps_unfed and not policy.whole
    return policy.children if takes_any and sequence.guide is None else 0


def _guided(part: DraftPart, policy: FeedPolicy) -> DraftPart | None:
    """The part of a round as the form of its request has it, if it has one; None: the form tells
    all."""
    sequence, nodes = part.sequence, part.nodes
    if sequence.guide is None:
        return part
    if policy.keeps_unfed:
        nodes, allowed = sequence.guide.extend(sequence.tree, nodes, sequence.last_position)
    else:  # the draft keeps to one level
        allowed = sequence.guide.allowed(sequence.tree, nodes)
    return replace(part, nodes=nodes, allowed=allowed) if len(nodes) else None
