"""Layers whose weights stay in blocks, such as those of a GGUF file, where ggml does not multiply
them.

They are dequantised as they are used; the bits of their codes are in planes, in as many bytes as in
the file.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipespec.engine.checkpoint.formats.fp4 import Fp4Weights
from pipespec.engine.checkpoint.formats.gguf_blocks import KINDS, BlockWeights, Factors, numbers_of
from pipespec.engine.checkpoint.formats.groups import GroupedWeights
from pipespec.engine.dequantised import DequantisedLinear
from pipespec.engine.fill_in_parts import require_shape, row_parts

# Bits of codes of so many bits in the lower plane; the others are in the upper one.
LOW_BITS = {2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 8: 8}


class BlockLinear(DequantisedLinear):
    """A linear layer with weights in blocks of one kind.

    A plane of n bits holds code `i + j * in * n / 8` in bits `j * n` and up of byte `i` of a row.
    """

    low: Tensor
    high: Tensor
    scale_large: Tensor
    scale_small: Tensor
    scale_table: Tensor
    offset_large: Tensor
    offset_small: Tensor
    offset_table: Tensor

    def __init__(
        self, source: str, out_features: int, in_features: int, bias: Any = None, *, kind: str
    ):
        super().__init__(source, out_features, in_features, bias)
        self.kind = KINDS[kind]
        self.width = self.kind.group
        for name in ("low", "high", "scale_large", "scale_small", "offset_large", "offset_small"):
            self.register_buffer(name, None)

    def fill(
        self, weights: BlockWeights | Fp4Weights | GroupedWeights, device: torch.device
    ) -> None:
        """Set the weights. Raises ModelError if they do not fit."""
        for rows in row_parts(require_shape(self, weights.shape)):
            for name, found in self._stored(weights.part(rows).blocks(), device).items():
                if rows.start == 0:
                    setattr(self, name, found.new_empty(self.out_features, found.shape[1]))
                getattr(self, name)[rows] = found
        self.scale_table = self.kind.scale_table.to(device) * weights.factor
        self.offset_table = self.kind.offset_table.to(device)

    def _stored(self, weights: BlockWeights, device: torch.device) -> dict[str, Tensor]:
        """What is held of some rows, by name: planes, the bits of large factors, int16, and small
        ones; without columns where there are none."""
        low_bits = LOW_BITS[self.kind.bits]
        codes = weights.codes().to(device)
        stored = {
            "low": plane(codes & ((1 << low_bits) - 1), low_bits),
            "high": plane(codes >> low_bits, self.kind.bits - low_bits),
        }
        for name, factors in (("scale", weights.scales()), ("offset", weights.offsets())):
            found = factors or Factors()
            large = torch.empty(len(codes), 0, dtype=torch.float16)
            small = torch.empty(len(codes), 0, dtype=torch.uint8)
            large = large if found.large is None else found.large
            small = small if found.small is None else found.small
            stored[f"{name}_large"] = large.contiguous().view(torch.int16).to(device)
            stored[f"{name}_small"] = small.to(device)
        return stored

    def dequantise(self, start: int, weights: Tensor) -> None:
        """See `DequantisedLinear`."""
        weights.copy_(self._dequantised(start, start + len(weights), weights.dtype))

    def _dequantised(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """These rows, by PyTorch's operations."""
        if dtype == torch.float16:  # which does not hold small scales
            return self._dequantised(start, stop, torch.float32).to(dtype)
        low_bits = LOW_BITS[self.kind.bits]
        codes = unpacked(self.low[start:stop], low_bits)
        if self.high.shape[1]:
            codes |= unpacked(self.high[start:stop], self.kind.bits - low_bits) << low_bits
        scales = Factors(*self._factors("scale", start, stop)).products(self.scale_table)
        by_group = numbers_of(codes, self.kind, dtype).view(*scales.shape, -1)
        by_group.mul_(scales.to(dtype).unsqueeze(-1))
        if self.offset_large.shape[1]:
            offsets = Factors(*self._factors("offset", start, stop)).products(self.offset_table)
            by_group.add_(offsets.to(dtype).unsqueeze(-1))
        return by_group.view(codes.shape)

    def _factors(self, name: str, start: int, stop: int) -> tuple[Tensor | None, Tensor | None]:
        large = getattr(self, f"{name}_large")[start:stop]
        small = getattr(self, f"{name}_small")[start:stop]
        return (
            large.view(torch.float16) if large.shape[1] else None,
            small if small.shape[1] else None,
        )


def plane(codes: Tensor, bits: int) -> Tensor:
    """Codes `[out, in]` of so many bits each, as a plane `[out, in * bits / 8]`."""
    if bits == 0:
        return codes[:, :0].clone()
    fields = codes.view(len(codes), 8 // bits, -1)
    packed = fields[:, 0].clone()
    for i in range(1, 8 // bits):
        packed |= fields[:, i] << i * bits
    return packed


def unpacked(plane: Tensor, bits: int) -> Tensor:
    """The codes of a plane."""
    mask = (1 << bits) - 1
    return torch.cat([plane >> shift & mask for shift in range(0, 8, bits)], 1)
