"""A matrix of an expert that is no tensor, as Transformers' code of a mixture takes it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class ExpertMatrix:
    """One matrix of a stack, as Transformers' code of a mixture takes it: for
    `torch.nn.functional.linear`, or, where stacks are transposed, for `rows @ matrix`."""

    def __init__(self, parts: Iterable[Callable[[Tensor], Tensor]]):
        self.parts = list(parts)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute the product of `rows` and the matrix."""
        if function not in _PRODUCTS or len(args) != 2 or kwargs:
            return NotImplemented
        rows, matrix = args
        return torch.cat([part(rows) for part in matrix.parts], -1)


_PRODUCTS = (functional.linear, torch.Tensor.__matmul__, torch.Tensor.matmul, torch.matmul)
