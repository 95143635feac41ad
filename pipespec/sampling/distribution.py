"""The distribution that a token is drawn from (docs/sampling.md).

The order is that of vLLM, and of Transformers wherever the two agree:

    logit bias, repetition, frequency and presence penalty     also when decoding greedily
    temperature, min-p, top-k, top-p                           what is left is drawn from

Everything is float64, and pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pipespec.core import Sampling, TokenLogprobs

# Most probable tokens among which top-p looks before it sorts them all.
SORTED_FIRST = 1024


class Tally:
    """Which tokens stand in a text, as the penalties want to know it.

    `seen` is bool `[vocab]`: in the prompt or the answer; `counts` is int64 `[vocab]`: how
    often in the answer.
    """

    def __init__(
        self, prompt: Sequence[int], answer: Sequence[int], vocab_size: int, device: torch.device
    ):
        counts = torch.bincount(torch.tensor(answer, dtype=torch.int64), minlength=vocab_size)
        self.counts = counts.to(device)
        self.seen = self.counts > 0
        self.seen[torch.tensor(prompt, dtype=torch.int64, device=device)] = True

    def append(self, token: int) -> None:
        """The answer goes on with `token`."""
        self.counts[token] += 1
        self.seen[token] = True


def adjust(logits: Tensor, sampling: Sampling, tally: Tally | None) -> Tensor:
    """The logits `[vocab]` after bias and penalties, float64.

    `tally` is the text before; it may be None if `sampling.penalises` is False.
    """
    scores = logits.to(torch.float64, copy=True)
    if sampling.logit_bias:
        ids, biases = zip(*sampling.logit_bias, strict=True)
        scores.index_add_(
            0,
            torch.tensor(ids, device=scores.device),
            torch.tensor(biases, dtype=torch.float64, device=scores.device),
        )
    if sampling.penalises:
        assert tally is not None
        penalty = sampling.repetition_penalty
        penalised = torch.where(scores > 0, scores / penalty, scores * penalty)
        scores = torch.where(tally.seen, penalised, scores)
        scores -= sampling.frequency_penalty * tally.counts
        scores -= sampling.presence_penalty * (tally.counts > 0)
    return scores


def distribution(scores: Tensor, sampling: Sampling) -> Tensor:
    """The log-probabilities `[vocab]` that a token is drawn with; -inf: never.

    `scores` are adjusted logits. At temperature 0 it is the distribution at temperature 1,
    from which nothing is drawn.
    """
    scores = (scores - scores.max()) / (sampling.temperature or 1.0)
    kept = scores > -torch.inf
    if sampling.min_p > 0:
        kept &= scores >= math.log(sampling.min_p)
    if 0 < sampling.top_k < len(scores):
        kept &= scores >= scores.topk(sampling.top_k).values[-1]  # equals of the last one stay
    if sampling.top_p < 1:
        kept = _nucleus(scores, kept, sampling.top_p)
    return scores.masked_fill(~kept, -torch.inf).log_softmax(0)


def _nucleus(scores: Tensor, kept: Tensor, top_p: float) -> Tensor:
    """Of the tokens `kept` (bool `[vocab]`), the most probable that together have `top_p`."""
    probabilities = scores.masked_fill(~kept, -torch.inf).softmax(0)
    head = scores.topk(min(SORTED_FIRST, len(scores))).values[-1]
    # Sorting a large vocabulary takes longer than all else; its head is nearly always enough.
    for candidates in (kept & (scores >= head), kept):
        ids = candidates.nonzero().squeeze(1)
        ids = ids[scores[ids].sort(descending=True, stable=True).indices]
        reached = probabilities[ids].cumsum(0)
        if reached[-1] >= top_p:
            break
    before = reached.roll(1)
    before[0] = 0.0
    chosen = torch.zeros_like(kept)
    chosen[ids[before < top_p]] = True
    return chosen


def logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
    """The log-probabilities of a token at each of the rows `[rows, vocab]`, and of the `count`
    most probable ones there, in the target's own distribution: before bias, penalties,
    temperature and cut-offs."""
    values = logits.to(torch.float64).log_softmax(-1)
    chosen = torch.tensor(tokens, device=values.device)
    own = values.gather(1, chosen[:, None]).squeeze(1).tolist()
    best = values.topk(min(count, values.shape[1]))
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        TokenLogprobs(
            value, tuple(pair for pair in zip(*top, strict=True) if math.isfinite(pair[1]))
        )
        for value, top in zip(own, tops, strict=True)
    ]
