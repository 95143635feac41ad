"""One budget for all requests: which rows enter the pipeline now.

For each sequence a policy offers rows, parents before children. An unfed root is on the accepted
path for certain, so roots come first, the one that has waited longest before all others: under load
this is continuous batching. The rest of the budget goes to the most probable draft tokens of all
sequences, as far as they are worth their time. docs/policies.md derives the rules. Above 350 lines,
as the rules of all rows are read together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np

from pipespec.head.policies.policy import NO_NODES, OfferedRows, PipelineState, TargetBatch
from pipespec.head.tree import ROOT, Tree

# Of batch sizes whose rates differ by less than this, the largest is chosen.
ABOUT_AS_FAST = 0.995
# The share of a step's time by which the contexts of certain rows may exceed the chosen size:
# contexts grow, and the size is of the last steps.
CONTEXT_SLACK = 0.05
TINY = 1e-9  # tokens or milliseconds
# Added to the log-probabilities of nodes that come before all others.
URGENT = 1e6


@dataclass(slots=True)
class RequestCandidates:
    """The nodes of one sequence's tree that could be fed, parents first.

    Attributes:
        whole: all of them or none.
        context_len: KV slots that its rows read together.
        num_certain: how many of the nodes, from the first on, are fed before any draft token.
    """

    tree: Tree
    nodes: np.ndarray
    whole: bool = False
    context_len: int = 0
    num_certain: int = field(init=False)

    def __post_init__(self) -> None:
        has_root = int(len(self.nodes) > 0 and self.nodes[0] == ROOT)
        self.num_certain = len(self.nodes) if self.whole else has_root


@dataclass(frozen=True, slots=True)
class Selection:
    """The nodes that are fed, and what was offered.

    Attributes:
        nodes: of each request.
        probabilities: of all offered rows to be on accepted paths, falling, `[rows]`.
        kv_slots: slots that each of these rows reads beside those of the rows before it, `[rows]`.
        num_certain: how many of these rows, from the first on, are not draft tokens that can wait.
    """

    nodes: list[np.ndarray]
    probabilities: np.ndarray
    kv_slots: np.ndarray
    num_certain: int


def total_certain(candidates: Sequence[RequestCandidates]) -> int:
    return sum(each.num_certain for each in candidates)


def select_rows(
    candidates: Sequence[RequestCandidates],
    budget: int,
    row_cost: float | None,
    state: PipelineState,
    prompt_rows: int = 0,
) -> Selection:
    """Select the nodes of each request to feed now; at most `budget` rows in all.

    Args:
        candidates: of every request; those with roots in the order in which they are served.
        row_cost: what one more row adds to a step, as a share of it; None: as measured.
        prompt_rows: rows that are in the batch already.
    """
    if not candidates:
        return Selection([], np.empty(0), np.empty(0), 0)
    num_certain = total_certain(candidates)
    drafts = [each.nodes[each.num_certain :] for each in candidates]
    cum = np.concatenate(
        [each.tree.cum[nodes] for each, nodes in zip(candidates, drafts, strict=True)]
    )
    # Indices into the draft tokens of all requests, the most probable first.
    num_known = 0 if state.offered is None else len(state.offered.certain)
    order = _top_indices(cum, max(budget, num_known))
    draft_probabilities = np.exp(cum[order])
    probabilities = np.concatenate((np.ones(num_certain), draft_probabilities))
    owner = np.repeat(np.arange(len(candidates)), [len(nodes) for nodes in drafts])[order]
    kv_slots = _kv_slots_read(candidates, owner)

    target = state.target
    if row_cost is None and state.is_alone:
        target = lone_batch(probabilities, kv_slots, state, prompt_rows)
    elif row_cost is None and state.offered is None:  # before the first step
        certain = (np.arange(len(probabilities)) < num_certain).astype(float)
        offered = OfferedRows(probabilities, certain, kv_slots, num_certain)
        target = target_batch(replace(state, offered=offered))
    if row_cost is None and state.trial_rows is not None and target is not None:
        target = replace(target, rows=max(state.trial_rows, 1))
    limit = budget if target is None else min(budget, target.rows)
    selected, some_wait = _select_certain(candidates, limit, target)
    num_selected = sum(map(len, selected))
    if some_wait:  # no draft token enters the pipeline before its root
        waits = np.array([each.num_certain for each in candidates]) > [*map(len, selected)]
        ready = ~waits[owner]
        order, owner, draft_probabilities = order[ready], owner[ready], draft_probabilities[ready]

    if target is not None and state.slot_ms:
        saved_ms = target.ms_per_token * draft_probabilities * lost_by_waiting(state)
        saved_ms[0 if some_wait else limit - num_selected :] = 0  # there is no room for these
        read = _contexts_read(candidates, selected, owner, saved_ms, state.slot_ms)[owner]
        order, draft_probabilities = order[read], draft_probabilities[read]
    num_drafts = min(limit - num_selected, len(order))
    rows = np.concatenate((np.ones(num_selected), draft_probabilities[:num_drafts]))
    worth = len(rows)
    if row_cost is not None:
        tokens_per_step = max(state.tokens_per_step or 0.0, state.requests / state.num_stages)
        worth = int(np.count_nonzero(rows >= row_cost * tokens_per_step))
    elif target is not None and not state.is_alone and prompt_rows and worth:
        worth = _num_worth_measured_cost(rows, target, state, prompt_rows)
    num_drafts = max(worth - num_selected, 0)
    for i, nodes in enumerate(_split(drafts, order[:num_drafts])):
        if len(nodes):
            selected[i] = np.concatenate((selected[i], nodes))
    return Selection(selected, probabilities, kv_slots, num_certain)


def _select_certain(
    candidates: Sequence[RequestCandidates], limit: int, target: TargetBatch | None
) -> tuple[list[np.ndarray], bool]:
    """The rows of each request that come before draft tokens, and whether some of them must wait:
    from the first request on whose rows do not fit, all do."""
    selected = []
    rows = kv_slots = 0
    full = False
    for each in candidates:
        context_len = each.context_len if each.num_certain else 0
        full |= rows + each.num_certain > limit
        full |= target is not None and rows > 0 and kv_slots + context_len > target.kv_slots
        selected.append(NO_NODES if full else each.nodes[: each.num_certain])
        rows += len(selected[-1])
        kv_slots += 0 if full else context_len
    return selected, full


def _kv_slots_read(candidates: Sequence[RequestCandidates], owner: np.ndarray) -> np.ndarray:
    """`Selection.kv_slots`: of the certain rows, then of draft tokens, each of the request
    `owner`."""
    context_len = np.array([each.context_len for each in candidates])
    certain = np.array([each.num_certain for each in candidates])
    read = np.zeros(certain.sum() + len(owner))
    ends = np.cumsum(certain)
    read[(ends - certain)[certain > 0]] = context_len[certain > 0]
    owners, first = np.unique(owner, return_index=True)
    drafts_only = certain[owners] == 0
    read[certain.sum() + first[drafts_only]] = context_len[owners[drafts_only]]
    return read


def _contexts_read(
    candidates: Sequence[RequestCandidates],
    selected: Sequence[np.ndarray],
    owner: np.ndarray,
    saved_ms: np.ndarray,
    slot_ms: float,
) -> np.ndarray:
    """Whose context is read in this step, bool `[requests]`: of requests with selected rows, and of
    those whose draft tokens, each of the request `owner`, save more than reading it costs."""
    saved = np.bincount(owner, saved_ms, len(candidates))
    costs = slot_ms * np.array([each.context_len for each in candidates])
    return (saved >= costs) | np.array([len(nodes) > 0 for nodes in selected])


def _num_worth_measured_cost(
    probabilities: np.ndarray, target: TargetBatch, state: PipelineState, prompt_rows: int
) -> int:
    """How many rows beside those of prompts save the most time beyond what they add to the step as
    measured.

    Up to the size of the other batches in the pipeline they add nothing: a step lasts as long as
    the largest takes.
    """
    rows = prompt_rows + np.arange(1, len(probabilities) + 1)
    ms = np.maximum(step_ms_of(state, rows), step_ms_of(state, np.array([target.rows])))
    return 1 + int(np.argmax(target.ms_per_token * np.cumsum(probabilities) - ms))


def step_ms_of(state: PipelineState, rows: np.ndarray) -> np.ndarray:
    """Milliseconds of a step by the rows of its largest batch, as measured, without what KV slots
    add; larger batches are extrapolated from the last two measured sizes."""
    known, ms = np.array(state.step_ms).T
    slope = (ms[-1] - ms[-2]) / (known[-1] - known[-2]) if len(known) > 1 else 0.0
    return np.interp(rows, known, ms) + slope * np.maximum(rows - known[-1], 0)


def target_batch(state: PipelineState) -> TargetBatch | None:
    """The batch size that decodes fastest if all batches have it, by the measured times of steps
    and the rows that were offered; None: one of both is unknown.

    A step lasts as long as the largest batch in the pipeline takes, so a batch that is larger than
    the others delays them all: one size is chosen for all of them, and requests whose roots come in
    one step are spread over several. More rows than pay in the long run are taken, such as roots
    that wait, where they make no step longer.
    """
    offered = state.offered
    if offered is None or not len(offered.probabilities) or not state.step_ms:
        return None
    lasting = lasting_rows(offered, state)
    tokens, ms = tokens_by_rows(lasting, state), _batch_ms(lasting, state)
    rate = tokens / ms
    best = last = int(np.flatnonzero(rate >= ABOUT_AS_FAST * rate.max())[-1])
    kv_slots = lasting.kv_slots
    if lasting is not offered:
        no_longer = np.flatnonzero(_batch_ms(offered, state) <= ms[best] / ABOUT_AS_FAST)
        if len(no_longer) and no_longer[-1] > best:
            last, kv_slots = int(no_longer[-1]), offered.kv_slots
    max_kv_slots = math.inf
    if state.slot_ms:
        max_kv_slots = kv_slots[: last + 1].sum() + CONTEXT_SLACK * ms[best] / state.slot_ms
    return TargetBatch(last + 1, max_kv_slots, ms[best] / tokens[best])


def _batch_ms(offered: OfferedRows, state: PipelineState) -> np.ndarray:
    """Of a step whose batches all have 1, 2, ... of these rows, `[rows]`."""
    rows = np.arange(1.0, len(offered.probabilities) + 1)
    if state.by_mean and offered.present is not None:  # batches without so many rows cost less
        rows = np.maximum(np.cumsum(offered.present), 1 / state.num_stages)
    ms = step_ms_of(state, rows) + state.slot_ms * np.cumsum(offered.kv_slots)
    return np.asarray(np.maximum(ms, state.drafting_ms))


def lasting_rows(offered: OfferedRows, state: PipelineState) -> OfferedRows:
    """The offered rows that every batch can have.

    A request has one root in each pass, so of the roots that wait where batches are small, larger
    batches would soon have no more than requests / stages.
    """
    num_lasting = math.ceil(state.requests / state.num_stages)
    num_waiting = int(offered.certain.sum()) - num_lasting
    if num_waiting <= 0:
        return offered
    gone = slice(num_lasting, num_lasting + num_waiting)
    return OfferedRows(
        np.delete(offered.probabilities, gone),
        np.delete(offered.certain, gone),
        np.delete(offered.kv_slots, gone),
        offered.fed,
        None if offered.present is None else np.delete(offered.present, gone),
    )


def lone_batch(
    probabilities: np.ndarray, kv_slots: np.ndarray, state: PipelineState, prompt_rows: int = 0
) -> TargetBatch | None:
    """The best size of the next batch, beside rows of prompts, if no other is in the pipeline when
    it is sent; None: no time is known.

    With one stage batches do not depend on each other, so each has the rows that save more time
    than they take, with a token worth the time that one takes now (renewal-reward theorem).

    Args:
        probabilities, kv_slots: of the rows that it could have, as in `Selection`.
    """
    if not len(probabilities) or not state.step_ms:
        return None
    read = np.cumsum(kv_slots)
    rows = prompt_rows + np.arange(1, len(probabilities) + 1)
    ms = step_ms_of(state, rows) + state.slot_ms * read
    ms_per_token = token_ms(state)
    saved_ms = ms_per_token * np.cumsum(probabilities) - ms
    best = int(np.argmax(saved_ms))
    about = saved_ms[best] - (1 - ABOUT_AS_FAST) * ms[best]
    best = int(np.flatnonzero(saved_ms >= about)[-1])
    max_kv_slots = math.inf
    if state.slot_ms:
        max_kv_slots = read[best] + CONTEXT_SLACK * ms[best] / state.slot_ms
    return TargetBatch(best + 1, max_kv_slots, ms_per_token)


def token_ms(state: PipelineState) -> float:
    """What a token takes at present, of all requests together; needs the times of steps.

    In a longer pipeline it is that of the target size, as batches may still be growing to it. With
    one stage it is measured, with the draft rounds that delay batches; never more than without
    draft tokens.
    """
    if state.target is not None and not state.is_alone:
        return state.target.ms_per_token
    plain_ms = float(step_ms_of(state, np.array([1]))[0]) * state.num_stages / state.requests
    plain_ms = max(plain_ms, TINY)
    if not state.is_alone or state.token_ms is None:
        return plain_ms
    return min(state.token_ms, plain_ms)


def tokens_by_rows(offered: OfferedRows, state: PipelineState) -> np.ndarray:
    """Tokens per step if all batches had 1, 2, ... rows, `[rows]`, from what was offered while they
    had `offered.fed` of them.

    Every token is a row that was fed once, so batches of the present size yield the sum of their
    rows' probabilities. A certain row that is added or left out changes that by one token. A draft
    token does so by less: left out, it is offered again in the next step; and with larger batches
    fewer probable rows are left to offer. With one stage neither is so, as no batch is in the
    pipeline when the next one is sent. docs/policies.md has the formulas and their evidence.
    """
    fed = max(offered.fed, 1.0)
    rows = np.arange(1, len(offered.probabilities) + 1)
    drafts = offered.probabilities - offered.certain
    share = np.ones(len(rows))
    if state.num_stages > 1:
        share = np.minimum(lost_by_waiting(state) * np.sqrt(fed / rows), 1.0)
    now = np.interp(fed, rows, np.cumsum(offered.probabilities))
    one_each = min(state.requests, len(rows))
    if state.num_stages > 1 and fed <= one_each > 1:
        share[:one_each] = _share_of_one_row_each(offered.probabilities[:one_each], fed, now)
    gained = np.cumsum(offered.certain + drafts * share)
    tokens = now + gained - np.interp(fed, rows, gained)
    return np.maximum(tokens, 1 / state.num_stages)


def _share_of_one_row_each(probabilities: np.ndarray, fed: float, tokens: float) -> np.ndarray:
    """What the draft token of one row more yields of its probability, in batches of 1, 2, ... rows,
    each of another request, where `fed` rows yield `tokens`, `[rows]`.

    More rows are then more batches of a request in the pipeline, of one row each. With a share *a*
    of hits among *m* of them, a row yields 1 / (a + (1 - a) m) tokens, and *m* grows with the rows
    *w*; so one row more yields dA / dw = a (A / w)^2, whatever *m* is.
    """
    rows = np.arange(1, len(probabilities) + 1)
    pairs = rows[1:] * rows[:-1]
    fewer = np.concatenate(([0.0], np.cumsum(probabilities[1:] / pairs)))
    found = 1 / np.maximum(1 / tokens + np.interp(fed, rows, fewer) - fewer, TINY)
    return np.minimum(np.concatenate(([1.0], found[1:] * found[:-1] / pairs)), 1.0)


def lost_by_waiting(state: PipelineState) -> float:
    """The share of a draft token's worth that is lost if it enters a later batch."""
    return min(math.sqrt(state.requests ** (1 / 3) / state.num_stages), 1.0)


