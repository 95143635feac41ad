"""Layers whose weights stay in 8-bit floats."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from pipespec.engine.dequantised import DequantisedLinear
from pipespec.engine.formats.fp8 import Fp8Weights
from pipespec.errors import ModelError


class Fp8Linear(DequantisedLinear):
    """A linear layer with weights in FP8."""

    codes: Tensor
    scales: Tensor

    def __init__(self, source: str, out_features: int, in_features: int, bias: Any = None):
        super().__init__(source, out_features, in_features, bias)
        self.height = 0  # rows that share a scale
        self.register_buffer("codes", None)
        self.register_buffer("scales", None)

    def fill(self, weights: Fp8Weights, device: torch.device) -> None:
        """Set the weights. Raises ModelError if they do not fit."""
        shape = (self.out_features, self.in_features)
        if tuple(weights.codes.shape) != shape:
            raise ModelError(f"it is {list(weights.codes.shape)}, but must be {list(shape)}")
        self.height, self.width = weights.height, weights.width
        self.codes, self.scales = weights.codes.to(device), weights.scales.to(device)
        if self.codes.data_ptr() % 2:  # it is read in pairs
            self.codes = self.codes.clone()

    def dequantised(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """See `DequantisedLinear`."""
        if dtype == torch.float16:  # which does not hold small scales
            return self.dequantised(start, stop, torch.float32).to(dtype)
        weights = _decoded(self.codes[start:stop], dtype)
        scales = self.scales.to(dtype)
        if len(scales) > 1:
            scales = scales[torch.arange(start, stop, device=scales.device) // self.height]
        if scales.shape[1] == 1:
            return weights.mul_(scales)
        if self.in_features % self.width:
            return weights.mul_(scales.repeat_interleave(self.width, 1)[:, : self.in_features])
        by_block = weights.view(len(weights), -1, self.width)
        by_block.mul_(scales.unsqueeze(-1))
        return weights


@cache
def _pairs(dtype: torch.dtype) -> Tensor:
    """The two numbers of each pair of codes, as one integer, by the pair's 16 bits."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)
    pairs = torch.arange(1 << 16)
    both = torch.stack((numbers[pairs & 255], numbers[pairs >> 8]), -1)
    return both.view(torch.int64 if dtype == torch.float32 else torch.int32).flatten()


def _decoded(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of codes `[rows, in]`, without their scales."""
    if codes.device.type != "cpu":
        return codes.to(dtype)
    # Several times as fast as PyTorch's own conversion, one code after the other.
    pairs = codes.view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)
    found = _pairs(dtype).index_select(0, pairs.flatten())
    return found.view(dtype).view(codes.shape)
