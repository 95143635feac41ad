"""The distribution that a token is drawn from (docs/sampling.md).

The order is that of vLLM, and of Transformers wherever the two agree:

    logit bias, repetition, frequency and presence penalty     also when decoding greedily
    temperature, min-p, top-k, top-p                           what is left is drawn from

Everything is float64, and pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipespec.core import SamplingParams, TokenLogprobs
from pipespec.system.device_copy import to_device, to_host


class TokenCounts:
    """The token counts of a text, for the penalties.

    `seen` is bool `[vocab]`: in the prompt or the answer; `counts` is int64 `[vocab]`: how
    often in the answer.
    """

    def __init__(
        self, prompt: Sequence[int], answer: Sequence[int], vocab_size: int, device: torch.device
    ):
        counts = torch.bincount(torch.tensor(answer, dtype=torch.int64), minlength=vocab_size)
        self.counts = to_device(counts, device)
        self.seen = self.counts > 0
        self.seen.index_fill_(0, to_device(torch.tensor(prompt, dtype=torch.int64), device), True)

    def append(self, token: int) -> None:
        self.counts[token] += 1
        self.seen[token] = True


def adjust(logits: Tensor, sampling: SamplingParams, counts: TokenCounts | None) -> Tensor:
    """The logits `[vocab]` after bias and penalties, float64.

    `counts` are of the text before; they may be None if `sampling.has_penalties` is False.
    """
    scores = logits.to(torch.float64, copy=True)
    if sampling.logit_bias:
        ids, biases = zip(*sampling.logit_bias, strict=True)
        scores.index_add_(
            0,
            to_device(torch.tensor(ids), scores.device),
            to_device(torch.tensor(biases, dtype=torch.float64), scores.device),
        )
    if sampling.has_penalties:
        assert counts is not None
        penalty = sampling.repetition_penalty
        penalised = torch.where(scores > 0, scores / penalty, scores * penalty)
        scores = torch.where(counts.seen, penalised, scores)
        scores -= sampling.frequency_penalty * counts.counts
        scores -= sampling.presence_penalty * (counts.counts > 0)
    return scores


def select_rows(values: Tensor, rows: Sequence[int]) -> Tensor:
    """Some of the rows; not a copy if these are all."""
    if len(rows) == len(values):
        return values
    return values.index_select(0, to_device(torch.tensor(rows), values.device))


def column(values: Sequence[float], like: Tensor) -> Tensor:
    """One value for each row, float64 `[rows, 1]`, where `like` is."""
    return to_device(torch.tensor(values, dtype=torch.float64), like.device)[:, None]


@dataclass(frozen=True)
class Candidates:
    """The tokens that may follow at each of some rows.

    Attributes:
        ids: int64 `[rows, n]`.
        weights: their log-probabilities up to a constant of each row, float64 `[rows, n]`;
            -inf: never drawn.
        complete: bool `[rows]`, whether no other token may follow.
    """

    ids: Tensor
    weights: Tensor
    complete: Tensor


def needs_sorting(sampling: SamplingParams) -> bool:
    """Whether tokens must be sorted to know which may follow."""
    return sampling.top_k > 0 or sampling.top_p < 1


def candidates(scores: Tensor, samplings: Sequence[SamplingParams], limit: int) -> Candidates:
    """The tokens that the cut-offs leave, of adjusted logits `[rows, vocab]`, float64.

    Args:
        samplings: the parameters of each row. At temperature 0 the candidates are those at
            temperature 1; none of them is drawn.
        limit: how many of the most probable tokens are considered, if rows need sorting.
    """
    size = scores.shape[1]
    behind = scores - scores.amax(1, keepdim=True)
    behind = behind / column([one.temperature or 1.0 for one in samplings], scores)
    ids = torch.arange(size, device=scores.device).expand_as(behind)
    values = behind
    # Of what top_k leaves, top_p needs the sum.
    both = (one.top_k for one in samplings if one.top_k < size and one.top_p < 1)
    limit = max(limit, *both, 0)
    if any(map(needs_sorting, samplings)):
        if limit < size:
            ids = behind.topk(limit).indices.sort().values
            values = behind.gather(1, ids)
        values, order = values.sort(descending=True, stable=True)  # of equals the lower id first
        ids = ids.gather(1, order)
    floor = column(
        [math.log(one.min_p) if one.min_p > 0 else -math.inf for one in samplings], scores
    )
    kept = (values >= floor) & (values > -torch.inf)
    num = values.shape[1]
    ranks = [one.top_k if 0 < one.top_k < size else size for one in samplings]
    if min(ranks) < size:
        last = to_device(torch.tensor([min(rank, num) - 1 for rank in ranks]), scores.device)
        kept &= values >= values.gather(1, last[:, None])  # equals of the last one stay
    if any(one.top_p < 1 for one in samplings):
        shares = values.exp().masked_fill(~kept, 0.0)
        whole = shares.sum(1, keepdim=True)
        if num < size:
            beyond = behind.exp().masked_fill(behind < floor, 0.0).sum(1, keepdim=True)
            whole = torch.where(column(ranks, scores) <= num, whole, beyond)
        before = (shares / whole).cumsum(1).roll(1, 1)
        before[:, 0] = 0.0
        kept &= before < column(
            [one.top_p if one.top_p < 1 else math.inf for one in samplings], scores
        )
    complete = torch.ones(len(samplings), dtype=torch.bool, device=scores.device)
    if num < size:
        # A token as probable as the last one considered may not have been considered.
        complete = ~(kept & (values == values[:, -1:])).any(1)
    return Candidates(ids, values.masked_fill(~kept, -torch.inf), complete)


def distribution(scores: Tensor, sampling: SamplingParams) -> Tensor:
    """The log-probabilities `[vocab]` with which a token is drawn; -inf: never.

    `scores` are adjusted logits. At temperature 0 it is the distribution at temperature 1,
    from which nothing is drawn.
    """
    found = candidates(scores[None], [sampling], len(scores))
    spread = torch.empty_like(scores)
    spread[found.ids[0]] = found.weights[0].log_softmax(0)
    return spread


def logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
    """The log-probabilities of a token at each of the rows `[rows, vocab]`, and of the `count`
    most probable ones there, in the target's own distribution: before bias, penalties,
    temperature and cut-offs."""
    values = logits.to(torch.float64).log_softmax(-1)
    chosen = to_device(torch.tensor(tokens), values.device)
    best = values.topk(min(count, values.shape[1]))
    found = to_host(values.gather(1, chosen[:, None]).squeeze(1), best.indices, best.values)
    own, *of_best = (each.tolist() for each in found)
    tops = zip(*of_best, strict=True)
    return [
        TokenLogprobs(
            value, tuple(pair for pair in zip(*top, strict=True) if math.isfinite(pair[1]))
        )
        for value, top in zip(own, tops, strict=True)
    ]
