"""Checkpoint folders with packed matrices: their headers once unpacked, and reading them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipespec.engine.formats.lazy import DTYPES, LazyTensor
from pipespec.engine.formats.packing import Packing
from pipespec.engine.precision import ITEM_BYTES
from pipespec.engine.safetensors_headers import Tensor, shards
from pipespec.engine.slice_tensors import LAYER, part_of
from pipespec.errors import ModelError

if TYPE_CHECKING:  # headers are read without them
    from pipespec.engine.formats.groups import GroupedWeights

WEIGHT = ".weight"
# Group sizes that the kernel for packed 4-bit weights supports, and the divisor of `out`.
INT4_GROUP_SIZES = (32, 64, 128)
INT4_OUT_MULTIPLE = 16
# Tensors that belong to packed matrices and are not needed once these are unpacked.
_LEFT_OVER = (
    "_scale",
    "_zero_point",
    "_g_idx",
    ".g_idx",
    ".qzeros",
    ".scales",
    ".weight_shape",
)
# AWQ may have scaled the inputs of a matrix, which is not supported.
_SCALED_INPUTS = ".act.scales"


@dataclass(frozen=True, slots=True)
class Int4Layer:
    """How many weights of a layer can stay packed in 4 bits, and their bytes."""

    weights: int = 0
    num_bytes: int = 0

    def __add__(self, other: Int4Layer) -> Int4Layer:
        return Int4Layer(self.weights + other.weights, self.num_bytes + other.num_bytes)


def matrices(tensors: Mapping[str, Tensor], packing: Packing) -> list[str]:
    """The names of the packed matrices."""
    return [name[: -len(packing.suffix)] for name in tensors if name.endswith(packing.suffix)]


def as_plain(
    path: Path, tensors: Mapping[str, Tensor], packing: Packing | None
) -> dict[str, Tensor]:
    """The headers of the weights once unpacked, in the type of the weights that are not quantised.

    `packing` None: the numbers are quantised but not packed. Raises ModelError.
    """
    plain = {name: each for name, each in tensors.items() if not name.endswith(_LEFT_OVER)}
    if any(name.endswith(_SCALED_INPUTS) for name in tensors):
        raise ModelError(
            f"{path} holds scales of activations ({_SCALED_INPUTS[1:]}), which is not supported; "
            "take another checkpoint"
        )
    floats = [each for each in plain.values() if each.dtype in DTYPES]
    if not floats:
        raise ModelError(f"{path} holds no tensor of plain numbers; take another checkpoint")
    dtype = max(floats, key=lambda each: each.num_bytes).dtype
    if packing is None:
        for name, each in plain.items():
            if each.dtype not in DTYPES:
                plain[name] = _plain(each.shape, dtype)
        return plain
    for name in matrices(tensors, packing):
        shape = packing.shape(name, tensors)
        plain.pop(name + packing.suffix)
        plain[name + WEIGHT] = _plain(shape, dtype)
    return plain


def _plain(shape: tuple[int, ...], dtype: str) -> Tensor:
    return Tensor(shape, math.prod(shape) * ITEM_BYTES[DTYPES[dtype]], dtype)


def fits_int4_kernel(name: str, shape: tuple[int, ...], packing: Packing) -> bool:
    """Whether a packed matrix can stay packed."""
    if len(shape) != 2:
        return False
    out, inputs = shape
    return (
        LAYER.search(name) is not None
        and ".experts." not in name  # Transformers stacks them
        and packing.bits == 4
        and not packing.reordered
        and packing.group in INT4_GROUP_SIZES
        and out % INT4_OUT_MULTIPLE == 0
        and inputs % packing.group == 0
    )


def int4_layers(tensors: Mapping[str, Tensor], packing: Packing) -> tuple[Int4Layer, ...]:
    """What can stay packed in each layer: half a byte per weight, two bfloat16 per group."""
    numbers = [int(layer[1]) for name in tensors if (layer := LAYER.search(name))]
    found = [Int4Layer()] * (max(numbers, default=-1) + 1)
    for name in matrices(tensors, packing):
        layer = LAYER.search(name)
        shape = packing.shape(name, tensors)
        if layer is None or not fits_int4_kernel(name, shape, packing):
            continue
        assert packing.group is not None
        count = math.prod(shape)
        found[int(layer[1])] += Int4Layer(count, count // 2 + count // packing.group * 4)
    return tuple(found)


def stored_state(path: Path, parts: Collection[str]) -> dict[str, Any]:
    """The plain tensors of these parts as a state dict, which are read lazily."""
    from safetensors import safe_open

    state: dict[str, Any] = {}
    for file, held in shards(path).items():
        wanted = {name: each for name, each in held.items() if part_of(name) in parts}
        if wanted:
            opened = safe_open(file, framework="pt")
            state |= {name: opened.get_slice(each.stored_as) for name, each in wanted.items()}
    return state


def lazy_state(
    path: Path, packing: Packing, parts: Collection[str]
) -> tuple[dict[str, Any], dict[str, Callable[[], GroupedWeights]]]:
    """The tensors of these parts (`slice_tensors`) as a state dict of plain weights, which are
    read lazily.

    The second mapping reads the matrices that can stay packed. The files are open for as long as
    either is referred to: a load that fails leaves threads of Transformers that still read.
    """
    from safetensors import safe_open

    tensors: dict[str, Tensor] = {}
    where: dict[str, Any] = {}
    for file, held in shards(path).items():
        wanted = {name: each for name, each in held.items() if part_of(name) in parts}
        if wanted:
            where |= dict.fromkeys(wanted, safe_open(file, framework="pt"))
            tensors |= wanted

    def load(name: str) -> Any:
        return where[name].get_tensor(tensors[name].stored_as) if name in where else None

    state: dict[str, Any] = {}
    kept: dict[str, Callable[[], GroupedWeights]] = {}
    plain = as_plain(path, tensors, packing)
    packed = set(matrices(tensors, packing))
    for name, each in plain.items():
        matrix = name.removesuffix(WEIGHT)
        if matrix not in packed:
            state[name] = where[name].get_slice(tensors[name].stored_as)
            continue
        read = partial(packing.read, matrix, load)
        state[name] = LazyTensor(each.shape, each.dtype, partial(_dense, read))
        if fits_int4_kernel(matrix, each.shape, packing):
            kept[matrix] = read
    return state, kept


def _dense(read: Callable[[], GroupedWeights]) -> Any:
    return read().dense()
