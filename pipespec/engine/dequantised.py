"""Linear layers whose weights stay in few bits and are dequantised as they are used.

A few rows of weights at a time become numbers of the model's type, so that no more than these are
in memory, and are multiplied with blocks of rows of the batch (`pipespec.engine.row_blocks`).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from pipespec.engine.checkpoint.formats.lazy import WHOLE, Part
from pipespec.engine.row_blocks import ROWS, block_product, blocks_of, widest_block

# Weights that are dequantised at a time. On a CPU the caches should hold them, but each time costs
# two changes between pools of threads.
CHUNK = {"cpu": 1 << 21, "cuda": 1 << 24}

_of_thread = threading.local()


def _scratch(rows: int, inputs: int, like: Tensor) -> Tensor:
    """Memory for weights `[rows, inputs]`, in the type and on the device of `like`. On a CPU a
    thread has one buffer for all layers: the heap does not reuse freed ones reliably, and would
    grow by several."""
    if like.device.type != "cpu":
        return like.new_empty(rows, inputs)
    num_bytes = rows * inputs * like.itemsize
    if len(getattr(_of_thread, "scratch", ())) < num_bytes:
        _of_thread.scratch = ()  # freed before the next is made
        with torch.inference_mode(mode=False):  # what is made in that mode is only written in it
            _of_thread.scratch = torch.empty(num_bytes, dtype=torch.uint8)
    found: Tensor = _of_thread.scratch[:num_bytes].view(like.dtype)
    return found.view(rows, inputs)


class DequantisedLinear(nn.Module, ABC):
    """A linear layer with weights `[out, in]` in few bits, the matrix `source` of the files or a
    `part` of it.

    It has no weights until `fill`; `bias` is loaded like that of any layer.
    """

    part: Part

    def __init__(self, source: str, out_features: int, in_features: int, bias: Any = None):
        super().__init__()
        self.source, self.part = source, WHOLE
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
        some = _scratch(step, self.in_features, x)
        size = widest_block(len(rows), [some[:each] for each in sizes])
        blocks = blocks_of(rows, size)
        y = x.new_empty(len(blocks) * size, self.out_features)
        for start in range(0, self.out_features, step):
            weights = some[: self.out_features - start]
            self.dequantise(start, weights)
            for i, block in enumerate(blocks):
                product = block_product(block, weights)
                y[i * size : (i + 1) * size, start : start + step] = product
        y = y[: len(rows)].view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def _step(self, device: str) -> int:
        """How many rows of the weights are dequantised at a time: as many each time, so that there
        is one shape of products, for each of which libraries compile and keep code."""
        times = -(-self.out_features * self.in_features // CHUNK[device])
        rows = -(-self.out_features // times)
        return -(-rows // ROWS) * ROWS
