"""The blocks in which GGUF files and others store the rows of quantised matrices.

A weight is `number * scale + offset`: its code stands for a number, and neighbours, a group, share
a scale and an offset. Layouts are those of ggml (`ggml-common.h`, and `dequantize_row_*` in
`ggml-quants.c`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from pipespec.engine.formats.stored import row_parts

# Numbers of 4-bit floats (E2M1), doubled so that they are whole.
FP4_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
SUPER_BLOCK = 256


@dataclass(frozen=True)
class BlockKind:
    """A type of block.

    Attributes:
        codes: `[blocks, bytes]` uint8 -> `[blocks, weights]` uint8.
        scales: `[blocks, bytes]` uint8 -> `[blocks, groups]` float32.
        offsets: as the scales; None: there are none.
        first: the number that code 0 stands for; the others follow it.
        is_fp4: codes stand for FP4_DOUBLED instead.
    """

    codes: Callable[[Tensor], Tensor]
    scales: Callable[[Tensor], Tensor]
    offsets: Callable[[Tensor], Tensor] | None = None
    first: int = 0
    is_fp4: bool = False


def block_sizes(kind: str) -> tuple[int, int]:
    """Weights and bytes of a block."""
    return (16, 9) if kind == "NVFP4" else GGML_QUANT_SIZES[GGMLQuantizationType[kind]]


@dataclass(frozen=True)
class BlockWeights:
    """A matrix `[out, in]` as rows of blocks, uint8 `[out, bytes]`; `kind` is a name in KINDS, and
    all weights are multiplied by `factor`."""

    rows: Tensor
    kind: str
    factor: float = 1.0

    @property
    def shape(self) -> tuple[int, int]:
        size, num_bytes = block_sizes(self.kind)
        return len(self.rows), self.rows.shape[1] // num_bytes * size

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes

    def part(self, rows: slice) -> BlockWeights:
        return replace(self, rows=self.rows[rows])

    def held(self, device: torch.device) -> BlockWeights:
        return replace(self, rows=self.rows.to(device))

    def int4(self) -> tuple[Tensor, Tensor, Tensor]:
        """See `Int4Weights`; of blocks of 4-bit integers."""
        kind = KINDS[self.kind]
        scales = self._by_row(kind.scales)
        middle = (8 + kind.first) * scales
        if kind.offsets is not None:
            middle += self._by_row(kind.offsets)
        return self._by_row(kind.codes), scales, middle

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights `[out, in]`, computed in that type."""
        kind, codes = KINDS[self.kind], self._by_row(KINDS[self.kind].codes)
        if kind.is_fp4:
            weights = _fp4_numbers(dtype, codes.device)[codes.int()]
        else:
            weights = codes.to(dtype).add_(kind.first)
        scales = self._by_row(kind.scales) * self.factor
        by_group = weights.view(*scales.shape, -1)
        by_group.mul_(scales.to(dtype).unsqueeze(-1))
        if kind.offsets is not None:
            by_group.add_(self._by_row(kind.offsets).to(dtype).unsqueeze(-1))
        return weights

    def _by_row(self, read: Callable[[Tensor], Tensor]) -> Tensor:
        _, num_bytes = block_sizes(self.kind)
        return read(self.rows.reshape(-1, num_bytes)).reshape(len(self.rows), -1)


@dataclass(frozen=True)
class GgmlWeights:
    """A matrix of one of `library.TYPES`.

    Attributes:
        parts: its blocks, uint8 `[out, bytes]`, or numbers `[out, in]`; or those of two matrices,
            whose rows it has in turns.
        kind: the type.
        shape: rows and columns.
        order: row i is row `order[i]` of the only part, int64 `[out]`; None: they are in order.
    """

    parts: tuple[np.ndarray, ...]
    kind: str
    shape: tuple[int, int]
    order: Tensor | None = None


def in_blocks(weights: Any, device: torch.device) -> BlockWeights:
    """A matrix whose parts can become `blocks()`, on a device; some rows at a time, which bounds
    the memory that this takes."""
    for some in row_parts(weights.shape):
        found = weights.part(some).blocks()
        if some.start == 0:
            rows = found.rows.new_empty(weights.shape[0], found.rows.shape[1], device=device)
        rows[some] = found.rows
    return replace(found, rows=rows)


