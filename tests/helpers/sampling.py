"""Logits to draw from, and one token drawn: what longer ways to a text must agree with."""

from __future__ import annotations

import torch
from torch import Tensor

from pipespec.core import Sampling
from pipespec.sampling.distribution import Tally, adjust, distribution
from pipespec.sampling.draw import draw

VOCAB = 97


def sample(logits: Tensor, sampling: Sampling, position: int, tally: Tally | None = None) -> int:
    """The token that follows, from the target's logits `[vocab]`.

    Args:
        position: of the token: how many tokens stand before it, the prompt's included.
        tally: of the text before it; needed if `sampling.penalises`.
    """
    scores = adjust(logits, sampling, tally)
    if sampling.temperature == 0:
        return int(scores.argmax())
    return draw(distribution(scores, sampling), sampling.seed, position)


def some_logits(seed: int, size: int = VOCAB) -> Tensor:
    """Random logits `[size]`."""
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(size, generator=generator)
