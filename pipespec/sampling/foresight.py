"""What a draft can know of a draw that the target will make: its noise (docs/sampling.md).

The target takes the token with the highest log p / T plus a noise that seed and position fix. A
draft knows q, which is near p, and the noise exactly; so it ranks its guesses by log q / T plus
that noise, instead of q. Nothing here decides a token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pipespec.core import Sampling
from pipespec.sampling.draw import noise

# So many of the draft's most probable tokens are looked at; beyond them the noise rarely helps.
LOOKED_AT = 1024
# Beyond these temperatures nothing changes but the size of numbers.
COLDEST, HOTTEST = 1e-6, 1e6
# A token that the draft would cut off may be one that the target would not: it is ranked as if it
# were so much (natural logarithm) less probable, not left out.
CUT_OFF = 3.0


def scores(
    logits: Tensor, positions: list[int], sampling: Sampling
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens that may be drawn, how far each is ahead, and how likely one of them is drawn:
    int64 and float64 `[rows, n]`, float64 `[rows]`.

    Args:
        logits: the draft's, `[rows, vocab]`.
        positions: where the tokens would stand, `[rows]`.

    A score is T (log q / T + noise), but for a constant of its row; so what is unknown of it, the
    error of log q, has one size at every temperature.
    """
    logits = logits.float()
    if sampling.logit_bias:
        ids, biases = zip(*sampling.logit_bias, strict=True)
        known = [(i, bias) for i, bias in zip(ids, biases, strict=True) if i < logits.shape[1]]
        columns = torch.tensor([i for i, _ in known], device=logits.device, dtype=torch.int64)
        added = torch.tensor([float(bias) for _, bias in known], device=logits.device)
        logits = logits.index_add(1, columns, added.expand(len(logits), -1))
    temperature = min(max(sampling.temperature, COLDEST), HOTTEST)
    best = logits.topk(min(LOOKED_AT, logits.shape[1]))
    behind = (best.values - best.values[:, :1]).double()  # 0 and below, falling
    logq = behind / temperature
    share = torch.ones(len(logits), dtype=torch.float64, device=logits.device)
    if logits.shape[1] > LOOKED_AT:
        whole = ((logits - best.values[:, :1]) / temperature).logsumexp(1)
        share = (logq.logsumexp(1) - whole).exp().clamp(max=1.0)
    drawn = noise([sampling.seed] * len(positions), positions, best.indices)
    drawn -= CUT_OFF * cut_off(logq, sampling)
    return best.indices, behind + temperature * drawn, share


def reweigh(logps: Tensor, tokens: Tensor, positions: list[int], seed: int) -> Tensor:
    """Probabilities that something else than a model states, once the noise is known.

    Args:
        logps: of the tokens as they will be drawn, `[rows, n]`; -inf: no token.
        tokens: int64 `[rows, n]`.
        positions: where the tokens would stand, `[rows]`.

    Returns log-probabilities `[rows, n]`. Of the tokens that are not stated, with probability r in
    all, one is drawn if the highest of their noise is beyond the best of the stated, s; as theirs
    is not looked at, that has the probability 1 - exp(-r exp(-s)). What is left goes to the
    stated ones in proportion to exp(log p + noise).
    """
    if not logps.shape[1]:
        return logps
    known = logps + noise([seed] * len(positions), positions, tokens)
    others = 1 - logps.exp().sum(1, keepdim=True).clamp(max=1.0)
    stated = -others * torch.exp(-known.max(1, keepdim=True).values)
    weighed = stated + known.log_softmax(1)
    return weighed.masked_fill(weighed.isnan(), -torch.inf)  # rows without any token


def cut_off(logq: Tensor, sampling: Sampling) -> Tensor:
    """bool `[rows, n]`: which tokens min-p, top-k and top-p would leave out, of
    log-probabilities that fall along a row; a constant of the row may be missing."""
    cut = torch.zeros_like(logq, dtype=torch.bool)
    if sampling.min_p > 0:
        cut |= logq < logq[:, :1] + math.log(sampling.min_p)
    if sampling.top_k > 0:
        cut[:, sampling.top_k :] = True
    if sampling.top_p < 1:
        kept = logq.masked_fill(cut, -torch.inf).softmax(1)
        cut |= kept.cumsum(1) - kept >= sampling.top_p
    return cut
