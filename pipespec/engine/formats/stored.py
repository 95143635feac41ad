"""What the formats of a checkpoint's files have in common: parts of tensors, which are created when
they are read, and in how many bits weights are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pipespec.engine.formats.safetensors_headers import Tensor
from pipespec.errors import ModelError

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


# Weights that are unpacked at a time, which bounds the memory: unpacked, a matrix would take
# several times what the layer holds in the end.
UNPACKED = 1 << 16
# Rows of a tile of packed integers.
TILE = 64

# Transformers reads with several threads; this limits the memory for inputs of `read` to one
# tensor.
_one_at_a_time = threading.Lock()


class StoredTensors(Protocol):
    """The tensors of safetensors files, by name."""

    @property
    def present(self) -> Mapping[str, Tensor]: ...
    def read(self, name: str, *index: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class KeptLayer:
    """How many weights of a layer can stay in the few bits of their files, and their bytes; how
    many of few bits cannot."""

    weights: int = 0
    num_bytes: int = 0
    expanded: int = 0

    def __add__(self, other: KeptLayer) -> KeptLayer:
        return KeptLayer(
            self.weights + other.weights,
            self.num_bytes + other.num_bytes,
            self.expanded + other.expanded,
        )


@dataclass(frozen=True, slots=True)
class Storage:
    """In how many bits the files hold the weights.

    Attributes:
        quantization: the method by which the loaded weights are quantised; None: plain weights.
        dequantized_from: the method of quantised files whose weights are dequantised while they
            load; None: the files are not dequantised.
        kept_layers: what can stay in the few bits of the files, for each layer.
        kept_format: one of KEPT_FORMATS, in which it then is in memory.
        ends: bytes of the embedding and of an output head of its own that a CPU computes with as
            they are in the file; None: it does not.
    """

    quantization: str | None = None
    dequantized_from: str | None = None
    kept_layers: tuple[KeptLayer, ...] = ()
    kept_format: str | None = None
    ends: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class KeptMatrix:
    """A matrix that stays in few bits: the kind of its blocks (`gguf_blocks`), or FP8, and what
    reads a part of it."""

    kind: str
    read: Callable[[Part], Any]


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
    rows, columns = (len(range(size)[some]) for size, some in zip(shape, part, strict=True))
    return rows, columns


def per(some: slice, size: int | None) -> slice:
    """The units of this size, of which the first is at 0, that some indices are in; None: one unit
    has all."""
    if size is None or some == slice(None):
        return slice(None)
    return slice(some.start // size, -(-some.stop // size))


def row_parts(shape: tuple[int, int], tile: int = TILE) -> Iterator[slice]:
    """The rows of a matrix `[out, in]`, some at a time: all parts but the last have a multiple of
    `tile` rows."""
    out, inputs = shape
    step = max(UNPACKED // inputs // tile, 1) * tile
    for start in range(0, out, step):
        yield slice(start, min(start + step, out))


def require_shape(layer: Any, found: tuple[int, int]) -> tuple[int, int]:
    """The shape of the weights of a layer. Raises ModelError if the weights found have another."""
    expected = layer.out_features, layer.in_features
    if found != expected:
        raise ModelError(f"it is {list(found)}, but must be {list(expected)}")
    return expected
