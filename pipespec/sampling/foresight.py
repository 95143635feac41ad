"""What a draft can know of a draw that the target will make: its noise (docs/sampling.md).

The target takes the token with the highest log p / T plus a noise that seed and position fix. A
draft knows q, which is near p, and the noise exactly; so it ranks its guesses by log q / T plus
that noise, instead of q. Nothing here decides a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pipespec.core import Sampling
from pipespec.sampling.draw import few_noises, noise

# So many of the draft's most probable tokens are looked at; beyond them the noise rarely helps.
LOOKED_AT = 1024
# Beyond these temperatures nothing changes but the size of numbers.
COLDEST, HOTTEST = 1e-6, 1e6
# A token that the draft would cut off may be one that the target would not: it is ranked as if it
# were so much (natural logarithm) less probable, not left out.
CUT_OFF = 3.0


def scores(
    logits: Tensor, positions: Sequence[int], asked: Sequence[Sampling]
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens that may be drawn, how far each is ahead, and how likely one of them is drawn:
    int64 and float64 `[rows, n]`, float64 `[rows]`.

    Args:
        logits: the draft's, `[rows, vocab]`.
        positions, asked: where the tokens would stand, and how they are drawn, `[rows]`.

    A score is T (log q / T + noise), but for a constant of its row; so what is unknown of it, the
    error of log q, has one size at every temperature.
    """
    logits = _biased(logits.float(), asked)
    temperature = _column([min(max(one.temperature, COLDEST), HOTTEST) for one in asked], logits)
    best = logits.topk(min(LOOKED_AT, logits.shape[1]))
    behind = (best.values - best.values[:, :1]).double()  # 0 and below, falling
    logq = behind / temperature
    share = torch.ones(len(logits), dtype=torch.float64, device=logits.device)
    if logits.shape[1] > LOOKED_AT:
        whole = ((logits - best.values[:, :1]) / temperature.float()).logsumexp(1)
        share = (logq.logsumexp(1) - whole).exp().clamp(max=1.0)
    drawn = noise([one.seed for one in asked], positions, best.indices)
    drawn -= CUT_OFF * cut_off(logq, asked)
    return best.indices, behind + temperature * drawn, share


def _biased(logits: Tensor, asked: Sequence[Sampling]) -> Tensor:
    """With what was asked to be added, as far as the draft knows those tokens."""
    added = [
        (row, token, float(bias))
        for row, one in enumerate(asked)
        for token, bias in one.logit_bias
        if token < logits.shape[1]
    ]
    if not added:
        return logits
    rows, tokens, biases = (torch.tensor(x, device=logits.device) for x in zip(*added, strict=True))
    return logits.index_put((rows, tokens), biases, accumulate=True)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def reweigh(
    stated: Sequence[tuple[int, float]], position: int, seed: int
) -> list[tuple[int, float]]:
    """Probabilities that something else than a model states, once the noise is known.

    Args:
        stated: tokens with the probabilities that they are drawn with.
        position: where the tokens would stand.

    Returns the tokens, the likeliest first. Of the tokens that are not stated, with probability r
    in all, one is drawn if the highest of their noise is beyond the best of the stated, s; as
    theirs is not looked at, that has the probability 1 - exp(-r exp(-s)). What is left goes to the
    stated ones in proportion to exp(log p + noise).
    """
    if not stated:
        return []
    drawn = few_noises(seed, position, [token for token, _ in stated])
    known = [math.log(p) + of_token for (_, p), of_token in zip(stated, drawn, strict=True)]
    others = max(1 - sum(p for _, p in stated), 0.0)
    best = max(known)
    weights = [math.exp(score - best) for score in known]
    share = math.exp(-others * math.exp(-best)) / sum(weights)
    weighed = [(token, share * w) for (token, _), w in zip(stated, weights, strict=True)]
    return sorted((each for each in weighed if each[1] > 0), key=lambda each: -each[1])


def cut_off(logq: Tensor, asked: Sequence[Sampling]) -> Tensor:
    """bool `[rows, n]`: which tokens the min-p, top-k and top-p of each row would leave out, of
    log-probabilities that fall along a row; a constant of the row may be missing."""
    floor = _column([math.log(one.min_p) if one.min_p > 0 else -math.inf for one in asked], logq)
    cut = logq < logq[:, :1] + floor
    num = logq.shape[1]
    cut |= torch.arange(num, device=logq.device) >= _column(
        [one.top_k or num for one in asked], logq
    )
    if any(one.top_p < 1 for one in asked):
        kept = logq.masked_fill(cut, -torch.inf).softmax(1)
        most = _column([one.top_p if one.top_p < 1 else math.inf for one in asked], logq)
        cut |= kept.cumsum(1) - kept >= most
    return cut
