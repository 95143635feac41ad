"""Weights as integers in groups, each with a scale and a zero point."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipespec.engine.checkpoint.formats.gguf_blocks import BlockWeights
from pipespec.engine.checkpoint.formats.packing import GROUPED_KIND
from pipespec.errors import ModelError, PackedMatmulError

BLOCK = 32  # weights of a block of that kind
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
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group_of: Tensor
    factor = 1.0  # see `BlockWeights`

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
        does not hold a scale.
        """
        codes, scales, middles = self.int4()
        out, inputs = codes.shape
        both = torch.stack((scales, middles - 8 * scales), -1)
        numbers = both.to(torch.float16)
        off = (numbers.float() - both).abs() > HALF_ROUNDING * both.abs()
        if bool((off | ~numbers.isfinite()).any()):
            raise PackedMatmulError("float16 does not hold some scales of its groups of 4 bits")
        of_block = numbers.repeat_interleave(inputs // BLOCK // scales.shape[1], 1)
        low, high = codes.view(out, -1, 2, BLOCK // 2).unbind(2)
        factors = of_block.contiguous().view(torch.uint8).view(out, -1, 4)
        return BlockWeights(torch.cat((factors, low | high << 4), -1).flatten(1), GROUPED_KIND)

    @property
    def in_order(self) -> bool:
        """Whether groups are consecutive inputs, all groups of the same size."""
        inputs, groups = len(self.group_of), self.zeros.shape[1]
        size = -(-inputs // groups)
        return bool((self.group_of == torch.arange(inputs) // size).all())