@cache
def _fp4_numbers(dtype: torch.dtype, device: torch.device) -> Tensor:
    """FP4_DOUBLED on a device; a copy to it in every product would wait for it."""
    return torch.tensor(FP4_DOUBLED, dtype=dtype, device=device)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The 16-bit float at a byte, as float32 `[blocks, 1]`."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """`[..., n]` bytes -> `[..., 2, n]`: the low halves, then the high ones."""
    return torch.stack((packed & 15, packed >> 4), -2)


def _fields(packed: Tensor, bits: int) -> Tensor:
    """`[..., n]` bytes -> `[..., 8 / bits, n]`: fields of so many bits, the lowest first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-2) >> shifts.unsqueeze(-1)) & ((1 << bits) - 1)


def _k_scales(blocks: Tensor) -> Tensor:
    """Of Q4_K and Q5_K: eight numbers of 6 bits."""
    first, third = blocks[:, 4:8], blocks[:, 12:16]
    return _half(blocks, 0) * torch.cat((first & 63, (third & 15) | (first >> 6) << 4), 1)


def _k_offsets(blocks: Tensor) -> Tensor:
    second, third = blocks[:, 8:12], blocks[:, 12:16]
    return -_half(blocks, 2) * torch.cat((second & 63, (third >> 4) | (second >> 6) << 4), 1)


def _q3_k_scales(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, 96:104]).reshape(-1, 16)
    high = _fields(blocks[:, 104:108], 2).reshape(-1, 16)
    return _half(blocks, 108) * ((low | high << 4).float() - 32)


def _nibble_codes(blocks: Tensor, at: int) -> Tensor:
    """16 bytes from this one on: the low halves, then the high ones."""
    return _nibbles(blocks[:, at : at + 16]).reshape(-1, 32)


def _q5_codes(blocks: Tensor, at: int) -> Tensor:
    """32 bits from this byte on, the lowest first, above the nibbles that follow."""
    high = _fields(blocks[:, at : at + 4], 1).transpose(1, 2).reshape(-1, 32)
    return _nibble_codes(blocks, at + 4) | high << 4


def _k_pairs(blocks: Tensor, at: int) -> Tensor:
    """64 bytes from this one on, of two bits each."""
    return _fields(blocks[:, at : at + 64].reshape(-1, 2, 32), 2).reshape(-1, SUPER_BLOCK)


def _k_nibbles(blocks: Tensor, at: int) -> Tensor:
    return _nibbles(blocks[:, at : at + 128].reshape(-1, 4, 32)).reshape(-1, SUPER_BLOCK)


def _k_high(blocks: Tensor, at: int) -> Tensor:
    """32 bytes from this one on, of a bit each."""
    return _fields(blocks[:, at : at + 32], 1).reshape(-1, SUPER_BLOCK)


def _q6_k_codes(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, SUPER_BLOCK)
    return low | _k_pairs(blocks, 128) << 4


_scale, _offset = partial(_half, at=0), partial(_half, at=2)
# By their names in ggml, but for NVFP4: a byte of it holds two neighbours. Scales of 4-bit floats
# are halved, as the numbers are doubled; MXFP4's are powers of two.
KINDS = {
    "Q4_0": BlockKind(partial(_nibble_codes, at=2), _scale, first=-8),
    "Q4_1": BlockKind(partial(_nibble_codes, at=4), _scale, _offset),
    "Q5_0": BlockKind(partial(_q5_codes, at=2), _scale, first=-16),
    "Q5_1": BlockKind(partial(_q5_codes, at=4), _scale, _offset),
    "Q8_0": BlockKind(lambda b: b[:, 2:34] ^ 128, _scale, first=-128),
    "Q2_K": BlockKind(
        partial(_k_pairs, at=16),
        lambda b: _half(b, 80) * (b[:, :16] & 15),
        lambda b: -_half(b, 82) * (b[:, :16] >> 4),
    ),
    "Q3_K": BlockKind(lambda b: _k_pairs(b, 32) | _k_high(b, 0) << 2, _q3_k_scales, first=-4),
    "Q4_K": BlockKind(partial(_k_nibbles, at=16), _k_scales, _k_offsets),
    "Q5_K": BlockKind(lambda b: _k_nibbles(b, 48) | _k_high(b, 16) << 4, _k_scales, _k_offsets),
    "Q6_K": BlockKind(
        _q6_k_codes,
        lambda b: _half(b, 208) * b[:, 192:208].contiguous().view(torch.int8),
        first=-32,
    ),
    "MXFP4": BlockKind(
        partial(_nibble_codes, at=1),
        lambda b: (b[:, :1].int() << 23).view(torch.float32) / 2,
        is_fp4=True,
    ),
    "NVFP4": BlockKind(
        lambda b: torch.stack((b[:, 1:9] & 15, b[:, 1:9] >> 4), -1).reshape(-1, 16),
        lambda b: b[:, :1].contiguous().view(torch.float8_e4m3fn).float() / 2,
        is_fp4=True,
    ),
}
