"""The FP8 matrices of checkpoints: 8-bit floats (E4M3) and their scales.

A weight is `code * scale`, with one scale for the whole matrix, for a row, or for a block of rows
and columns. Read are `quant_method: fp8` as DeepSeek, Qwen and Mistral publish it (also by
AutoFP8), `fbgemm_fp8`, and `float-quantized` of compressed-tensors (llm-compressor). Only weights
are: scales by which other engines quantise activations are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipespec.engine.formats.matrix_packing import WEIGHT, MatrixPacking, weight_groups
from pipespec.engine.formats.packing import COMPRESSED
from pipespec.engine.formats.safetensors_headers import Tensor
from pipespec.engine.formats.stored import (
    DTYPES,
    WHOLE,
    Part,
    StoredTensors,
    Units,
    per,
    row_parts,
)
from pipespec.errors import ModelError
from pipespec.system.validation import typed

if TYPE_CHECKING:  # headers are read without them
    import torch

FP8, FBGEMM = "fp8", "fbgemm_fp8"
FLOAT_QUANTIZED = "float-quantized"
# Formats of compressed-tensors whose codes are stored one by one, as floats if their type says so.
FLOAT_FORMATS = (FLOAT_QUANTIZED, "naive-quantized")
CODE_TYPE = "F8_E4M3"
# Suffixes of the scales of a matrix, of which it has one.
SCALES = (".weight_scale_inv", ".weight_scale")
SCALE_BYTES = 4


@dataclass(frozen=True)
class Fp8Weights:
    """A matrix `[out, in]` of codes, float8_e4m3fn, with float32 scales `[blocks, blocks]`; a block
    is of `height` rows and `width` columns, at the ends of fewer."""

    codes: torch.Tensor
    scales: torch.Tensor
    height: int
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def part(self, rows: slice) -> Fp8Weights:
        import torch

        start, stop, _ = rows.indices(len(self.codes))
        block_of = torch.arange(start, stop, device=self.codes.device) // self.height
        return Fp8Weights(self.codes[rows], self.scales[block_of], 1, self.width)

    def held(self, device: torch.device) -> Fp8Weights:
        """The same on a device. Raises ModelError if some weights are no numbers."""
        import torch

        for rows in row_parts(self.shape):
            if ((self.codes[rows].view(torch.uint8) & 0x7F) == 0x7F).any():
                raise ModelError("some of its weights are no numbers")
        # A member's columns are a view of the whole.
        codes, scales = (each.to(device).contiguous() for each in (self.codes, self.scales))
        return replace(self, codes=codes, scales=scales)

    def dense(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weights `[out, in]`, computed in that type; None: float32."""
        import torch

        out, inputs = self.shape
        weights = self.codes.to(dtype or torch.float32)
        scales = self.scales.to(weights.dtype).repeat_interleave(self.height, 0)[:out]
        if inputs % self.width:  # the last block has fewer columns
            return weights.mul_(scales.repeat_interleave(self.width, 1)[:, :inputs])
        weights.view(out, -1, self.width).mul_(scales.unsqueeze(-1))
        return weights


@dataclass(frozen=True, slots=True)
class Fp8Packing(MatrixPacking):
    """How the FP8 matrices of a checkpoint folder are scaled; see `packing.Packing`.

    Attributes:
        block: rows and columns that share a scale, where there is more than one in a row.
    """

    path: Path
    block: tuple[int, int] | None

    suffix = WEIGHT
    format = kind = FP8
    dense_dtype = "F32"

    def matrices(self, tensors: Mapping[str, Tensor]) -> list[str]:
        found = MatrixPacking.matrices(self, tensors)
        return [name for name in found if tensors[name + WEIGHT].dtype == CODE_TYPE]

    def shape(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
        shape = tensors[name + WEIGHT].shape
        scales = tensors.get(_scales(name, tensors))
        if scales is None:
            raise self.unfit(f"{name}{SCALES[-1]} is missing")
        if scales.dtype not in DTYPES:
            raise self.unfit(f"the scales of {name} are {scales.dtype}")
        if len(shape) != 2:
            raise self.unfit(f"{name}{WEIGHT} is no matrix")
        self._blocks(name, shape, scales.shape)
        return shape

    def _blocks(
        self, name: str, shape: tuple[int, ...], scales: tuple[int, ...]
    ) -> tuple[int, int]:
        """Rows and columns of a block. Raises ModelError."""
        out, inputs = shape
        if math.prod(scales) == 1:
            return out, inputs
        if scales in ((out,), (out, 1)):
            return 1, inputs
        if self.block is None:
            why = f"it names no blocks, but {name} has scales {list(scales)}"
            raise self.unfit(why)
        height, width = self.block
        expected = (-(-out // height), -(-inputs // width))
        if scales != expected:
            raise self.unfit(
                f"the scales of {name} are {list(scales)}, but must be {list(expected)} for blocks "
                f"of {height} by {width}",
            )
        return height, width

    @property
    def units(self) -> Units:
        height, width = self.block or (1, 1)
        return Units(height, math.lcm(width, 2))  # see `keeps`

    def keeps(self, name: str, shape: tuple[int, ...]) -> bool:
        return shape[1] % 2 == 0

    def kept_bytes(self, name: str, tensors: Mapping[str, Tensor]) -> int:
        scales = SCALE_BYTES * math.prod(tensors[_scales(name, tensors)].shape)
        return tensors[name + WEIGHT].num_bytes + scales

    def read(self, name: str, files: StoredTensors, part: Part = WHOLE) -> Fp8Weights:
        rows, columns = part
        codes = files.read(name + WEIGHT, rows, columns)
        of_scales = _scales(name, files.present)
        shape = files.present[of_scales].shape
        height, width = self._blocks(name, files.present[name + WEIGHT].shape, shape)
        blocks = (per(rows, height), per(columns, width))
        scales = files.read(of_scales, *(blocks[: len(shape)] if math.prod(shape) > 1 else ()))
        height, width = (min(pair) for pair in zip((height, width), codes.shape, strict=True))
        of_rows = -(-codes.shape[0] // height)
        return Fp8Weights(codes, scales.float().reshape(of_rows, -1), height, width)


def fp8_packing(path: Path, config: Mapping[str, Any]) -> Fp8Packing | None:
    """The packing by the `quantization_config` of config.json; None: it is of another kind. Raises
    Unreadable, ValueError."""
    if config["quant_method"] in (FP8, FBGEMM):
        return Fp8Packing(path, _block(config.get("weight_block_size")))
    if config["quant_method"] != COMPRESSED or config.get("format") not in FLOAT_FORMATS:
        return None
    weights = weight_groups(config)
    if any(each.get("num_bits") != 8 or each.get("type") != "float" for each in weights):
        if config["format"] != FLOAT_QUANTIZED:
            return None
        raise ValueError("its weights are not all floats of 8 bits")
    blocks = {_block(each.get("block_structure")) for each in weights}
    if len(blocks) > 1:
        raise ValueError("its matrices have different blocks")
    return Fp8Packing(path, blocks.pop())


def _scales(name: str, tensors: Mapping[str, Tensor]) -> str:
    """The name of the scales of a matrix."""
    return next((name + each for each in SCALES if name + each in tensors), "")


def _block(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    height, width = typed("the block size", value, tuple[int, int])
    if height < 1 or width < 1:
        raise ValueError(f"blocks of {height} by {width} weights")
    return height, width
