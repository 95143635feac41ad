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

from pipespec.core import Sampling
from pipespec.sampling.distribution import candidates, cut_by_rank

# Most probable tokens among which top-k and top-p look before they sort them all, which takes
# longer than all else in a large vocabulary.
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
    """Where the stream of a position begins."""
    return _mix((_mix((seed + _GOLDEN) & _MASK) + (position + 1) * _GOLDEN) & _MASK)


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned one."""
    return value - 2**64 if value >= 2**63 else value


def _shift(values: Tensor, by: int) -> Tensor:
    """Shift right without sign, int64."""
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
    # Integers wrap, as they should.
    values = ids * _signed(_GOLDEN) + first.to(ids.device)[:, None]
    for shift, factor in _MIX:
        values = (values ^ _shift(values, shift)) * _signed(factor)
    values ^= _shift(values, _LAST_SHIFT)
    return (_shift(values, 64 - _UNIFORM_BITS).double() + 0.5) * 2.0**-_UNIFORM_BITS


def noise(seeds: Sequence[int], positions: Sequence[int], ids: Tensor) -> Tensor:
    """The Gumbel noise of tokens `ids` at positions: float64 `[rows, n]`; arguments as above."""
    return -torch.log(-torch.log(uniforms(seeds, positions, ids)))


def few_noises(seed: int, position: int, ids: Sequence[int]) -> list[float]:
    """The noise of a few tokens at one position, as `noise` has it, without tensors."""
    first = _start(seed, position) + _GOLDEN
    uniform = (
        ((_mix((token * _GOLDEN + first) & _MASK) >> (64 - _UNIFORM_BITS)) + 0.5)
        * 2.0**-_UNIFORM_BITS
        for token in ids
    )
    return [-math.log(-math.log(number)) for number in uniform]


def draw(scores: Tensor, asked: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """The token that follows at each row, drawn with that row's settings.

    Args:
        scores: adjusted logits, float64 `[rows, vocab]`.
        positions: where the tokens will stand, `[rows]`.

    Rows that are cut by rank are drawn from their most probable tokens, and again from all in the
    rare case that those do not do; either way the device is waited for once.
    """
    tokens = [0] * len(asked)
    ranked = [cut_by_rank(one) for one in asked]
    for rows, most in (
        ([i for i, one in enumerate(ranked) if not one], scores.shape[1]),
        ([i for i, one in enumerate(ranked) if one], SORTED_FIRST),
    ):
        while rows:
            mine = [asked[i] for i in rows]
            found = candidates(scores if len(rows) == len(asked) else scores[rows], mine, most)
            drawn = noise([one.seed for one in mine], [positions[i] for i in rows], found.ids)
            best = (found.weights + drawn).argmax(1, keepdim=True)
            told = torch.stack((found.ids.gather(1, best)[:, 0], found.complete.long()), 1).tolist()
            for i, (token, _) in zip(rows, told, strict=True):
                tokens[i] = token
            rows = [i for i, (_, complete) in zip(rows, told, strict=True) if not complete]
            most = scores.shape[1]
    return tokens
