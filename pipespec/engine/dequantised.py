"""Linear layers whose weights stay in few bits and are dequantised as they are used.

A few rows of weights at a time become numbers of the model's type, so that no more than these are
in memory, and are multiplied with blocks of rows of the batch (`pipespec.engine.row_blocks`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipespec.engine.row_blocks import ROWS, blocks_of, widest_block

# Weights that are dequantised at a time. On a CPU the caches should hold them, but each time costs
# two changes between pools of threads.
CHUNK = {"cpu": 1 << 21, "cuda": 1 << 24}


class DequantisedLinear(nn.Module, ABC):
    """A linear layer with weights `[out, in]` in few bits, the matrix `source` of the files.

    It has no weights until `fill`; `bias` is loaded like that of any layer.
    """

    def __init__(self, source: str, out_features: int, in_features: int, bias: Any = None):
        super().__init__()
        self.source = source
        self.out_features, self.in_features = out_features, in_features
        self.bias = bias
        self.width = 0  # columns that share a scale

    @abstractmethod
    def fill(self, weights: Any, device: torch.device) -> None:
        """Set the weights. Raises ModelError if they do not fit."""

    @abstractmethod
    def dequantise(self, start: int, weights: Tensor) -> None:
        """Set `weights` `[rows, in]` to the rows of the weights from this one on."""

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        rows = x.reshape(-1, self.in_features)
        step = min(self._step(x.device.type), self.out_features)
        sizes = {step, self.out_features % step or step}
        size = widest_block(len(rows), [(each, self.in_features) for each in sizes], x)
        blocks = blocks_of(rows, size)
        y = x.new_empty(len(blocks) * size, self.out_features)
        some = x.new_empty(step, self.in_features)
        for start in range(0, self.out_features, step):
            weights = some[: self.out_features - start]
            self.dequantise(start, weights)
            for i, block in enumerate(blocks):
                product = functional.linear(block, weights)
                y[i * size : (i + 1) * size, start : start + step] = product
        y = y[: len(rows)].view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def _step(self, device: str) -> int:
        """How many rows of the weights are dequantised at a time."""
        rows = max(CHUNK[device] // self.in_features, 1)
        return -(-rows // ROWS) * ROWS
