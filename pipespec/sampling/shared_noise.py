"""Shared sampling noise: a draft ranks tokens with the target's noise (docs/sampling.md).

The target takes the token with the highest log p / T plus a noise that seed and position determine.
A draft knows q, which is near p, and the noise exactly. So it ranks its draft tokens by log q / T
plus that noise, instead of by q. Nothing here decides a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pipespec.core import SamplingParams
from pipespec.sampling.distribution import column
from pipespec.sampling.draw import noise, noise_values
from pipespec.system.device_copy import to_device

# How many of the draft's most probable tokens are scored; beyond them the noise rarely helps.
NUM_SCORED = 1024
# Temperatures are limited to these; beyond them only the magnitude of numbers changes.
COLDEST, HOTTEST = 1e-6, 1e6
# A token that the draft would cut off may be one that the target keeps. So it is not left out, but
# ranked as if its log-probability were lower by this.
CUT_OFF_PENALTY = 3.0


def score_tokens(
    logits: Tensor,
    positions: Sequence[int],
    samplings: Sequence[SamplingParams],
    tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens that may be drawn, the score of each, and the probability that one of them is
    drawn: int64 and float64 `[rows, n]`, float64 `[rows]`.

    Args:
        logits: the draft's, `[rows, columns]`.
        positions, samplings: of the tokens, `[rows]`.
        tokens: those of the columns, rising, `[columns]`; None: 0, 1, 2, ...

    A score is T (log q / T + noise), up to a constant of its row. So its error, that of log q, has
    the same magnitude at every temperature.
    """
    logits = _biased(logits.float(), samplings, tokens)
    temperature = column([min(max(one.temperature, COLDEST), HOTTEST) for one in samplings], logits)
    best = logits.topk(min(NUM_SCORED, logits.shape[1]))
    behind = (best.values - best.values[:, :1]).double()  # 0 and below, falling
    logq = behind / temperature
    share = torch.ones(len(logits), dtype=torch.float64, device=logits.device)
    if logits.shape[1] > NUM_SCORED:
        whole = ((logits - best.values[:, :1]) / temperature.float()).logsumexp(1)
        share = (logq.logsumexp(1) - whole).exp().clamp(max=1.0)
    chosen = best.indices if tokens is None else tokens[best.indices]
    drawn = noise([one.seed for one in samplings], positions, chosen)
    drawn -= CUT_OFF_PENALTY * cut_off_mask(logq, samplings)
    return chosen, behind + temperature * drawn, share


def _biased(logits: Tensor, samplings: Sequence[SamplingParams], tokens: Tensor | None) -> Tensor:
    """Add the logit biases of the tokens that the draft knows."""
    added = [
        (row, token, float(bias))
        for row, one in enumerate(samplings)
        for token, bias in one.logit_bias
    ]
    if not added:
        return logits
    rows, biased, biases = (
        to_device(torch.tensor(x), logits.device) for x in zip(*added, strict=True)
    )
    if tokens is None:
        tokens = torch.arange(logits.shape[1], device=logits.device)
    columns = torch.searchsorted(tokens, biased).clamp(max=len(tokens) - 1)
    biases = biases.where(tokens[columns] == biased, 0.0)  # 0 in any column: the draft lacks it
    return logits.index_put((rows, columns), biases, accumulate=True)


def reweight(
    stated: Sequence[tuple[int, float]], position: int, seed: int
) -> list[tuple[int, float]]:
    """Probabilities that a proposer without logits states, given the noise.

    Args:
        stated: tokens with the probabilities with which they are drawn.
        position: of the tokens.

    Returns the tokens, the likeliest first. One of the tokens that are not stated, whose total
    probability is r, is drawn if the highest of their scores exceeds the best of the stated ones,
    s. As their noise is not computed, that has the probability 1 - exp(-r exp(-s)). The stated
    tokens share the rest in proportion to exp(log p + noise).
    """
    if not stated:
        return []
    drawn = noise_values(seed, position, [token for token, _ in stated])
    known = [math.log(p) + of_token for (_, p), of_token in zip(stated, drawn, strict=True)]
    others = max(1 - sum(p for _, p in stated), 0.0)
    best = max(known)
    weights = [math.exp(score - best) for score in known]
    share = math.exp(-others * math.exp(-best)) / sum(weights)
    weighed = [(token, share * w) for (token, _), w in zip(stated, weights, strict=True)]
    return sorted((each for each in weighed if each[1] > 0), key=lambda each: -each[1])


def cut_off_mask(logq: Tensor, samplings: Sequence[SamplingParams]) -> Tensor:
    """Which tokens the min-p, top-k and top-p of each row would leave out, bool `[rows, n]`, given
    log-probabilities that fall along a row, up to a constant of the row."""
    floor = column([math.log(one.min_p) if one.min_p > 0 else -math.inf for one in samplings], logq)
    cut = logq < logq[:, :1] + floor
    num = logq.shape[1]
    cut |= torch.arange(num, device=logq.device) >= column(
        [one.top_k or num for one in samplings], logq
    )
    if any(one.top_p < 1 for one in samplings):
        kept = logq.masked_fill(cut, -torch.inf).softmax(1)
        most = column([one.top_p if one.top_p < 1 else math.inf for one in samplings], logq)
        cut |= kept.cumsum(1) - kept >= most
    return cut
