"""Layers whose weights stay in blocks, such as those of a GGUF file.

In bfloat16, blocks of 4 bits become packed integers for PyTorch's own product (`Int4Linear`): the
same codes, with scales and minimums rounded to bfloat16. All others keep the bytes of the file, and
are dequantised as they are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipespec.engine.dequantised import DequantisedLinear
from pipespec.engine.formats.gguf import is_int4
from pipespec.engine.formats.gguf_blocks import KINDS, BlockWeights, unpacked
from pipespec.engine.int4 import Int4Linear
from pipespec.errors import ModelError


class BlockLinear(DequantisedLinear):
    """A linear layer with weights in blocks of one kind."""

    rows: Tensor

    def __init__(
        self, source: str, out_features: int, in_features: int, bias: Any = None, *, kind: str
    ):
        super().__init__(source, out_features, in_features, bias)
        self.kind = kind
        self.width = KINDS[kind].group
        self.factor = 1.0
        self.register_buffer("rows", None)

    def fill(self, weights: BlockWeights, device: torch.device) -> None:
        """Set the weights. Raises ModelError if they do not fit."""
        expected = (self.out_features, self.in_features)
        if weights.shape != expected:
            raise ModelError(f"it is {list(weights.shape)}, but must be {list(expected)}")
        self.rows, self.factor = weights.rows.to(device), weights.factor

    def dequantised(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """See `DequantisedLinear`."""
        if dtype == torch.float16:  # which does not hold small scales
            return self.dequantised(start, stop, torch.float32).to(dtype)
        codes, scales, offsets = unpacked(self.rows[start:stop], self.kind, self.factor)
        weights = codes.to(dtype).view(*scales.shape, self.width)
        weights.mul_(scales.to(dtype).unsqueeze(-1))
        if offsets is not None:
            weights.add_(offsets.to(dtype).unsqueeze(-1))
        return weights.view(codes.shape)


def make_linear(
    kinds: Mapping[str, str],
    dtype: torch.dtype,
    name: str,
    out: int,
    inputs: int,
    bias: Any = None,
) -> nn.Module:
    """A layer for the matrix `[out, inputs]` with this name, of which `kinds` has the blocks,
    computed in this type."""
    kind = kinds[name]
    if dtype == torch.bfloat16 and is_int4(kind, out):
        return Int4Linear(name, out, inputs, bias)
    return BlockLinear(name, out, inputs, bias, kind=kind)
