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
from pipespec.engine.formats.gguf_blocks import INT4_KINDS, KINDS, BlockWeights, unpacked
from pipespec.engine.formats.packing import INT4_OUT_MULTIPLE
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
        require_shape(weights, self.out_features, self.in_features)
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


class BlockInt4Linear(Int4Linear):
    """A linear layer with weights in blocks of 4 bits, as packed integers."""

    def fill(self, weights: BlockWeights, device: torch.device) -> None:
        """Set the weights. Raises ModelError if they do not fit."""
        require_shape(weights, self.out_features, self.in_features)
        codes, scales, offsets = weights.grouped()
        assert offsets is not None, "codes from 0 on have one"
        self.pack(codes, scales, 8 * scales + offsets, device)


def require_shape(weights: BlockWeights, out_features: int, in_features: int) -> None:
    """Raise ModelError unless a matrix has this shape."""
    expected = (out_features, in_features)
    if weights.shape != expected:
        raise ModelError(f"it is {list(weights.shape)}, but must be {list(expected)}")


def fits_int4(kind: str, out_features: int, dtype: torch.dtype) -> bool:
    """Whether PyTorch's product for packed 4-bit weights takes a matrix of these blocks."""
    return kind in INT4_KINDS and dtype == torch.bfloat16 and out_features % INT4_OUT_MULTIPLE == 0


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
    if fits_int4(kind, out, dtype):
        return BlockInt4Linear(name, out, inputs, bias)
    return BlockLinear(name, out, inputs, bias, kind=kind)
