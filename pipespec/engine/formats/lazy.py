"""A tensor that is created when it is read, in a state dict for Transformers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import EllipsisType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # headers are read without it
    import torch

# By their names in safetensors.
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
STORED = {name: stored for stored, name in DTYPES.items()}

# Transformers reads with several threads; this limits the memory for inputs of `read` to one
# tensor.
_one_at_a_time = threading.Lock()


class LazyTensor:
    """A tensor of `shape` and `dtype` (its name in safetensors) that `read` creates.

    In the `state_dict` of `from_pretrained` it replaces a slice of a safetensors file;
    `from_pretrained` reads only the tensors that the model has.
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
