"""One budget for all requests: which of the rows that they offer enter the pipeline now.

A policy offers, for each sequence, rows in an order in which parents stand first. The one choice
over all of them is here. An unfed root lies on the accepted path for certain, so roots come
first, the one that has waited longest before all others: under load the rows are roots, and this
is continuous batching. What is left of the budget goes to the likeliest guesses of all sequences,
as far as they are worth their time. Probabilities fall along a path, so the choice is closed
under ancestors. Everything here is pure; docs/feeding.md derives the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipespec.head.feed.policy import NOTHING, PipelineState
from pipespec.head.tree import ROOT, Tree


@dataclass(frozen=True, slots=True)
class Offer:
    """What one sequence could feed: nodes of its tree, parents first.

    `whole`: all of them or none.
    """

    tree: Tree
    nodes: np.ndarray
    whole: bool = False

    @property
    def certain(self) -> int:
        """How many of the nodes, from the first on, are to be fed before any guess."""
        if self.whole:
            return len(self.nodes)
        return int(len(self.nodes) > 0 and self.nodes[0] == ROOT)


def certain(offers: Sequence[Offer]) -> int:
    """Rows that come before prompts and guesses."""
    return sum(offer.certain for offer in offers)


def choose(
    offers: Sequence[Offer], budget: int, row_cost: float | None, state: PipelineState
) -> list[np.ndarray]:
    """Of each offer the nodes to feed now, in its order; `budget` rows or fewer in all.

    Args:
        offers: those with roots in the order in which they are to be served.
        row_cost: what one more row adds to a step, as a share of it; None: as measured.
    """
    taken = [NOTHING] * len(offers)
    pool: list[tuple[int, np.ndarray]] = []  # what may follow: offer, nodes
    fed = 0
    for i, offer in enumerate(offers):
        first = offer.certain
        if fed + first > budget:
            continue  # its root waits, and so does what hangs from it
        taken[i] = offer.nodes[:first]
        fed += first
        pool.append((i, offer.nodes[first:]))
    if fed == budget or not any(len(nodes) for _, nodes in pool):
        return taken
    cum = np.concatenate([offers[i].tree.cum[nodes] for i, nodes in pool])
    order = np.argsort(-cum, kind="stable")[: budget - fed]
    worth = paying(np.concatenate((np.ones(fed), np.exp(cum[order]))), row_cost, state)
    split = _split([nodes for _, nodes in pool], order[: max(worth - fed, 0)])
    for (i, _), guesses in zip(pool, split, strict=True):
        taken[i] = np.concatenate((taken[i], guesses))
    return taken


def paying(probability: np.ndarray, row_cost: float | None, state: PipelineState) -> int:
    """How many rows are worth their time, the likeliest first.

    Args:
        probability: of each row to lie on the accepted path of its request, `[rows]`, falling.
        row_cost: what one more row adds to a step, as a share of it; None: as measured.

    The rows that lie on accepted paths are the tokens, so a row yields its probability in
    tokens. A token saves the time that one takes at present, at most what it takes without
    guesses: every request then decides one in `num_stages` steps.
    """
    if row_cost is not None:
        tokens_per_step = max(state.tokens_per_step or 0.0, state.requests / state.num_stages)
        return int(np.count_nonzero(probability >= row_cost * tokens_per_step))
    if not state.step_ms:
        return len(probability)
    rows, ms = np.array(state.step_ms).T
    cost = np.interp(np.arange(1, len(probability) + 1), rows, ms)
    ms_per_token = state.num_stages * cost[0] / state.requests
    if state.guessing is not None:
        ms_per_token = min(state.guessing.ms_per_token, ms_per_token)
    return 1 + int(np.argmax(ms_per_token * np.cumsum(probability) - cost))


def share(offers: Sequence[Offer], budget: int) -> list[np.ndarray]:
    """Of each offer the nodes that one draft round expands: the likeliest of all."""
    nodes = [offer.nodes for offer in offers]
    if sum(map(len, nodes)) <= budget:
        return nodes
    cum = np.concatenate([offer.tree.cum[offer.nodes] for offer in offers])
    return _split(nodes, np.argsort(-cum, kind="stable")[:budget])


def _split(parts: Sequence[np.ndarray], places: np.ndarray) -> list[np.ndarray]:
    """Those elements of each part, in its order, that stand at `places` of all parts together."""
    chosen = np.zeros(sum(map(len, parts)), bool)
    chosen[places] = True
    ends = np.cumsum([len(part) for part in parts])[:-1]
    return [part[mine] for part, mine in zip(parts, np.split(chosen, ends), strict=True)]
