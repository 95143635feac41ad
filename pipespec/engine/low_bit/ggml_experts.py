"""The experts of a mixture, multiplied by ggml with all rows that chose them at once."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipespec.engine.formats.fill_in_parts import require_shape
from pipespec.engine.formats.lazy import WHOLE, Part
from pipespec.engine.ggml import compute, library
from pipespec.engine.ggml.compute import computer, matrix
from pipespec.engine.low_bit.expert_matrix import ExpertMatrix
from pipespec.engine.low_bit.ggml_linear import as_ggml


class GgmlExperts(nn.Module):
    """The matrices of the experts of a layer, in place of a parameter `[experts, out, in]` whose
    rows may be those of several matrices of the files: `sources[expert]` are their names, each
    `[out_features, in_features]`.

    A row of a product does not depend on the other rows of its batch.
    """

    part: Part

    def __init__(self, sources: Sequence[Sequence[str]], out_features: int, in_features: int):
        super().__init__()
        self.sources, self.source, self.part = sources, sources[0][0], WHOLE
        self.out_features, self.in_features = out_features, in_features
        self.weights: list[compute.Tensor] = []
        self.turns = 1  # how many of the weights have the rows of one matrix in turns

    @property
    def num_bytes(self) -> int:
        """Of the weights."""
        return sum(each.memory.nbytes for each in self.weights)

    def fill(self, weights: Sequence[Sequence[Any]], device: torch.device) -> None:
        """Set the weights of each expert, without a copy of those that are one after the other in
        ggml's types. Raises ModelError if they do not fit."""
        found_library, count = library.load(), len(weights)
        assert found_library is not None and device.type == "cpu"
        for matrices in zip(*weights, strict=True):
            for each in matrices:
                require_shape(self, each.shape)
            found = [as_ggml(each) for each in matrices]
            self.turns = len(found[0].parts)
            shape = count, self.out_features // self.turns, self.in_features
            for parts in zip(*(each.parts for each in found), strict=True):
                self.weights.append(matrix(found_library, found[0].kind, stacked(parts), shape))

    def __getitem__(self, expert: int | Tensor) -> ExpertMatrix:
        number = torch.tensor([[int(expert)]])

        def product(rows: Tensor) -> Tensor:
            return self.product(rows.unsqueeze(1), number.expand(len(rows), 1)).squeeze(1)

        return ExpertMatrix([product])

    def product(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """`[rows, k or 1, in]` and the chosen experts `[rows, k]` -> `[rows, k, out]` of all
        matrices together, in the type of the rows."""
        inputs, experts = rows.float().numpy(), chosen.to(torch.int32).numpy()
        found = [
            torch.from_numpy(compute.expert_product(computer(), each, inputs, experts))
            for each in self.weights
        ]
        y = torch.cat(found, -1) if self.turns == 1 else torch.stack(found, -1).flatten(-2)
        return y.to(rows.dtype)


def stacked(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays of one shape as one, uint8; without a copy if they are one after the other."""
    first, size = parts[0].ctypes.data, parts[0].nbytes
    if all(
        each.flags.c_contiguous and each.ctypes.data == first + i * size
        for i, each in enumerate(parts)
    ):
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * (size * len(parts))).from_address(first))
        weakref.finalize(memory, list, parts)  # keeps them alive as long
        return memory
    return np.stack(parts)
