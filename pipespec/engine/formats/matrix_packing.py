"""What the packings of matrices in safetensors files have in common, whatever their format."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pipespec.engine.formats.safetensors_headers import Tensor
from pipespec.engine.formats.slice_tensors import LAYER
from pipespec.engine.formats.stored import (
    DTYPES,
    WHOLE,
    KeptLayer,
    Part,
    StoredTensors,
    Units,
)
from pipespec.errors import ModelError

WEIGHT = ".weight"
# Types of ggml's blocks that packed integers of 4 and 8 bits can become, and weights of a block.
GROUPED_KIND, WIDE_KIND = "Q4_1", "Q8_0"
BLOCK = 32
# Tensors that belong to packed matrices and are not needed once these are unpacked.
_LEFT_OVER = (
    *("_scale", "_scales", "_scale_inv", "_scale_ub", "_zero_point", "_g_idx"),
    *(".g_idx", ".qzeros", ".scales", ".weight_shape"),
)
# Gemma 4 multiplies what an expert yields by a weight of that name.
_NO_LEFT_OVER = ".per_expert_scale"
# AWQ may have scaled the inputs of a matrix, which is not supported.
_SCALED_INPUTS = ".act.scales"


class MatrixPacking(ABC):
    """The matrices of a checkpoint folder that are not plain.

    Attributes:
        format: one of KEPT_FORMATS, in which they can stay in memory.
        kind: of blocks (`gguf_blocks`), or FP8, that they then are.
        suffix: the end of the name of the tensor with the codes of a matrix.
        dense_suffix: the end of the name of a plain matrix.
        dense_dtype: the type of matrices once unpacked, as safetensors names it; None: that of
            their scales.
        units: how many rows and columns of the matrices cannot be divided.
    """

    __slots__ = ()
    path: Path
    format: str
    kind: str
    suffix: str
    dense_suffix: str = WEIGHT
    dense_dtype: str | None = None

    @property
    @abstractmethod
    def units(self) -> Units: ...

    def matrices(self, tensors: Mapping[str, Tensor]) -> list[str]:
        return [name.removesuffix(self.suffix) for name in tensors if name.endswith(self.suffix)]

    @abstractmethod
    def shape(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
        """The shape `(out, in)` of a matrix once it is plain, from the headers. Raises
        ModelError."""

    def keeps(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a matrix of a layer can stay as it is."""
        return True

    @abstractmethod
    def kept_bytes(self, name: str, tensors: Mapping[str, Tensor]) -> int:
        """Bytes of a matrix that stays as it is."""

    @abstractmethod
    def read(self, name: str, files: StoredTensors, part: Part = WHOLE) -> Any:
        """Read a matrix or a part of it, of whole `units`; its `dense()` are the weights. Nothing
        else is read."""

    def dense(self, name: str, files: StoredTensors, part: Part = WHOLE) -> Any:
        """The weights themselves."""
        return self.read(name, files, part).dense()

    def readers(
        self, name: str, shape: tuple[int, ...], files: StoredTensors
    ) -> dict[str, Callable[[Part], Any]]:
        """Read parts of what can stay as it is: the matrix, or each of several that are stored
        together."""
        kept = LAYER.search(name) is not None and self.keeps(name, shape)
        return {name: partial(self.read, name, files)} if kept else {}

    def kept_layer(self, name: str, tensors: Mapping[str, Tensor]) -> KeptLayer:
        shape = self.shape(name, tensors)
        if self.keeps(name, shape):
            return KeptLayer(math.prod(shape), self.kept_bytes(name, tensors))
        return KeptLayer(expanded=math.prod(shape))

    def as_plain(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The headers of the weights once unpacked, in the type of those that are not packed.
        Raises ModelError."""
        plain = {
            name: each
            for name, each in tensors.items()
            if not name.endswith(_LEFT_OVER) or name.endswith(_NO_LEFT_OVER)
        }
        if any(name.endswith(_SCALED_INPUTS) for name in tensors):
            raise self._holds("scales of activations (act.scales), which is not supported")
        dtype = usual_dtype(plain.values())
        if dtype is None:
            raise self._holds("no tensor of plain numbers")
        for name in self.matrices(tensors):
            plain.pop(name + self.suffix)
            plain[name + self.dense_suffix] = Tensor.of(self.shape(name, tensors), dtype)
        for name, each in plain.items():
            if each.dtype.startswith("F8"):
                read = "read of matrices alone, as F8_E4M3 with a scale"
                raise self._holds(f"{name} as {each.dtype}, which is {read}")
        return plain

    def unfit(self, why: str) -> ModelError:
        """That the tensors of the folder are not what its config says, and why."""
        return ModelError(
            f"{self.path} does not fit its config.json: {why}; fetch the checkpoint again"
        )

    def _holds(self, what: str) -> ModelError:
        return ModelError(f"{self.path} holds {what}; take another checkpoint")


def usual_dtype(tensors: Iterable[Tensor]) -> str | None:
    """The type of most of the plain numbers; None: there are none."""
    sizes = Counter[str]()
    for each in tensors:
        if each.dtype in DTYPES:
            sizes[each.dtype] += each.num_bytes
    return sizes.most_common(1)[0][0] if sizes else None


def weight_groups(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The `weights` of each of the `config_groups` of compressed-tensors. Raises ValueError."""
    groups = config.get("config_groups")
    found = list(groups.values()) if isinstance(groups, dict) else []
    weights = [each.get("weights") for each in found if isinstance(each, dict)]
    objects = [each for each in weights if isinstance(each, dict)]
    if not objects or len(objects) < len(found):
        raise ValueError("config_groups names no weights")
    return objects
