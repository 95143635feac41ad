"""Matrices of 4-bit floats (E2M1): NVFP4 and MXFP4 of compressed-tensors, and gpt-oss's experts.

A byte holds two neighbours. NVFP4 has an FP8 scale (E4M3) for 16 numbers, and one number for the
matrix by which these are divided; MXFP4 an exponent of two for 32. Scales by which other engines
quantise activations are left out: only weights are in 4 bits.

gpt-oss as it is published has the experts of a layer together: `_blocks`
`[experts, out, groups, 16]` and `_scales` `[experts, out, groups]`. Transformers has their matrices
transposed, `[experts, in, out]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipespec.engine.formats.matrix_packing import MatrixPacking
from pipespec.engine.formats.safetensors_headers import Tensor
from pipespec.engine.formats.stored import WHOLE, Part, StoredTensors, Units, per, row_parts

if TYPE_CHECKING:  # headers are read without them
    import torch

    from pipespec.engine.formats.gguf_blocks import BlockWeights

# Formats in memory, and the kinds of their blocks (`gguf_blocks`).
MXFP4, NVFP4 = "mxfp4", "nvfp4"
MX_KIND, NV_KIND = "MXFP4", "NVFP4"
# By the format in config.json: the format in memory, the kind of blocks, and numbers per scale.
FP4_FORMATS = {
    "nvfp4-pack-quantized": (NVFP4, NV_KIND, 16),
    "mxfp4-pack-quantized": (MXFP4, MX_KIND, 32),
}
PACKED, SCALE, GLOBAL = ".weight_packed", ".weight_scale", ".weight_global_scale"
SCALE_TYPES = {NV_KIND: "F8_E4M3", MX_KIND: "U8"}
BLOCKS, SCALES = "_blocks", "_scales"
GROUP, CODE_BYTES, BLOCK_BYTES = 32, 16, 17


def fp4_blocks(
    pairs: torch.Tensor, scales: torch.Tensor, kind: str, factor: float = 1.0
) -> BlockWeights:
    """A matrix `[out, in]` in blocks of MX_KIND or NV_KIND, given uint8 `[out, groups, bytes]` that
    hold two neighbours each, and scales `[out, groups]` of one byte."""
    import torch

    from pipespec.engine.formats.gguf_blocks import BlockWeights

    out, groups, num_bytes = pairs.shape
    blocks = pairs.new_empty(out, groups, 1 + num_bytes)
    blocks[..., 0] = scales.view(torch.uint8)
    for rows in row_parts((out, groups * num_bytes)):
        packed = pairs[rows]
        if kind == MX_KIND:
            # In ggml's blocks a byte holds a number of the first half and one of the second.
            codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)  # in their order
            packed = codes[..., :CODE_BYTES] | codes[..., CODE_BYTES:] << 4
        blocks[rows, :, 1:] = packed
    return BlockWeights(blocks.flatten(1), kind, factor)


@dataclass(frozen=True, slots=True)
class Fp4Packing(MatrixPacking):
    """How the matrices of a checkpoint folder are packed; see `packing.Packing`."""

    path: Path
    format: str
    kind: str
    group: int

    suffix = PACKED
    dense_dtype = "F32"

    def shape(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
        codes, scales = tensors[name + PACKED], tensors.get(name + SCALE)
        lacking = self.kind == NV_KIND and name + GLOBAL not in tensors
        if len(codes.shape) == 2 and codes.dtype == "U8" and scales is not None and not lacking:
            out, inputs = codes.shape[0], 2 * codes.shape[1]
            expected = (out, inputs // self.group)
            if scales.shape == expected and scales.dtype == SCALE_TYPES[self.kind]:
                return out, inputs
        why = f"{name} is no matrix of 4-bit floats with a scale for {self.group} of them"
        raise self.unfit(why)

    @property
    def units(self) -> Units:
        return Units(columns=self.group)

    def kept_bytes(self, name: str, tensors: Mapping[str, Tensor]) -> int:
        return tensors[name + PACKED].num_bytes + tensors[name + SCALE].num_bytes

    def read(self, name: str, files: StoredTensors, part: Part = WHOLE) -> BlockWeights:
        rows, columns = part
        pairs = files.read(name + PACKED, rows, per(columns, 2))
        scales = files.read(name + SCALE, rows, per(columns, self.group))
        factor = 1 / float(files.read(name + GLOBAL)) if self.kind == NV_KIND else 1.0
        by_group = pairs.view(len(pairs), -1, self.group // 2)
        return fp4_blocks(by_group, scales, self.kind, factor)


@dataclass(frozen=True, slots=True)
class Mxfp4Packing(MatrixPacking):
    """How the experts of a checkpoint folder are packed; see `packing.Packing`."""

    path: Path

    format = MXFP4
    kind = MX_KIND
    suffix = BLOCKS
    dense_suffix = ""
    dense_dtype = "BF16"

    def shape(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
        """The shape `(experts, in, out)` of a stack, from the headers. Raises ModelError."""
        blocks, scales = tensors[name + BLOCKS], tensors.get(name + SCALES)
        wrong = len(blocks.shape) != 4 or blocks.shape[-1] != CODE_BYTES or blocks.dtype != "U8"
        if wrong or scales is None or scales.shape != blocks.shape[:-1] or scales.dtype != "U8":
            why = f"{name} is not in blocks of {GROUP} numbers with a scale each"
            raise self.unfit(why)
        experts, out, groups, _ = blocks.shape
        return experts, groups * GROUP, out

    @property
    def units(self) -> Units:
        return Units(columns=GROUP)

    def kept_bytes(self, name: str, tensors: Mapping[str, Tensor]) -> int:
        return tensors[name + BLOCKS].num_bytes // CODE_BYTES * BLOCK_BYTES

    def read(self, name: str, files: StoredTensors, part: Part = WHOLE) -> BlockWeights:
        """See `MatrixPacking`; of the expert whose number ends the name."""
        stack, _, number = name.rpartition(".")
        one, (rows, columns) = slice(int(number), int(number) + 1), part
        index = (one, rows, per(columns, GROUP))
        blocks, scales = (files.read(stack + suffix, *index)[0] for suffix in (BLOCKS, SCALES))
        return fp4_blocks(blocks, scales, MX_KIND)

    def dense(self, name: str, files: StoredTensors, part: Part = WHOLE) -> torch.Tensor:
        """The weights `[experts, in, out]` in bfloat16, which holds them; as a whole."""
        import torch

        assert part == WHOLE, "transposed stacks are read as a whole"
        stored = zip(files.read(name + BLOCKS), files.read(name + SCALES), strict=True)
        return torch.stack([fp4_blocks(*one, MX_KIND).dense().T.bfloat16() for one in stored])

    def readers(
        self, name: str, shape: tuple[int, ...], files: StoredTensors
    ) -> dict[str, Callable[[Part], Any]]:
        """See `MatrixPacking`: one for each expert, by name and number."""
        experts = (f"{name}.{number}" for number in range(shape[0]))
        return {each: partial(self.read, each, files) for each in experts}
