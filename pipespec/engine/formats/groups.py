"""Weights as integers in groups, each with a scale and a zero point."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipespec.engine.formats.gguf_blocks import BlockWeights
from pipespec.engine.formats.matrix_packing import BLOCK, GROUPED_KIND
from pipespec.errors import ModelError, PackedMatmulError

# The largest error of a scale, relative to it: half the distance of two numbers of float16.
HALF_ROUNDING = 2**-11


@dataclass(frozen=True)
class GroupedWeights:
    """A matrix `[out, in]`: a weight is `(code - zero) * scale`, with zero and scale of its group.

    Attributes:
        codes: uint8 `[out, in]`.
        scales: `[out, groups]`, in the type that weights are rounded to.
        zeros: int16 `[out, groups]`.
        group_of: the group of each input, int64 `[in]`.
        kind: of ggml's blocks that they can become: GROUPED_KIND of codes of 4 bits, WIDE_KIND of
            codes of 8 whose zeros are all 128.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group_of: Tensor
    kind: str = GROUPED_KIND

    def dense(self) -> Tensor:
        """The weights `[out, in]` in the type of the scales, rounded as the quantisers' code
        does."""
        out, inputs = self.codes.shape
        groups = self.zeros.shape[1]
        if self.in_order and inputs % groups == 0:
            shape = (out, groups, inputs // groups)
            weights = self.codes.view(shape).to(self.scales.dtype)
            weights -= self.zeros.unsqueeze(-1)  # small integers, which every type holds
            weights *= self.scales.unsqueeze(-1)
            return weights.view(out, inputs)
        weights = self.codes.to(self.scales.dtype)
        weights -= self.zeros[:, self.group_of]
        weights *= self.scales[:, self.group_of]
        return weights

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        out, inputs = self.codes.shape
        return out, inputs

    def part(self, rows: slice) -> GroupedWeights:
        """These rows of the matrix."""
        return replace(
            self, codes=self.codes[rows], scales=self.scales[rows], zeros=self.zeros[rows]
        )

    def int4(self) -> tuple[Tensor, Tensor, Tensor]:
        """See `Int4Weights`."""
        if not self.in_order:
            raise ModelError("its groups are of any inputs, though config.json says otherwise")
        scales = self.scales.float()
        return self.codes, scales, (8 - self.zeros.float()) * scales

    def blocks(self) -> BlockWeights:
        """The same in ggml's blocks of 32, with scales and offsets rounded to float16.

        Raises ModelError if groups are not of consecutive inputs, and PackedMatmulError if float16
        does not hold a scale, or codes are not around 128.
        """
        codes, scales, middles = self.int4()
        out, inputs = codes.shape
        if self.kind == GROUPED_KIND:
            numbers = torch.stack((scales, middles - 8 * scales), -1)
            low, high = codes.view(out, -1, 2, BLOCK // 2).unbind(2)
            stored = low | high << 4
        else:
            if bool((self.zeros != 128).any()):
                raise PackedMatmulError("some groups of 8 bits have a zero point of their own")
            numbers, stored = scales.unsqueeze(-1), codes.view(out, -1, BLOCK) ^ 128
        halves = numbers.to(torch.float16)
        off = (halves.float() - numbers).abs() > HALF_ROUNDING * numbers.abs()
        if bool((off | ~halves.isfinite()).any()):
            raise PackedMatmulError("float16 does not hold some scales of its groups")
        of_block = halves.repeat_interleave(inputs // BLOCK // scales.shape[1], 1)
        factors = of_block.contiguous().view(torch.uint8).view(out, inputs // BLOCK, -1)
        return BlockWeights(torch.cat((factors, stored), -1).flatten(1), self.kind)

    @property
    def in_order(self) -> bool:
        """Whether groups are consecutive inputs, all groups of the same size."""
        inputs, groups = len(self.group_of), self.zeros.shape[1]
        size = -(-inputs // groups)
        return bool((self.group_of == torch.arange(inputs) // size).all())
