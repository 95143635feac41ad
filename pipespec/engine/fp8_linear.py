"""Layers whose weights stay in 8-bit floats."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipespec.engine.checkpoint.formats.fp8 import Fp8Weights
from pipespec.engine.dequantised import DequantisedLinear
from pipespec.engine.fill_in_parts import require_shape, row_parts
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
        for rows in row_parts(require_shape(self, weights.shape)):
            if ((weights.codes[rows].view(torch.uint8) & 0x7F) == 0x7F).any():
                raise ModelError("some of its weights are no numbers")
        self.height, self.width = weights.height, weights.width
        # A member's columns are a view of the whole.
        self.codes = weights.codes.to(device).contiguous()
        self.scales = weights.scales.to(device).contiguous()

    def dequantise(self, start: int, weights: Tensor) -> None:
        """See `DequantisedLinear`."""
        weights.copy_(self._dequantised(start, start + len(weights), weights.dtype))

    def _dequantised(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """These rows, by PyTorch's operations."""
        if dtype == torch.float16:  # which does not hold small scales
            return self._dequantised(start, stop, torch.float32).to(dtype)
        weights = self.codes[start:stop].to(dtype)
        scales = self.scales.to(dtype)
        scales = scales[torch.arange(start, stop, device=scales.device) // self.height]
        if self.in_features % self.width:  # the last block has fewer columns
            return weights.mul_(scales.repeat_interleave(self.width, 1)[:, : self.in_features])
        weights.view(len(weights), -1, self.width).mul_(scales.unsqueeze(-1))
        return weights
