"""Checkpoint folders with packed matrices: their headers once unpacked, and reading them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipespec.engine.checkpoint.formats.fp4 import Fp4Packing
from pipespec.engine.checkpoint.formats.fp8 import Fp8Packing, Fp8Weights
from pipespec.engine.checkpoint.formats.lazy import DTYPES, LazyTensor, Part
from pipespec.engine.checkpoint.formats.mxfp4 import Fp4Weights, Mxfp4Packing
from pipespec.engine.checkpoint.formats.packing import Packing
from pipespec.engine.checkpoint.safetensors_headers import Tensor, shards
from pipespec.engine.checkpoint.slice_tensors import LAYER, part_of
from pipespec.engine.precision import ITEM_BYTES
from pipespec.errors import ModelError

if TYPE_CHECKING:  # headers are read without them
    from pipespec.engine.checkpoint.formats.gguf_blocks import BlockWeights
    from pipespec.engine.checkpoint.formats.groups import GroupedWeights

    # A matrix as it is stored; `dense()` are its weights.
    StoredWeights = GroupedWeights | Fp8Weights | Fp4Weights | BlockWeights

AnyPacking = Packing | Fp4Packing | Fp8Packing | Mxfp4Packing
# Tensors that belong to packed matrices and are not needed once these are unpacked.
_LEFT_OVER = (
    "_scale",
    "_scales",
    "_scale_inv",
    "_scale_ub",
    "_zero_point",
    "_g_idx",
    ".g_idx",
    ".qzeros",
    ".scales",
    ".weight_shape",
)
# Gemma 4 multiplies what an expert yields by a weight of that name.
_NO_LEFT_OVER = ".per_expert_scale"
# AWQ may have scaled the inputs of a matrix, which is not supported.
_SCALED_INPUTS = ".act.scales"


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


def as_plain(
    path: Path, tensors: Mapping[str, Tensor], packing: AnyPacking | None
) -> dict[str, Tensor]:
    """The headers of the weights once unpacked, in the type of the weights that are not quantised.

    `packing` None: the numbers are quantised but not packed. Raises ModelError.
    """
    plain = {
        name: each
        for name, each in tensors.items()
        if not name.endswith(_LEFT_OVER) or name.endswith(_NO_LEFT_OVER)
    }
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
    for name in packing.matrices(tensors):
        shape = packing.shape(name, tensors)
        plain.pop(name + packing.suffix)
        plain[name + packing.dense_suffix] = _plain(shape, dtype)
    for name, each in plain.items():
        if each.dtype.startswith("F8"):
            raise ModelError(
                f"{path} holds {name} as {each.dtype}, which is read of matrices alone, as F8_E4M3 "
                "with a scale; take another checkpoint"
            )
    return plain


def _plain(shape: tuple[int, ...], dtype: str) -> Tensor:
    return Tensor(shape, math.prod(shape) * ITEM_BYTES[DTYPES[dtype]], dtype)


def kept_layers(tensors: Mapping[str, Tensor], packing: AnyPacking) -> tuple[KeptLayer, ...]:
    """What can stay in its format in each layer."""
    numbers = [int(layer[1]) for name in tensors if (layer := LAYER.search(name))]
    found = [KeptLayer()] * (max(numbers, default=-1) + 1)
    for name in packing.matrices(tensors):
        layer = LAYER.search(name)
        shape = packing.shape(name, tensors)
        if layer is None:
            continue
        kept = KeptLayer(expanded=math.prod(shape))
        if packing.keeps(name, shape):
            kept = KeptLayer(math.prod(shape), packing.kept_bytes(name, tensors))
        found[int(layer[1])] += kept
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


@dataclass(frozen=True, slots=True)
class _Files:
    """The tensors of open files; see `matrix_packing.Load`."""

    tensors: Mapping[str, Tensor]
    where: Mapping[str, Any]

    def __call__(self, name: str, *index: slice) -> Any:
        if name not in self.where:
            return None
        stored_as = self.tensors[name].stored_as
        if all(each == slice(None) for each in index):
            return self.where[name].get_tensor(stored_as)
        return self.where[name].get_slice(stored_as)[index]

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self.tensors[name].shape if name in self.tensors else None


def lazy_state(
    path: Path, packing: AnyPacking, parts: Collection[str]
) -> tuple[dict[str, Any], dict[str, Callable[[Part], StoredWeights]]]:
    """The tensors of these parts (`slice_tensors`) as a state dict of plain weights, which are
    read lazily.

    The second mapping reads the matrices that can stay in their few bits, or parts of them. The
    files are open for as long as either is referred to: a load that fails leaves threads of
    Transformers that still read.
    """
    from safetensors import safe_open

    tensors: dict[str, Tensor] = {}
    where: dict[str, Any] = {}
    for file, held in shards(path).items():
        wanted = {name: each for name, each in held.items() if part_of(name) in parts}
        if wanted:
            where |= dict.fromkeys(wanted, safe_open(file, framework="pt"))
            tensors |= wanted
    load = _Files(tensors, where)
    state: dict[str, Any] = {}
    kept: dict[str, Callable[[Part], StoredWeights]] = {}
    plain = as_plain(path, tensors, packing)
    packed = set(packing.matrices(tensors))
    for name, each in plain.items():
        matrix = name.removesuffix(packing.dense_suffix)
        if matrix not in packed:
            state[name] = where[name].get_slice(tensors[name].stored_as)
            continue
        read = partial(packing.read, matrix, load)
        dtype = packing.dense_dtype or each.dtype
        state[name] = LazyTensor(each.shape, dtype, partial(_dense, read))
        kept |= packing.readers(matrix, each.shape, load)
    return state, kept


def _dense(read: Callable[[Part], Any], part: Part) -> Any:
    return read(part).dense()
