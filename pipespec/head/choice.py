"""One budget for all requests: which of the rows that they offer enter the pipeline now.

A policy offers, for each sequence, rows in an order in which parents stand first. The one choice
over all of them is here. An unfed root lies on the accepted path for certain, so roots come
first, the one that has waited longest before all others: under load the rows are roots, and this
is continuous batching. What is left of the budget goes to the likeliest guesses of all sequences,
as far as they are worth their time. Probabilities fall along a path, so the choice is closed
under ancestors. Everything here is pure; docs/feeding.md derives the rules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pipespec.head.feed.policy import NOTHING, PipelineState
from pipespec.head.tree import ROOT, Tree

# What is passed over is offered again when more is known of it, so the last rows of a batch bring
# less than they promise. Simulated, their cost counts best 1.3 to 1.6 times (docs/feeding.md).
LEFT_FOR_LATER = 1.5
# Of sizes that are as good, the largest.
ABOUT_AS_FAST = 0.99


@dataclass(frozen=True, slots=True)
class Offer:
    """What one sequence could feed: nodes of its tree, parents first.

    `whole`: all of them or none. `context`: KV slots that its rows read together. `certain` of the
    nodes, from the first on, are to be fed before any guess.
    """

    tree: Tree
    nodes: np.ndarray
    whole: bool = False
    context: int = 0
    certain: int = field(init=False)

    def __post_init__(self) -> None:
        first = int(len(self.nodes) > 0 and self.nodes[0] == ROOT)
        object.__setattr__(self, "certain", len(self.nodes) if self.whole else first)


@dataclass(frozen=True, slots=True)
class Choice:
    """What is fed: nodes of each offer. `chances` are those of everything that was offered to lie
    on accepted paths, falling, and `slots` the KV slots that each row reads beside those before it
    (0 while they cost nothing), `[rows]`."""

    taken: list[np.ndarray]
    chances: np.ndarray
    slots: np.ndarray


@dataclass(frozen=True, slots=True)
class Usual:
    """How large batches are to be, rows and KV slots that they read, and the time of a token with
    them."""

    rows: int
    slots: float
    ms_per_token: float


def certain(offers: Sequence[Offer]) -> int:
    """Rows that come before prompts and guesses."""
    return sum(offer.certain for offer in offers)


def choose(
    offers: Sequence[Offer],
    budget: int,
    row_cost: float | None,
    state: PipelineState,
    of_prompts: int = 0,
) -> Choice:
    """Of each offer the nodes to feed now, in its order; `budget` rows or fewer in all.

    Args:
        offers: those with roots in the order in which they are to be served.
        row_cost: what one more row adds to a step, as a share of it; None: as measured.
        of_prompts: rows that are in the batch already.
    """
    if not offers:
        return Choice([], np.empty(0), np.empty(0))
    guesses = [offer.nodes[offer.certain :] for offer in offers]
    cum = np.concatenate(
        [offer.tree.cum[nodes] for offer, nodes in zip(offers, guesses, strict=True)]
    )
    known = 0 if state.offered is None else len(state.offered)
    order = _likeliest(cum, max(budget, known))
    chances = np.concatenate((np.ones(certain(offers)), np.exp(cum[order])))
    slots = np.zeros(len(chances))
    if state.slot_ms:
        owner = np.repeat(np.arange(len(offers)), [len(nodes) for nodes in guesses])[order]
        slots = _slots(offers, owner)
    usual = None if row_cost is not None else usual_batch(chances, slots, state)
    limit = budget if usual is None else min(budget, usual.rows)
    taken = []
    fed = read = 0
    full = False
    for offer in offers:
        needed = offer.context if offer.certain else 0
        full |= fed + offer.certain > limit
        full |= usual is not None and fed > 0 and read + needed > usual.slots
        # From the first whose root does not fit they wait.
        taken.append(NOTHING if full else offer.nodes[: offer.certain])
        fed += len(taken[-1])
        read += 0 if full else needed
    if usual is not None and state.slot_ms:
        saved_ms = usual.ms_per_token * np.exp(cum[order])
        saved_ms[0 if full else limit - fed :] = 0  # there is no room for these
        order = order[_read(offers, taken, owner, saved_ms, state.slot_ms)[owner]]
    order = order[: limit - fed]
    likeliest = np.concatenate((np.ones(fed), np.exp(cum[order])))
    if row_cost is not None:
        tokens_per_step = max(state.tokens_per_step or 0.0, state.requests / state.num_stages)
        worth = int(np.count_nonzero(likeliest >= row_cost * tokens_per_step))
    elif usual is not None and len(likeliest):
        ms = curve(state, of_prompts + np.arange(1, len(likeliest) + 1))
        worth = 1 + int(np.argmax(usual.ms_per_token * np.cumsum(likeliest) - ms))
    else:
        worth = len(likeliest)
    for i, nodes in enumerate(_split(guesses, order[: max(worth - fed, 0)])):
        if len(nodes):
            taken[i] = np.concatenate((taken[i], nodes))
    return Choice(taken, chances, slots)


def _slots(offers: Sequence[Offer], owner: np.ndarray) -> np.ndarray:
    """The KV slots that each row reads beside those before it, of all that come before guesses and
    of guesses, each of its `owner`."""
    context = np.array([offer.context for offer in offers])
    before = np.array([offer.certain for offer in offers])
    read = np.zeros(before.sum() + len(owner))
    ends = np.cumsum(before)
    read[(ends - before)[before > 0]] = context[before > 0]
    owners, first = np.unique(owner, return_index=True)
    alone = before[owners] == 0
    read[before.sum() + first[alone]] = context[owners[alone]]
    return read


def _read(
    offers: Sequence[Offer],
    taken: Sequence[np.ndarray],
    owner: np.ndarray,
    saved_ms: np.ndarray,
    slot_ms: float,
) -> np.ndarray:
    """Whose context is read in this step, bool `[offers]`: of those who are fed anyway, and of
    those whose guesses, each of its `owner` and saving so many `saved_ms`, are worth that."""
    worth = np.bincount(owner, saved_ms, len(offers))
    costs = LEFT_FOR_LATER * slot_ms * np.array([offer.context for offer in offers])
    return (worth >= costs) | np.array([len(nodes) > 0 for nodes in taken])


def curve(state: PipelineState, rows: np.ndarray) -> np.ndarray:
    """Milliseconds of a step whose largest batch has so many rows, as measured, without what the
    KV slots add; beyond that, as the last two sizes go on."""
    known, ms = np.array(state.step_ms).T
    slope = (ms[-1] - ms[-2]) / (known[-1] - known[-2]) if len(known) > 1 else 0.0
    return np.interp(rows, known, ms) + slope * np.maximum(rows - known[-1], 0)


def usual_batch(chances: np.ndarray, slots: np.ndarray, state: PipelineState) -> Usual | None:
    """The batch that makes the text come fastest if all batches are like it; None: nothing was
    measured.

    A step lasts as long as the largest batch on its way, so one that is larger than the others
    holds them all up: a size is chosen for all of them, and requests whose roots come in one
    step are spread over several. What so many rows yield is what they would have yielded in the
    steps so far, and the KV slots that they read likewise; `chances` and `slots` are those of this
    step.
    """
    if not state.step_ms or not len(chances):
        return None
    if state.offered is None or state.offered_slots is None:
        tokens, read = np.cumsum(chances), np.cumsum(slots)
    else:
        tokens, read = state.offered, state.offered_slots
    ms = curve(state, np.arange(1, len(tokens) + 1)) + state.slot_ms * read
    ms = np.maximum(ms, state.drafting_ms)
    rate = tokens / (ms[0] + LEFT_FOR_LATER * (ms - ms[0]))
    rows = int(np.flatnonzero(rate >= ABOUT_AS_FAST * rate.max())[-1]) + 1
    most = read[rows - 1] if state.slot_ms else math.inf
    return Usual(rows, most, ms[rows - 1] / max(tokens[rows - 1], 1 / state.num_stages))


def share(offers: Sequence[Offer], budget: int) -> list[np.ndarray]:
    """Of each offer the nodes that one draft round expands: the likeliest of all."""
    nodes = [offer.nodes for offer in offers]
    if sum(map(len, nodes)) <= budget:
        return nodes
    cum = np.concatenate([offer.tree.cum[offer.nodes] for offer in offers])
    return _split(nodes, _likeliest(cum, budget))


def _likeliest(cum: np.ndarray, most: int) -> np.ndarray:
    """Indices of the `most` largest, the largest first; of equal ones, the first come first."""
    places = np.arange(len(cum))
    if 0 < most < len(cum):
        places = np.flatnonzero(cum >= np.partition(cum, -most)[-most])
    return places[np.argsort(-cum[places], kind="stable")][:most]


def _split(parts: Sequence[np.ndarray], places: np.ndarray) -> list[np.ndarray]:
    """Those elements of each part, in its order, that stand at `places` of all parts together."""
    chosen = np.zeros(sum(map(len, parts)), bool)
    chosen[places] = True
    found, end = [], 0
    for part in parts:
        start, end = end, end + len(part)
        found.append(part[chosen[start:end]])
    return found
