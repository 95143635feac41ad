"""Linear layers whose weights stay in few bits, by PyTorch's kernels for 4-bit integers, or
dequantised as they are used (`ggml_linear` has those that ggml multiplies)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipespec.engine.formats.gguf_blocks import in_blocks
from pipespec.engine.formats.stored import WHOLE, Part, require_shape, row_parts
from pipespec.engine.low_bit.row_blocks import ROWS, block_product, blocks_of

# Weights that are dequantised at a time. On a CPU the caches should hold them.
CHUNK = {"cpu": 1 << 21, "cuda": 1 << 24}
# Possible numbers of tiles of 16 inputs per thread of the GPU kernel for integers.
INNER_TILES = (8, 4, 2)


class KeptLinear(nn.Module):
    """A linear layer with weights `[out, in]` in few bits, the matrix `source` of the files or a
    `part` of it.

    It has no weights until `fill`; `bias` is loaded like that of any layer. A row of a product does
    not depend on the other rows of its batch.
    """

    part: Part
    weights: Any

    def __init__(self, source: str, out_features: int, in_features: int, bias: Any = None):
        super().__init__()
        self.source, self.part = source, WHOLE
        self.out_features, self.in_features = out_features, in_features
        self.bias = bias

    @property
    def num_bytes(self) -> int:
        """Of the weights that are no buffers."""
        return int(self.weights.num_bytes)

    def fill(self, weights: Any, device: torch.device) -> None:
        """Set the weights. Raises ModelError if they do not fit."""
        raise NotImplementedError

    def product(self, x: Tensor) -> Tensor:
        """`[rows, in]` -> `[rows, out]`, without the bias."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        y = self.product(x.reshape(-1, self.in_features))
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


class DequantisedLinear(KeptLinear):
    """A few rows of weights at a time (`gguf_blocks.BlockWeights`, `fp8.Fp8Weights`) become numbers
    of the model's type, so that no more than these are in memory, and are multiplied with blocks of
    rows of the batch (`row_blocks`)."""

    def fill(self, weights: Any, device: torch.device) -> None:
        require_shape(self, weights.shape)
        self.weights = (
            weights.held(device) if hasattr(weights, "held") else in_blocks(weights, device)
        )

    def product(self, x: Tensor) -> Tensor:
        blocks = blocks_of(x)
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
        return y[: len(x)]


class Int4Linear(KeptLinear):
    """A weight is `(code - 8) * scale + zero` in bfloat16, with one scale and zero for a group of
    inputs. On a GPU (tinygemm, compute capability 8.0 and later) a row of the product does not
    depend on the other rows of its batch, which `kept_weights` checks."""

    packed: Tensor
    scale_and_zero: Tensor
    num_bytes = 0

    def __init__(self, source: str, out_features: int, in_features: int, bias: Any = None):
        super().__init__(source, out_features, in_features, bias)
        self.width = 0  # of a group
        self.register_buffer("packed", None)
        self.register_buffer("scale_and_zero", None)

    def fill(self, weights: Any, device: torch.device) -> None:
        for rows in row_parts(require_shape(self, weights.shape)):
            # uint8 codes `[out, in]`, and float32 scales and middles `[out, groups]`.
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

    def product(self, x: Tensor) -> Tensor:
        found: Tensor = torch.ops.aten._weight_int4pack_mm(
            x, self.packed, self.width, self.scale_and_zero
        )
        return found
