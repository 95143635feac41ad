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

from collections.abc import Sequence

import torch
from torch import Tensor

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


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned one."""
    return value - 2**64 if value >= 2**63 else value


def _shift(values: Tensor, by: int) -> Tensor:
    """Shift right without sign, int64."""
    return (values >> by) & (2 ** (64 - by) - 1)


def uniforms(seed: int, positions: Sequence[int], ids: Tensor) -> Tensor:
    """Numbers of the streams of (seed, position): float64 `[rows, n]` in (0, 1).

    Args:
        positions: of each row, `[rows]`.
        ids: which numbers of a row's stream, int64 `[rows, n]`.

    The stream is SplitMix64 from a state that is a hash of both.
    """
    starts = [_mix((_mix((seed + _GOLDEN) & _MASK) + (p + 1) * _GOLDEN) & _MASK) for p in positions]
    first = torch.tensor([_signed((start + _GOLDEN) & _MASK) for start in starts])
    # Integers wrap, as they should.
    values = ids * _signed(_GOLDEN) + first.to(ids.device)[:, None]
    for shift, factor in _MIX:
        values = (values ^ _shift(values, shift)) * _signed(factor)
    values ^= _shift(values, _LAST_SHIFT)
    return (_shift(values, 64 - _UNIFORM_BITS).double() + 0.5) * 2.0**-_UNIFORM_BITS


def noise(seed: int, positions: Sequence[int], ids: Tensor) -> Tensor:
    """The Gumbel noise of tokens `ids` at positions: float64 `[rows, n]`; arguments as above."""
    return -torch.log(-torch.log(uniforms(seed, positions, ids)))


def draw(logprobs: Tensor, seed: int, position: int) -> int:
    """A token from the distribution `logprobs` `[vocab]`; `position` is where it will stand."""
    ids = torch.isfinite(logprobs).nonzero().squeeze(1)
    return int(ids[(logprobs[ids] + noise(seed, [position], ids[None])[0]).argmax()])
