"""Linear layers and embeddings whose weights are of ggml's types, in the memory of their file."""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from pipespec.engine.formats.fill_in_parts import require_shape
from pipespec.engine.formats.gguf_blocks import GgmlWeights, in_blocks
from pipespec.engine.formats.gguf_tensors import in_turns
from pipespec.engine.formats.lazy import WHOLE, Part
from pipespec.engine.ggml import compute, library
from pipespec.engine.ggml.compute import computer, matrix
from pipespec.engine.low_bit.kept_linear import KeptLinear
from pipespec.system.heap import leave_to_file

# Where Transformers' scaled embeddings have their factor.
_SCALE = "scalar_embed_scale"


def as_ggml(weights: Any) -> GgmlWeights:
    """A matrix that is of ggml's types, or can become blocks of them."""
    if isinstance(weights, GgmlWeights):
        return weights
    found = weights if hasattr(weights, "rows") else in_blocks(weights, torch.device("cpu"))
    assert found.factor == 1.0, "no kind of ggml's has one"
    return GgmlWeights((found.rows.numpy(),), found.kind, weights.shape)


def multiplied(weights: compute.Matrix, x: Tensor) -> Tensor:
    """`[..., in]` -> `[..., out]`, in the type of `x`."""
    y = x.new_empty(*x.shape[:-1], weights.shape[0])
    if x.numel():  # for ggml there must be some
        rows = x.reshape(-1, x.shape[-1]).float().numpy()
        y.copy_(torch.from_numpy(compute.product(computer(), weights, rows)).view(y.shape))
    return y


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
        """Whether the rows of an embedding are only read and scaled."""
        return type(plain) is nn.Embedding or (
            isinstance(plain, nn.Embedding) and hasattr(plain, _SCALE)
        )

    @property
    def num_bytes(self) -> int:
        return self.weights.num_bytes

    def fill(self, weights: GgmlWeights, device: torch.device) -> None:
        """See `KeptLinear`."""
        assert device.type == "cpu"
        assert weights.order is None, "no file permutes its embedding"
        require_shape(self, weights.shape)
        found, rows = _stored(weights)
        self.weights = matrix(found, weights.kind, rows, weights.shape)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 `[...]` -> `[..., hidden]`."""
        indices = tokens.reshape(-1).to(torch.int32).numpy()
        found = compute.rows_of(computer(), self.weights, indices)
        rows = torch.from_numpy(found).to(self.dtype).view(*tokens.shape, self.in_features)
        return rows * self.scale


def _stored(weights: GgmlWeights) -> tuple[library.Library, np.ndarray]:
    """ggml, and the rows of weights in their own memory."""
    found = library.load()
    assert found is not None, "layers are made where ggml is there"
    return found, np.ascontiguousarray(in_turns(weights.parts))
