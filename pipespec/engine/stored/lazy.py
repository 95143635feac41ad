"""A tensor that is made when it is read, as Transformers takes it in a state dict."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import EllipsisType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # headers are read without it
    import torch

# As safetensors names them.
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

# Transformers reads with several threads: what a tensor is made from is in memory for one alone.
_one_at_a_time = threading.Lock()


class LazyTensor:
    """A tensor of `shape` and `dtype` (as safetensors names it) that `read` makes.

    It stands for a slice of a safetensors file in the `state_dict` of `from_pretrained`, which
    reads those that the model has, and no others.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str, read: Callable[[], torch.Tensor]):
        self.shape = shape
        self.dtype = dtype
        self.read = read

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return self.dtype

    def __getitem__(self, whole: EllipsisType) -> torch.Tensor:
        with _one_at_a_time:
            return self.read()
