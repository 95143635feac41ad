"""Linear layers whose weights stay packed in 4 bits, by PyTorch's own kernels.

A weight is `(code - 8) * scale + zero` in bfloat16, with one scale and zero for a group of inputs.
On a GPU (tinygemm, compute capability 8.0 and later) a row of the product does not depend on the
other rows of its batch, which `pipespec.engine.low_bit.kept_weights` checks."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pipespec.engine.formats.fill_in_parts import require_shape, row_parts
from pipespec.engine.formats.lazy import WHOLE, Part

# Possible numbers of tiles of 16 inputs per thread of the GPU kernel.
INNER_TILES = (8, 4, 2)


class Int4Weights(Protocol):
    """A matrix `[out, in]` of 4-bit codes."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        ...

    def part(self, rows: slice) -> Int4Weights:
        """These rows of the matrix."""
        ...

    def int4(self) -> tuple[Tensor, Tensor, Tensor]:
        """uint8 codes `[out, in]`, and float32 scales and middles `[out, groups]`: the weights are
        `(code - 8) * scale + middle`. Raises ModelError if groups are not of consecutive inputs."""
        ...


class Int4Linear(nn.Module):
    """A linear layer whose weights `[out, in]` are 4-bit integers, the matrix `source` of the
    files or a `part` of it.

    It has no weights until `fill`; `bias` is loaded like that of any layer.
    """

    part: Part
    packed: Tensor
    scale_and_zero: Tensor

    def __init__(self, source: str, out_features: int, in_features: int, bias: Any = None):
        super().__init__()
        self.source, self.part = source, WHOLE
        self.out_features, self.in_features = out_features, in_features
        self.bias = bias
        self.width = 0  # of a group
        self.register_buffer("packed", None)
        self.register_buffer("scale_and_zero", None)

    def fill(self, weights: Int4Weights, device: torch.device) -> None:
        """Set the weights. Raises ModelError if they do not fit."""
        for rows in row_parts(require_shape(self, weights.shape)):
            codes, scales, middle = weights.part(rows).int4()
            both = torch.stack((scales, middle), -1).to(device, torch.bfloat16)
            packed = self._packed(codes.to(device))
            per_tile = len(codes) // len(packed)
            if rows.start == 0:
                self.width = self.in_features // scales.shape[1]
                self.scale_and_zero = both.new_empty(scales.shape[1], self.out_features, 2)
                self.packed = packed.new_empty(self.out_features // per_tile, *packed.shape[1:])
            self.scale_and_zero[:, rows] = both.transpose(0, 1)
            self.packed[rows.start // per_tile :][: len(packed)] = packed

    def _packed(self, codes: Tensor) -> Tensor:
        """Codes as the kernel takes them; along the first dimension are tiles of rows."""
        pairs = codes[:, ::2] << 4 | codes[:, 1::2]
        tiles = next(n for n in INNER_TILES if self.in_features % (16 * n) == 0)
        packed: Tensor = torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), tiles)
        return packed

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` bfloat16 -> `[..., out]`."""
        rows = x.reshape(-1, self.in_features)
        y = torch.ops.aten._weight_int4pack_mm(rows, self.packed, self.width, self.scale_and_zero)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias
