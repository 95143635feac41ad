"""The blocks in which GGUF files and others store the rows of quantised matrices.

A weight is `code * scale + offset`, with one scale and offset for a group of neighbours. Layouts
are those of ggml (`ggml-common.h`, and `dequantize_row_*` in `ggml-quants.c`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

# Numbers of 4-bit floats (E2M1), doubled so that they are whole.
FP4_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
SUPER_BLOCK = 256


@dataclass(frozen=True)
class BlockKind:
    """A type of block.

    Attributes:
        size: weights of a block.
        num_bytes: of a block.
        group: neighbours with one scale.
        codes: `[blocks, num_bytes]` uint8 -> `[blocks, size]` uint8 or int8.
        scales: `[blocks, num_bytes]` uint8 -> `[blocks, groups]` float32 scales, and offsets or
            None.
    """

    size: int
    num_bytes: int
    group: int
    codes: Callable[[Tensor], Tensor]
    scales: Callable[[Tensor], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class BlockWeights:
    """A matrix `[out, in]` as rows of blocks, uint8 `[out, bytes]`; `kind` is a name in KINDS, and
    all weights are multiplied by `factor`."""

    rows: Tensor
    kind: str
    factor: float = 1.0

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        kind = KINDS[self.kind]
        return len(self.rows), self.rows.shape[1] // kind.num_bytes * kind.size

    def grouped(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes `[out, in]`, scales and offsets `[out, groups]` in float32."""
        return unpacked(self.rows, self.kind, self.factor)

    def int4(self) -> tuple[Tensor, Tensor, Tensor]:
        """See `Int4Weights`; of the kinds in INT4_KINDS."""
        codes, scales, offsets = self.grouped()
        assert offsets is not None, "codes from 0 on have one"
        return codes, scales, 8 * scales + offsets

    def dense(self) -> Tensor:
        """The weights `[out, in]` in float32."""
        codes, scales, offsets = self.grouped()
        weights = codes.float().view(*scales.shape, -1)
        weights *= scales.unsqueeze(-1)
        if offsets is not None:
            weights += offsets.unsqueeze(-1)
        return weights.view(codes.shape)


def unpacked(rows: Tensor, kind: str, factor: float = 1.0) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of rows of blocks `[rows, bytes]`: codes `[rows, in]`, scales and offsets `[rows, groups]`
    in float32, multiplied by `factor`."""
    found = KINDS[kind]
    blocks = rows.reshape(-1, found.num_bytes)
    scales, offsets = found.scales(blocks)
    if factor != 1:
        assert offsets is None
        scales = scales * factor
    by_row = (len(rows), -1)
    return (
        found.codes(blocks).view(by_row),
        scales.reshape(by_row),
        None if offsets is None else offsets.reshape(by_row),
    )


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


def _high_bits(blocks: Tensor, at: int) -> Tensor:
    """32 bits from a byte on, the lowest first, as 0 or 16: `[blocks, 32]`."""
    return _fields(blocks[:, at : at + 4], 1).transpose(1, 2).reshape(-1, 32) << 4


def _small_scales(start: int, half: float) -> Callable[[Tensor], tuple[Tensor, Tensor | None]]:
    """One scale a block at a byte, of codes around `half`."""

    def scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
        d = _half(blocks, start)
        return d, None if half == 0 else -half * d

    return scales


def _with_minimum(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    return _half(blocks, 0), _half(blocks, 2)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    """Of Q4_K and Q5_K: eight scales and minimums of 6 bits in 12 bytes."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6) << 4), 1)
    least = torch.cat((second & 63, (third >> 4) | (second >> 6) << 4), 1)
    return _half(blocks, 0) * scales, -_half(blocks, 2) * least


def _q2_k_scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    packed = blocks[:, :16]
    return _half(blocks, 80) * (packed & 15), -_half(blocks, 82) * (packed >> 4)


def _q3_k_scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    low = _nibbles(blocks[:, 96:104]).reshape(-1, 16)
    high = _fields(blocks[:, 104:108], 2).reshape(-1, 16)
    scales = _half(blocks, 108) * ((low | high << 4).float() - 32)
    return scales, -4 * scales