def split_expansion(
    offers: Sequence[tuple[Tree, np.ndarray]], budget: int, urgent: Sequence[bool] = ()
) -> list[np.ndarray]:
    """The most probable of the nodes of some trees, `budget` of all at most; those of `urgent`
    trees before all others."""
    nodes = [each for _, each in offers]
    if sum(map(len, nodes)) <= budget:
        return nodes
    first = urgent or [False] * len(offers)
    cum = [tree.cum[each] + URGENT * now for (tree, each), now in zip(offers, first, strict=True)]
    return _split(nodes, _top_indices(np.concatenate(cum), budget))


def _top_indices(cum: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest, the largest first; of equal ones, the first come first."""
    indices = np.arange(len(cum))
    if 0 < count < len(cum):
        indices = np.flatnonzero(cum >= np.partition(cum, -count)[-count])
    return indices[np.argsort(-cum[indices], kind="stable")][:count]


def _split(parts: Sequence[np.ndarray], indices: np.ndarray) -> list[np.ndarray]:
    """The elements of each part, in its order, that are at `indices` of the concatenated parts."""
    chosen = np.zeros(sum(map(len, parts)), bool)
    chosen[indices] = True
    ends = accumulate(map(len, parts))
    return [part[chosen[end - len(part) : end]] for part, end in zip(parts, ends, strict=True)]
