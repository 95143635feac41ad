"""Linear layers whose weights stay in few bits: PyTorch's kernels for 4-bit integers multiply them,
ggml does in the memory of their file, or they are dequantised as they are used.

A row of a product does not depend on the other rows of its batch. Libraries choose another kernel,
and so another order of sums, for another number of rows. So a batch is computed in blocks of the
same number of rows, of which the last is filled up; plain layers can be made to do so too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipespec.engine.formats.gguf_blocks import GgmlWeights, in_blocks
from pipespec.engine.formats.gguf_tensors import in_turns
from pipespec.engine.formats.stored import WHOLE, Part, require_shape, row_parts
from pipespec.engine.ggml import compute, library
from pipespec.engine.ggml.compute import computer, matrix
from pipespec.system.heap import leave_to_file

# Rows of a block.
ROWS = 16
# The names of modules that choose the experts of rows; they return tensors `[rows, ...]`.
_ROUTERS = ("gate", "router")
# Weights that are dequantised at a time. On a CPU the caches should hold them.
CHUNK = {"cpu": 1 << 21, "cuda": 1 << 24}
# Possible numbers of tiles of 16 inputs per thread of the GPU kernel for integers.
INNER_TILES = (8, 4, 2)
# Where Transformers' scaled embeddings have their factor.
_SCALE = "scalar_embed_scale"


def blocks_of(rows: Tensor) -> tuple[Tensor, ...]:
    """`[rows, in]` as blocks `[ROWS, in]`, the last with rows of zeros at its end."""
    return functional.pad(rows, (0, 0, 0, -len(rows) % ROWS)).split(ROWS)


def block_product(block: Tensor, weights: Tensor) -> Tensor:
    """`functional.linear` of a block of rows. On a CPU the operands are swapped, as libraries lay
    out the second one anew in every product, and weights are many more."""
    if block.device.type == "cpu":
        return torch.mm(weights, block.t()).t()
    return functional.linear(block, weights)


def linear_in_blocks(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`functional.linear`, computed in blocks of rows: `[..., in]` -> `[..., out]`."""
    rows = x.reshape(math.prod(x.shape[:-1]), weight.shape[1])  # which may be 0
    product = torch.cat([functional.linear(block, weight, bias) for block in blocks_of(rows)])
    return product[: len(rows)].view(*x.shape[:-1], len(weight))


class RowBlockLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name in torch
        return linear_in_blocks(input, self.weight, self.bias)


def make_batch_invariant(model: nn.Module) -> None:
    """Let the plain linear layers of a model, and what chooses experts, compute blocks of rows."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            module.__class__ = RowBlockLinear
        elif name.rpartition(".")[2] in _ROUTERS:
            setattr(module, "forward", partial(_in_blocks, module.forward))  # noqa: B010


def _in_blocks(forward: Callable[..., Any], hidden: Tensor, *rest: Any, **more: Any) -> Any:
    """What `forward` returns of `[..., hidden]`, tensors `[rows, ...]`, computed in blocks."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    found = [forward(block, *rest, **more) for block in blocks_of(rows)]
    if isinstance(found[0], Tensor):
        return torch.cat(found)[: len(rows)]
    return tuple(torch.cat(parts)[: len(rows)] for parts in zip(*found, strict=True))


class KeptLinear(nn.Module):
    """A linear layer with weights `[out, in]` in few bits, the matrix `source` of the files or a
    `part` of it.

    It has no weights until `fill`; `bias` is loaded like that of any layer.
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
        y = self.product(x.reshape(-1, self.in_features))
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


class DequantisedLinear(KeptLinear):
    """A few rows of weights at a time (`gguf_blocks.BlockWeights`, `fp8.Fp8Weights`) become numbers
    of the model's type, so that no more than these are in memory, and are multiplied with blocks of
    rows of the batch."""

    def fill(self, weights: Any, device: torch.device) -> None:
        require_shape(self, weights.shape)
        is_held = hasattr(weights, "held")
        self.weights = weights.held(device) if is_held else in_blocks(weights, device)

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


# --- by ggml ----------------------------------------------------------------------------------


def as_ggml(weights: Any) -> GgmlWeights:
    """A matrix that is of ggml's types, or can become blocks of them."""
    if isinstance(weights, GgmlWeights):
        return weights
    found = weights if hasattr(weights, "rows") else in_blocks(weights, torch.device("cpu"))
    assert found.factor == 1.0, "no kind of ggml's has one"
    return GgmlWeights((found.rows.numpy(),), found.kind, weights.shape)


def multiplied(weights: compute.Matrix, x: Tensor) -> Tensor:
    """`[..., in]` -> `[..., out]`, in the type of `x`."""
    shape = *x.shape[:-1], weights.shape[0]
    if not x.numel():  # for ggml there must be some
        return x.new_empty(shape)
    rows = x.reshape(-1, x.shape[-1]).float().numpy()
    return torch.from_numpy(compute.product(computer(), weights, rows)).view(shape).to(x.dtype)


class GgmlLinear(KeptLinear):
    """A linear layer that ggml multiplies.

    Row i of the layer is row `order[i]` of `weights`; None: they are in order.
    """

    weights: compute.Matrix
    order: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return self.weights.num_bytes

    def fill(self, weights: Any, device: torch.device) -> None:
        assert device.type == "cpu"
        require_shape(self, weights.shape)
        found = as_ggml(weights)
        ggml, rows = _stored(found)
        self.weights = compute.laid_out(ggml, found.kind, rows, found.shape)
        self.order = found.order
        leave_to_file(rows)

    def product(self, x: Tensor) -> Tensor:
        y = multiplied(self.weights, x)
        return y if self.order is None else y.index_select(-1, self.order)


class GgmlEmbedding(nn.Module):
    """An embedding with the matrix `source` of the files, of which rows are read as they are needed
    and multiplied by `scale`."""

    part: Part = WHOLE
    weights: compute.GgmlTensor

    def __init__(self, source: str, plain: nn.Embedding):
        super().__init__()
        self.source = source
        self.out_features, self.in_features = plain.num_embeddings, plain.embedding_dim
        self.padding_idx = plain.padding_idx
        self.dtype = plain.weight.dtype
        # Gemma's; its buffer of the same number has none before the weights are loaded.
        self.scale = float(getattr(plain, _SCALE, 1.0))

    @staticmethod
    def can_replace(plain: nn.Module) -> TypeGuard[nn.Embedding]:
        return type(plain) is nn.Embedding or (
            isinstance(plain, nn.Embedding) and hasattr(plain, _SCALE)
        )

    @property
    def num_bytes(self) -> int:
        return self.weights.num_bytes

    def fill(self, weights: GgmlWeights, device: torch.device) -> None:
        assert device.type == "cpu"
        assert weights.order is None, "no file permutes its embedding"
        require_shape(self, weights.shape)
        ggml, rows = _stored(weights)
        self.weights = matrix(ggml, weights.kind, rows, weights.shape)

    def forward(self, tokens: Tensor) -> Tensor:
        indices = tokens.reshape(-1).to(torch.int32).numpy()
        found = compute.rows_of(computer(), self.weights, indices)
        rows = torch.from_numpy(found).to(self.dtype).view(*tokens.shape, self.in_features)
        return rows * self.scale


def _stored(weights: GgmlWeights) -> tuple[library.Library, np.ndarray]:
    """ggml, and the rows of weights in their own memory."""
    found = library.load()
    assert found is not None, "layers are made where ggml is there"
    return found, np.ascontiguousarray(in_turns(weights.parts))
