"""The experts of gpt-oss as they are published: 4-bit floats (E2M1) in blocks of 32 with one scale.

The experts of a layer are stored together: `_blocks` `[experts, out, groups, 16]`, of which a byte
holds two neighbours, and `_scales` `[experts, out, groups]`, exponents of two. Transformers has
their matrices transposed, `[experts, in, out]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipespec.engine.checkpoint.formats.lazy import WHOLE, Part, per
from pipespec.engine.checkpoint.formats.matrix_packing import Load, MatrixPacking
from pipespec.engine.checkpoint.safetensors_headers import Tensor
from pipespec.engine.fill_in_parts import row_parts
from pipespec.engine.tp_cuts import CutUnits
from pipespec.errors import ModelError

if TYPE_CHECKING:  # headers are read without them
    import torch

    from pipespec.engine.checkpoint.formats.gguf_blocks import BlockWeights

MXFP4 = "mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"
KIND = "MXFP4"  # of `gguf_blocks`
GROUP, CODE_BYTES, BLOCK_BYTES = 32, 16, 17


@dataclass(frozen=True, slots=True)
class Fp4Weights:
    """A matrix `[out, in]` of 4-bit floats as it is stored. Its rows become blocks when they are
    asked for, so that no more than these are in memory.

    Attributes:
        pairs: `[out, groups, bytes]` uint8 that hold two neighbours each.
        scales: `[out, groups]`, of one byte each.
        kind: of the blocks; "MXFP4" or "NVFP4".
        factor: of all weights.
    """

    pairs: torch.Tensor
    scales: torch.Tensor
    kind: str
    factor: float = 1.0

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        out, groups, num_bytes = self.pairs.shape
        return out, groups * num_bytes * 2

    def part(self, rows: slice) -> BlockWeights:
        """These rows of the matrix."""
        import torch

        from pipespec.engine.checkpoint.formats.gguf_blocks import BlockWeights

        packed = self.pairs[rows]
        if self.kind == KIND:
            # In ggml's blocks a byte holds a number of the first half and one of the second.
            codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)  # in their order
            packed = codes[..., :CODE_BYTES] | codes[..., CODE_BYTES:] << 4
        scales = self.scales[rows].view(torch.uint8).unsqueeze(-1)
        return BlockWeights(torch.cat((scales, packed), -1).flatten(1), self.kind, self.factor)

    def blocks(self) -> BlockWeights:
        """The same in ggml's blocks."""
        return self.part(slice(None))

    def dense(self) -> torch.Tensor:
        """The weights `[out, in]` in float32."""
        import torch

        weights = torch.empty(self.shape)
        for rows in row_parts(self.shape):
            weights[rows] = self.part(rows).dense()
        return weights


@dataclass(frozen=True, slots=True)
class Mxfp4Experts:
    """The matrices of the experts of a layer, as they are stored."""

    blocks: torch.Tensor
    scales: torch.Tensor

    def expert(self, number: int) -> Fp4Weights:
        """The matrix `[out, in]` of one of them."""
        return Fp4Weights(self.blocks[number], self.scales[number], KIND)

    def dense(self) -> torch.Tensor:
        """The weights `[experts, in, out]` in bfloat16, which holds them."""
        import torch

        experts = [self.expert(i).dense().T.bfloat16() for i in range(len(self.blocks))]
        return torch.stack(experts)


@dataclass(frozen=True, slots=True)
class Mxfp4Packing(MatrixPacking):
    """How the experts of a checkpoint folder are packed; see `packing.Packing`."""

    path: Path

    suffix = BLOCKS
    dense_suffix = ""

    @property
    def format(self) -> str:
        """The format in which the matrices can stay in memory."""
        return MXFP4

    @property
    def dense_dtype(self) -> str | None:
        """The type of matrices once dequantised, as safetensors names it."""
        return "BF16"

    def shape(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
        """The shape `(experts, in, out)` of a stack, from the headers. Raises ModelError."""
        blocks, scales = tensors[name + BLOCKS], tensors.get(name + SCALES)
        wrong = len(blocks.shape) != 4 or blocks.shape[-1] != CODE_BYTES or blocks.dtype != "U8"
        if wrong or scales is None or scales.shape != blocks.shape[:-1] or scales.dtype != "U8":
            raise ModelError(
                f"{self.path} does not fit its config.json: {name} is not in blocks of {GROUP} "
                "numbers with a scale each; fetch the checkpoint again"
            )
        experts, out, groups, _ = blocks.shape
        return experts, groups * GROUP, out

    @property
    def units(self) -> CutUnits:
        """See `MatrixPacking`."""
        return CutUnits(columns=GROUP)

    def keeps(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a stack can stay packed."""
        return True

    def kept_bytes(self, name: str, tensors: Mapping[str, Tensor]) -> int:
        """Bytes of a stack that stays packed."""
        return tensors[name + BLOCKS].num_bytes // CODE_BYTES * BLOCK_BYTES

    def read(self, name: str, load: Load, part: Part = WHOLE) -> Mxfp4Experts:
        """See `MatrixPacking`; as a whole."""
        assert part == WHOLE, "no tensor-parallel plan divides transposed stacks"
        return Mxfp4Experts(load(name + BLOCKS), load(name + SCALES))

    def readers(
        self, name: str, shape: tuple[int, ...], load: Load
    ) -> dict[str, Callable[[Part], Any]]:
        """See `MatrixPacking`: one for each expert, by name and number."""

        def read(number: int, part: Part) -> Fp4Weights:
            one, (rows, columns) = slice(number, number + 1), part
            index = (one, rows, per(columns, GROUP))
            return Mxfp4Experts(load(name + BLOCKS, *index), load(name + SCALES, *index)).expert(0)

        return {f"{name}.{number}": partial(read, number) for number in range(shape[0])}
