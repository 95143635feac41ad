"""Linear layers whose weights stay in few bits and are dequantised as they are used.

A few rows of weights at a time become numbers of the model's type, so that no more than these are
in memory, and are multiplied with blocks of rows of the batch (`row_blocks`).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pipespec.engine.formats.fill_in_parts import require_shape
from pipespec.engine.formats.gguf_blocks import in_blocks
from pipespec.engine.formats.lazy import WHOLE, Part
from pipespec.engine.low_bit.row_blocks import ROWS, block_product, blocks_of

# Weights that are dequantised at a time. On a CPU the caches should hold them.
CHUNK = {"cpu": 1 << 21, "cuda": 1 << 24}


class FewBits(Protocol):
    """A matrix `[out, in]` on a device (`gguf_blocks.BlockWeights`, `fp8.Fp8Weights`)."""

    @property
    def num_bytes(self) -> int: ...

    def part(self, rows: slice) -> FewBits: ...

    def dense(self, dtype: torch.dtype) -> Tensor: ...


class DequantisedLinear(nn.Module):
    """A linear layer with weights `[out, in]` in few bits, the matrix `source` of the files or a
    `part` of it.

    It has no weights until `fill`; `bias` is loaded like that of any layer.
    """

    part: Part
    weights: FewBits

    def __init__(self, source: str, out_features: int, in_features: int, bias: Any = None):
        super().__init__()
        self.source, self.part = source, WHOLE
        self.out_features, self.in_features = out_features, in_features
        self.bias = bias

    @property
    def num_bytes(self) -> int:
        """Of the weights."""
        return self.weights.num_bytes

    def fill(self, weights: Any, device: torch.device) -> None:
        """Set the weights. Raises ModelError if they do not fit."""
        require_shape(self, weights.shape)
        self.weights = (
            weights.held(device) if hasattr(weights, "held") else in_blocks(weights, device)
        )

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        rows = x.reshape(-1, self.in_features)
        blocks = blocks_of(rows)
        y = x.new_empty(len(blocks) * ROWS, self.out_features)
        # As many rows of weights each time, as libraries keep code for every shape of products.
        times = -(-self.out_features * self.in_features // CHUNK[x.device.type])
        step = -(-self.out_features // times)
        computed = torch.float32 if x.dtype == torch.float16 else x.dtype  # holds small scales
        for start in range(0, self.out_features, step):
            weights = self.weights.part(slice(start, start + step)).dense(computed).to(x.dtype)
            for i, block in enumerate(blocks):
                product = block_product(block, weights)
                y[i * ROWS : (i + 1) * ROWS, start : start + step] = product
        y = y[: len(rows)].view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias
