"""A draw keyed by (seed, position) (docs/sampling.md).

The draw adds to each log-probability a Gumbel noise and takes the maximum, which is a draw
from the distribution (Gumbel-max). The noise of token i at a position is the i-th number of
a stream that starts at a hash of seed and position: no state is kept, so a draw is the same
whichever rank, batch or run it happens in. Unlike the inverse of a cumulative sum, where one
token's rounding error moves all later tokens, the maximum changes only where two tokens come
within that error of each other; so the few last bits by which logits depend on the shape of a
batch hardly ever change a text.

Everything is float64, and pure: no generator, global or other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pipespec.core import SamplingParams
from pipespec.sampling.distribution import candidates, needs_sorting, select_rows
from pipespec.system.device_copy import to_device, to_host

# How many of the most probable tokens are sorted first for top-k and top-p. To sort a large
# vocabulary takes longer than all else.
SORTED_FIRST = 1024
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
# Uniforms are odd multiples of 2^-53, all exact in float64 and strictly between 0 and 1.
_UNIFORM_BITS = 52


def _mix(value: int) -> int:
    """The output function of SplitMix64 (Steele, Lea and Flood 2014)."""
    for shift, factor in _MIX:
        value = ((value ^ (value >> shift)) * factor) & _MASK
    return value ^ (value >> _LAST_SHIFT)


def _start(seed: int, position: int) -> int:
    """The state at which the stream of a position starts."""
    return _mix((_mix((seed + _GOLDEN) & _MASK) + (position + 1) * _GOLDEN) & _MASK)


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned one."""
    return value - 2**64 if value >= 2**63 else value


def _shift(values: Tensor, by: int) -> Tensor:
    """Logical shift to the right, int64."""
    return (values >> by) & (2 ** (64 - by) - 1)


def uniforms(seeds: Sequence[int], positions: Sequence[int], ids: Tensor) -> Tensor:
    """Numbers of the streams of (seed, position): float64 `[rows, n]` in (0, 1).

    Args:
        seeds, positions: of each row, `[rows]`.
        ids: which numbers of a row's stream, int64 `[rows, n]`.

    The stream is SplitMix64 from a state that is a hash of both.
    """
    starts = [_start(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    first = torch.tensor([_signed((start + _GOLDEN) & _MASK) for start in starts])
    # Integers overflow on purpose.
    values = ids * _signed(_GOLDEN) + to_device(first, ids.device)[:, None]
    for shift, factor in _MIX:
        values = (values ^ _shift(values, shift)) * _signed(factor)
    values ^= _shift(values, _LAST_SHIFT)
    return (_shift(values, 64 - _UNIFORM_BITS).double() + 0.5) * 2.0**-_UNIFORM_BITS


def noise(seeds: Sequence[int], positions: Sequence[int], ids: Tensor) -> Tensor:
    """The Gumbel noise of tokens `ids`, float64 `[rows, n]`; arguments as of `uniforms`."""
    return -torch.log(-torch.log(uniforms(seeds, positions, ids)))


def noise_values(seed: int, position: int, ids: Sequence[int]) -> list[float]:
    """The noise of a few tokens at one position, equal to that of `noise`, without tensors."""
    first = _start(seed, position) + _GOLDEN
    uniform = (
        ((_mix((token * _GOLDEN + first) & _MASK) >> (64 - _UNIFORM_BITS)) + 0.5)
        * 2.0**-_UNIFORM_BITS
        for token in ids
    )
    return [-math.log(-math.log(number)) for number in uniform]


def draw(
    scores: Tensor, samplings: Sequence[SamplingParams], positions: Sequence[int]
) -> list[int | None]:
    """The next token of each row, drawn with that row's parameters; None: a score is NaN or +inf,
    or all are -inf, so there is no distribution.

    Args:
        scores: adjusted logits, float64 `[rows, vocab]`.
        positions: of the tokens, `[rows]`.

    Rows that need sorting are drawn from their most probable tokens, and again from all tokens in
    the rare case that these do not suffice. The host waits for the device once either way.
    """
    tokens: list[int | None] = [None] * len(samplings)
    ranked = [needs_sorting(one) for one in samplings]
    for rows, most in (
        ([i for i, one in enumerate(ranked) if not one], scores.shape[1]),
        ([i for i, one in enumerate(ranked) if one], SORTED_FIRST),
    ):
        while rows:
            mine = [samplings[i] for i in rows]
            found = candidates(select_rows(scores, rows), mine, most)
            drawn = noise([one.seed for one in mine], [positions[i] for i in rows], found.ids)
            best, place = (found.weights + drawn).max(1, keepdim=True)
            # Relative to a maximum that is not finite no weight is above -inf.
            columns = found.ids.gather(1, place), best.isfinite(), found.complete[:, None]
            results = to_host(torch.cat([each.long() for each in columns], 1))[0].tolist()
            for i, (token, finite, _) in zip(rows, results, strict=True):
                tokens[i] = token if finite else None
            rows = [i for i, (*_, complete) in zip(rows, results, strict=True) if not complete]
            most = scores.shape[1]
    return tokens
