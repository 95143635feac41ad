"""A tensor that is created when it is read, in a state dict for Transformers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import EllipsisType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # headers are read without it
    import torch

# By their names in safetensors.
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
STORED = {name: stored for stored, name in DTYPES.items()}

# Rows and columns of a matrix `[out, in]`, of a vector its numbers; both at steps of 1.
Part = tuple[slice, slice]
WHOLE: Part = (slice(None), slice(None))


class Units(NamedTuple):
    """How many consecutive rows and columns of stored matrices no part divides: groups with one
    scale, words that hold several weights."""

    rows: int = 1
    columns: int = 1


# Transformers reads with several threads; this limits the memory for inputs of `read` to one
# tensor.
_one_at_a_time = threading.Lock()


class LazyTensor:
    """A tensor of `shape` and `dtype` (its name in safetensors) of which `read` creates a part.

    In the `state_dict` of `from_pretrained` it replaces a slice of a safetensors file;
    `from_pretrained` reads only the tensors that the model has.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str, read: Callable[[Part], torch.Tensor]):
        self.shape = shape
        self.dtype = dtype
        self.read = read

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return self.dtype

    def __getitem__(self, index: EllipsisType | tuple[slice, ...]) -> torch.Tensor:
        part = WHOLE
        if not isinstance(index, EllipsisType):
            assert len(self.shape) <= 2, "stacks are read as a whole"
            part = (*index, slice(None))[0], (*index, slice(None))[1]
        with _one_at_a_time:
            return self.read(part)


def part_shape(shape: tuple[int, int], part: Part) -> tuple[int, int]:
    """The shape of a part of a matrix of this shape."""
    rows, columns = (len(range(size)[some]) for size, some in zip(shape, part, strict=True))
    return rows, columns


def per(some: slice, size: int | None) -> slice:
    """The units of this size, of which the first is at 0, that some indices are in; None: one unit
    has all."""
    if size is None or some == slice(None):
        return slice(None)
    return slice(some.start // size, -(-some.stop // size))