def _q6_k_scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    return scales, None


def _fp4_scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    """A power of two, halved as the numbers are doubled."""
    return torch.exp2(blocks[:, :1].float() - 128), None


def _nvfp4_scales(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    """An FP8 number, halved as the numbers are doubled."""
    return blocks[:, :1].contiguous().view(torch.float8_e4m3fn).float() / 2, None


def _q5_codes(start: int) -> Callable[[Tensor], Tensor]:
    def codes(blocks: Tensor) -> Tensor:
        low = _nibbles(blocks[:, start + 4 : start + 20]).reshape(-1, 32)
        return low | _high_bits(blocks, start)

    return codes


def _q2_k_codes(blocks: Tensor) -> Tensor:
    return _fields(blocks[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, SUPER_BLOCK)


def _q3_k_codes(blocks: Tensor) -> Tensor:
    low = _fields(blocks[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, SUPER_BLOCK)
    high = _fields(blocks[:, :32], 1).reshape(-1, SUPER_BLOCK)
    return low | high << 2


def _k_nibbles(blocks: Tensor, at: int) -> Tensor:
    return _nibbles(blocks[:, at : at + 128].reshape(-1, 4, 32)).reshape(-1, SUPER_BLOCK)


def _q5_k_codes(blocks: Tensor) -> Tensor:
    high = _fields(blocks[:, 16:48], 1).reshape(-1, SUPER_BLOCK)
    return _k_nibbles(blocks, 48) | high << 4


def _q6_k_codes(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, SUPER_BLOCK)
    high = _fields(blocks[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, SUPER_BLOCK)
    return (low | high << 4).view(torch.int8) - 32


@cache
def _fp4_table(device: torch.device) -> Tensor:
    return torch.tensor(FP4_DOUBLED, dtype=torch.int8, device=device)


def _fp4(places: Tensor) -> Tensor:
    return _fp4_table(places.device)[places.int()]


def _nvfp4_codes(blocks: Tensor) -> Tensor:
    pairs = blocks[:, 1:9]
    return _fp4(torch.stack((pairs & 15, pairs >> 4), -1)).reshape(-1, 16)


# By their names in ggml, but for NVFP4: a byte of it holds two neighbours.
KINDS = {
    "Q4_0": BlockKind(
        32, 18, 32, lambda b: _nibbles(b[:, 2:18]).reshape(-1, 32), _small_scales(0, 8)
    ),
    "Q4_1": BlockKind(32, 20, 32, lambda b: _nibbles(b[:, 4:20]).reshape(-1, 32), _with_minimum),
    "Q5_0": BlockKind(32, 22, 32, _q5_codes(2), _small_scales(0, 16)),
    "Q5_1": BlockKind(32, 24, 32, _q5_codes(4), _with_minimum),
    "Q8_0": BlockKind(
        32, 34, 32, lambda b: b[:, 2:34].contiguous().view(torch.int8), _small_scales(0, 0)
    ),
    "Q2_K": BlockKind(SUPER_BLOCK, 84, 16, _q2_k_codes, _q2_k_scales),
    "Q3_K": BlockKind(SUPER_BLOCK, 110, 16, _q3_k_codes, _q3_k_scales),
    "Q4_K": BlockKind(SUPER_BLOCK, 144, 32, lambda b: _k_nibbles(b, 16), _k_scales),
    "Q5_K": BlockKind(SUPER_BLOCK, 176, 32, _q5_k_codes, _k_scales),
    "Q6_K": BlockKind(SUPER_BLOCK, 210, 16, _q6_k_codes, _q6_k_scales),
    "MXFP4": BlockKind(
        32, 17, 32, lambda b: _fp4(_nibbles(b[:, 1:17])).reshape(-1, 32), _fp4_scales
    ),
    "NVFP4": BlockKind(16, 9, 16, _nvfp4_codes, _nvfp4_scales),
}
# Those with codes of 0 to 15 and groups of 32, which the product for packed 4-bit weights takes.
INT4_KINDS = ("Q4_0", "Q4_1", "Q4_K")
