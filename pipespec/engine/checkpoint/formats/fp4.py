"""The 4-bit floats (E2M1) of compressed-tensors checkpoints: NVFP4 and MXFP4.

A byte holds two neighbours. NVFP4 has an FP8 scale (E4M3) for 16 numbers, and one number for the
matrix by which these are divided; MXFP4 an exponent of two for 32. Scales by which other engines
quantise activations are left out: only weights are in 4 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipespec.engine.checkpoint.formats.lazy import WHOLE, Part, per
from pipespec.engine.checkpoint.formats.matrix_packing import Load, MatrixPacking
from pipespec.engine.checkpoint.formats.mxfp4 import MXFP4, Fp4Weights
from pipespec.engine.checkpoint.safetensors_headers import Tensor
from pipespec.engine.checkpoint.slice_tensors import LAYER
from pipespec.engine.tp_cuts import CutUnits
from pipespec.errors import ModelError

NVFP4 = "nvfp4"
# By the format in config.json: the kind of blocks (`gguf_blocks`), and numbers with one scale.
FORMATS = {"nvfp4-pack-quantized": ("NVFP4", 16), "mxfp4-pack-quantized": ("MXFP4", 32)}
PACKED, SCALE, GLOBAL = ".weight_packed", ".weight_scale", ".weight_global_scale"
SCALE_TYPES = {"NVFP4": "F8_E4M3", "MXFP4": "U8"}


@dataclass(frozen=True, slots=True)
class Fp4Packing(MatrixPacking):
    """How the matrices of a checkpoint folder are packed; see `packing.Packing`."""

    path: Path
    kind: str
    group: int

    suffix = PACKED

    @property
    def format(self) -> str:
        """The format in which the matrices can stay in memory."""
        return MXFP4 if self.kind == "MXFP4" else NVFP4

    @property
    def dense_dtype(self) -> str | None:
        """The type of matrices once dequantised, as safetensors names it."""
        return "F32"

    def shape(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
        """The shape `(out, in)` of a matrix, from the headers. Raises ModelError."""
        codes, scales = tensors[name + PACKED], tensors.get(name + SCALE)
        lacking = self.kind == "NVFP4" and name + GLOBAL not in tensors
        if len(codes.shape) == 2 and codes.dtype == "U8" and scales is not None and not lacking:
            out, inputs = codes.shape[0], 2 * codes.shape[1]
            expected = (out, inputs // self.group)
            if scales.shape == expected and scales.dtype == SCALE_TYPES[self.kind]:
                return out, inputs
        raise ModelError(
            f"{self.path} does not fit its config.json: {name} is no matrix of 4-bit floats with a "
            f"scale for {self.group} of them; fetch the checkpoint again"
        )

    @property
    def units(self) -> CutUnits:
        """See `MatrixPacking`."""
        return CutUnits(columns=self.group)

    def keeps(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a matrix can stay packed."""
        return LAYER.search(name) is not None

    def kept_bytes(self, name: str, tensors: Mapping[str, Tensor]) -> int:
        """Bytes of a matrix that stays packed."""
        return tensors[name + PACKED].num_bytes + tensors[name + SCALE].num_bytes

    def read(self, name: str, load: Load, part: Part = WHOLE) -> Fp4Weights:
        """See `MatrixPacking`."""
        rows, columns = part
        pairs = load(name + PACKED, rows, per(columns, 2))
        scales = load(name + SCALE, rows, per(columns, self.group))
        assert pairs is not None and scales is not None, "the headers contain them"
        by_group = pairs.view(len(pairs), -1, self.group // 2)
        if self.kind == "MXFP4":
            return Fp4Weights(by_group, scales, self.kind)
        whole = load(name + GLOBAL)
        assert whole is not None, "the headers contain it"
        return Fp4Weights(by_group, scales, self.kind, 1 / float(whole))


def fp4_packing(path: Path, config: Mapping[str, Any]) -> Fp4Packing | None:
    """The packing by the `quantization_config` of config.json; None: it is of another kind."""
    found = FORMATS.get(str(config.get("format")))
    return None if found is None else Fp4Packing(path, *found)
