"""The blocks in which GGUF files and others store the rows of quantised matrices.

A weight is `number * scale + offset`: its code stands for a number, and neighbours, a group, share
a scale and an offset. Layouts are those of ggml (`ggml-common.h`, and `dequantize_row_*` in
`ggml-quants.c`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

# Numbers of 4-bit floats (E2M1), doubled so that they are whole.
FP4_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
SUPER_BLOCK = 256


@dataclass(frozen=True)
class Factors:
    """What the scales, or the offsets, of all groups are products of.

    Attributes:
        large: `[rows, blocks]` float16, a factor of all groups of a block; None: 1.
        small: `[rows, groups]` uint8, the place of a factor in a table of 256; None: 1.
    """

    large: Tensor | None = None
    small: Tensor | None = None

    def products(self, table: Tensor) -> Tensor:
        """The scales of the groups, float32; of the blocks, if all groups of one have the same."""
        if self.small is None:
            assert self.large is not None, "one of both is stored"
            return self.large.float()
        found = table[self.small.int()]
        if self.large is None:
            return found
        by_block = found.view(*self.large.shape, -1) * self.large.float().unsqueeze(-1)
        return by_block.view(found.shape)


@dataclass(frozen=True)
class BlockKind:
    """A type of block.

    Attributes:
        size: weights of a block.
        num_bytes: of a block.
        group: neighbours with one scale.
        bits: of a code.
        codes: `[blocks, num_bytes]` uint8 -> `[blocks, size]` uint8.
        scales: the factors of the scales of blocks `[blocks, num_bytes]`.
        first: the number that code 0 stands for; the others follow it.
        is_fp4: codes stand for FP4_DOUBLED instead.
        offsets: the factors of the offsets; None: there are none.
        scale_table, offset_table: the tables of small factors.
    """

    size: int
    num_bytes: int
    group: int
    bits: int
    codes: Callable[[Tensor], Tensor]
    scales: Callable[[Tensor], Factors]
    first: int = 0
    is_fp4: bool = False
    offsets: Callable[[Tensor], Factors] | None = None
    scale_table: Tensor = field(default_factory=lambda: torch.ones(256))
    offset_table: Tensor = field(default_factory=lambda: torch.ones(256))


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

    def part(self, rows: slice) -> BlockWeights:
        """These rows of the matrix."""
        return replace(self, rows=self.rows[rows])

    def blocks(self) -> BlockWeights:
        """Itself."""
        return self

    def codes(self) -> Tensor:
        """The codes, uint8 `[out, in]`."""
        return KINDS[self.kind].codes(self._blocks()).view(self.shape)

    def scales(self) -> Factors:
        """The factors of the scales."""
        return self._by_row(KINDS[self.kind].scales(self._blocks()))

    def offsets(self) -> Factors | None:
        """The factors of the offsets."""
        found = KINDS[self.kind].offsets
        return None if found is None else self._by_row(found(self._blocks()))

    def int4(self) -> tuple[Tensor, Tensor, Tensor]:
        """See `Int4Weights`; of the kinds in INT4_KINDS."""
        kind, offsets = KINDS[self.kind], self.offsets()
        scales = self.scales().products(kind.scale_table)
        middle = (8 + kind.first) * scales
        if offsets is not None:
            middle += offsets.products(kind.offset_table)
        return self.codes(), scales, middle

    def dense(self) -> Tensor:
        """The weights `[out, in]` in float32."""
        kind, offsets = KINDS[self.kind], self.offsets()
        scales = self.scales().products(kind.scale_table) * self.factor
        weights = numbers_of(self.codes(), kind, torch.float32)
        by_group = weights.view(*scales.shape, -1)
        by_group *= scales.unsqueeze(-1)
        if offsets is not None:
            by_group += offsets.products(kind.offset_table).unsqueeze(-1)
        return weights

    def _blocks(self) -> Tensor:
        return self.rows.reshape(-1, KINDS[self.kind].num_bytes)

    def _by_row(self, found: Factors) -> Factors:
        parts = (found.large, found.small)
        rows = len(self.rows)
        return Factors(*(None if each is None else each.reshape(rows, -1) for each in parts))


def numbers_of(codes: Tensor, kind: BlockKind, dtype: torch.dtype) -> Tensor:
    """What codes stand for."""
    if kind.is_fp4:
        return _fp4_numbers(dtype, codes.device)[codes.int()]
    return codes.to(dtype).add_(kind.first)


@cache
def _fp4_numbers(dtype: torch.dtype, device: torch.device) -> Tensor:
    """FP4_DOUBLED on a device; a copy to it in every product would wait for it."""
    return torch.tensor(FP4_DOUBLED, dtype=dtype, device=device)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The 16-bit float at a byte, `[blocks, 1]`."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _halves(at: int) -> Callable[[Tensor], Factors]:
    """One factor a block, at a byte."""
    return lambda blocks: Factors(_half(blocks, at))


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


def _k_scales(blocks: Tensor) -> Factors:
    """Of Q4_K and Q5_K: eight numbers of 6 bits."""
    first, third = blocks[:, 4:8], blocks[:, 12:16]
    return Factors(_half(blocks, 0), torch.cat((first & 63, (third & 15) | (first >> 6) << 4), 1))


def _k_offsets(blocks: Tensor) -> Factors:
    second, third = blocks[:, 8:12], blocks[:, 12:16]
    return Factors(_half(blocks, 2), torch.cat((second & 63, (third >> 4) | (second >> 6) << 4), 1))


def _q3_k_scales(blocks: Tensor) -> Factors:
    low = _nibbles(blocks[:, 96:104]).reshape(-1, 16)
    high = _fields(blocks[:, 104:108], 2).reshape(-1, 16)
    return Factors(_half(blocks, 108), low | high << 4)


def _nibble_codes(at: int) -> Callable[[Tensor], Tensor]:
    """16 bytes from this one on: the low halves, then the high ones."""
    return lambda blocks: _nibbles(blocks[:, at : at + 16]).reshape(-1, 32)


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
    return low | high << 4


def _nvfp4_codes(blocks: Tensor) -> Tensor:
    pairs = blocks[:, 1:9]
    return torch.stack((pairs & 15, pairs >> 4), -1).reshape(-1, 16)


_NATURAL = torch.arange(256).float()
_SIGNED = torch.cat((_NATURAL[:128], _NATURAL[128:] - 256))
# Halved, as the numbers of 4-bit floats are doubled.
_POWERS_OF_TWO = torch.exp2(_NATURAL - 128)
_FP8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float() / 2

# By their names in ggml, but for NVFP4: a byte of it holds two neighbours.
KINDS = {
    "Q4_0": BlockKind(32, 18, 32, 4, _nibble_codes(2), _halves(0), -8),
    "Q4_1": BlockKind(32, 20, 32, 4, _nibble_codes(4), _halves(0), offsets=_halves(2)),
    "Q5_0": BlockKind(32, 22, 32, 5, _q5_codes(2), _halves(0), -16),
    "Q5_1": BlockKind(32, 24, 32, 5, _q5_codes(4), _halves(0), offsets=_halves(2)),
    "Q8_0": BlockKind(32, 34, 32, 8, lambda b: b[:, 2:34] ^ 128, _halves(0), -128),
    "Q2_K": BlockKind(
        SUPER_BLOCK,
        84,
        16,
        2,
        _q2_k_codes,
        lambda b: Factors(_half(b, 80), b[:, :16] & 15),
        offsets=lambda b: Factors(_half(b, 82), b[:, :16] >> 4),
        scale_table=_NATURAL,
        offset_table=-_NATURAL,
    ),
    "Q3_K": BlockKind(
        SUPER_BLOCK, 110, 16, 3, _q3_k_codes, _q3_k_scales, -4, scale_table=_NATURAL - 32
    ),
    "Q4_K": BlockKind(
        SUPER_BLOCK,
        144,
        32,
        4,
        lambda b: _k_nibbles(b, 16),
        _k_scales,
        offsets=_k_offsets,
        scale_table=_NATURAL,
        offset_table=-_NATURAL,
    ),
    "Q5_K": BlockKind(
        SUPER_BLOCK,
        176,
        32,
        5,
        _q5_k_codes,
        _k_scales,
        offsets=_k_offsets,
        scale_table=_NATURAL,
        offset_table=-_NATURAL,
    ),
    "Q6_K": BlockKind(
        SUPER_BLOCK,
        210,
        16,
        6,
        _q6_k_codes,
        lambda b: Factors(_half(b, 208), b[:, 192:208]),
        -32,
        scale_table=_SIGNED,
    ),
    "MXFP4": BlockKind(
        32,
        17,
        32,
        4,
        _nibble_codes(1),
        lambda b: Factors(small=b[:, :1]),
        is_fp4=True,
        scale_table=_POWERS_OF_TWO,
    ),
    "NVFP4": BlockKind(
        16,
        9,
        16,
        4,
        _nvfp4_codes,
        lambda b: Factors(small=b[:, :1]),
        is_fp4=True,
        scale_table=_FP8,
    ),
}
# Those with codes of 0 to 15 and groups of 32, which the product for packed 4-bit weights takes.
INT4_KINDS = ("Q4_0", "Q4_1", "Q4_K")
