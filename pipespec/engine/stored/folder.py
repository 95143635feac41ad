"""A folder of packed matrices: what they are once unpacked, and the reading of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipespec.engine.headers import Tensor, shards
from pipespec.engine.precision import ITEM_BYTES
from pipespec.engine.stored.lazy import DTYPES, LazyTensor
from pipespec.engine.stored.packed import Packing
from pipespec.errors import ModelError

if TYPE_CHECKING:  # headers are read without them
    from pipespec.engine.stored.groups import GroupedWeights

WEIGHT = ".weight"
LAYER = re.compile(r"\.layers\.(\d+)\.")
# Groups that the products of four bits know, and what `out` must be a multiple of.
KEPT_GROUPS = (32, 64, 128)
KEPT_OUT = 16
# Beside the matrices, and of no use once they are plain.
_LEFT_OVER = (
    "_scale",
    "_zero_point",
    "_g_idx",
    ".g_idx",
    ".qzeros",
    ".scales",
    ".weight_shape",
)
# AWQ may have scaled the inputs of a matrix, which is then no plain one.
_SCALED_INPUTS = ".act.scales"


@dataclass(frozen=True, slots=True)
class KeptLayer:
    """What of a layer can stay in four bits: so many weights, and their bytes then."""

    weights: int = 0
    num_bytes: int = 0

    def __add__(self, other: KeptLayer) -> KeptLayer:
        return KeptLayer(self.weights + other.weights, self.num_bytes + other.num_bytes)


def matrices(tensors: Mapping[str, Tensor], packing: Packing) -> list[str]:
    """The names of the packed matrices."""
    return [name[: -len(packing.suffix)] for name in tensors if name.endswith(packing.suffix)]


def as_plain(
    path: Path, tensors: Mapping[str, Tensor], packing: Packing | None
) -> dict[str, Tensor]:
    """The headers of the same weights as plain ones, in the type of what is not quantised.

    `packing` None: each number is stored for itself. Raises ModelError.
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


def can_be_kept(name: str, shape: tuple[int, ...], packing: Packing) -> bool:
    """Is there a product for a matrix as it is packed."""
    if len(shape) != 2:
        return False
    out, inputs = shape
    return (
        LAYER.search(name) is not None
        and ".experts." not in name  # Transformers computes with them stacked
        and packing.bits == 4
        and not packing.reordered
        and packing.group in KEPT_GROUPS
        and out % KEPT_OUT == 0
        and inputs % packing.group == 0
    )


def kept_layers(tensors: Mapping[str, Tensor], packing: Packing) -> tuple[KeptLayer, ...]:
    """Of each layer what can stay in four bits: half a byte a weight, two bfloat16 a group."""
    numbers = [int(layer[1]) for name in tensors if (layer := LAYER.search(name))]
    found = [KeptLayer()] * (max(numbers, default=-1) + 1)
    for name in matrices(tensors, packing):
        layer = LAYER.search(name)
        shape = packing.shape(name, tensors)
        if layer is None or not can_be_kept(name, shape, packing):
            continue
        assert packing.group is not None
        count = math.prod(shape)
        found[int(layer[1])] += KeptLayer(count, count // 2 + count // packing.group * 4)
    return tuple(found)


@contextmanager
def opened(
    path: Path, packing: Packing
) -> Iterator[tuple[dict[str, Any], dict[str, Callable[[], GroupedWeights]]]]:
    """The files' tensors as a state dict of plain ones, which are read when they are asked for.

    The second mapping reads what can stay in four bits.
    """
    from safetensors import safe_open

    tensors: dict[str, Tensor] = {}
    with ExitStack() as stack:
        where: dict[str, Any] = {}
        for file, held in shards(path).items():
            handle = stack.enter_context(safe_open(file, framework="pt"))
            where |= dict.fromkeys(held, handle)
            tensors |= held

        def load(name: str) -> Any:
            return where[name].get_tensor(name) if name in where else None

        state: dict[str, Any] = {}
        kept: dict[str, Callable[[], GroupedWeights]] = {}
        plain = as_plain(path, tensors, packing)
        packed = set(matrices(tensors, packing))
        for name, each in plain.items():
            matrix = name.removesuffix(WEIGHT)
            if matrix not in packed:
                state[name] = where[name].get_slice(name)
                continue
            read = partial(packing.read, matrix, load)
            state[name] = LazyTensor(each.shape, each.dtype, partial(_dense, read))
            if can_be_kept(matrix, each.shape, packing):
                kept[matrix] = read
        yield state, kept


def _dense(read: Callable[[], GroupedWeights]) -> Any:
    return read().dense()
