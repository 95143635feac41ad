"""The packed matrices of AWQ, GPTQ and compressed-tensors checkpoints.

For each format: which tensors a matrix has in the files, and how they become `GroupedWeights`.
Verified against the packing code of autoawq, auto_gptq and compressed-tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipespec.engine.formats.matrix_packing import (
    BLOCK,
    GROUPED_KIND,
    WEIGHT,
    WIDE_KIND,
    MatrixPacking,
    weight_groups,
)
from pipespec.engine.formats.safetensors_headers import Tensor
from pipespec.engine.formats.stored import WHOLE, Part, StoredTensors, Units, per
from pipespec.errors import ModelError
from pipespec.system.validation import typed

if TYPE_CHECKING:  # headers are read without them
    import torch

    from pipespec.engine.formats.gguf_blocks import BlockWeights

# The formats of integers of 4 and 8 bits in memory, the kinds of ggml's blocks that they become,
# and bytes of a weight on a CPU: one or two numbers of 16 bits for each block; a GPU has them for
# each group.
PACKED_INT4, PACKED_INT8 = "int4", "integers"
_KEPT = {4: (PACKED_INT4, GROUPED_KIND, 20 / 32), 8: (PACKED_INT8, WIDE_KIND, 34 / 32)}
# Group sizes that the kernel for packed 4-bit weights supports, and the divisor of `out`.
INT4_GROUP_SIZES = (32, 64, 128)
INT4_OUT_MULTIPLE = 16
# The largest error of a scale, relative to it: half the distance of two numbers of float16.
HALF_ROUNDING = 2**-11
AWQ, GPTQ, COMPRESSED = "awq", "gptq", "compressed-tensors"
WORD = 32  # bits of the integers into which codes are packed
# The place in a word of each of eight neighbouring columns in AWQ.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
PACKED = "pack-quantized"
# Formats of compressed-tensors that store each integer in a byte of its own.
NOT_PACKED = ("naive-quantized", "int-quantized")
ZEROS = ".weight_zero_point"


@dataclass(frozen=True)
class GroupedWeights:
    """A matrix `[out, in]`: a weight is `(code - zero) * scale`, with zero and scale of its group.

    Attributes:
        codes: uint8 `[out, in]`.
        scales: `[out, groups]`, in the type that weights are rounded to.
        zeros: int16 `[out, groups]`.
        group_of: the group of each input, int64 `[in]`; None: groups of the same size, in order.
        kind: of ggml's blocks that they can become: GROUPED_KIND of codes of 4 bits, WIDE_KIND of
            codes of 8 whose zeros are all 128.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    group_of: torch.Tensor | None = None
    kind: str = GROUPED_KIND

    def dense(self) -> torch.Tensor:
        """The weights `[out, in]` in the type of the scales, rounded as the quantisers' code
        does."""
        weights, zeros, scales = self.codes.to(self.scales.dtype), self.zeros, self.scales
        if self.group_of is None:
            weights = weights.view(*zeros.shape, -1)
            zeros, scales = zeros.unsqueeze(-1), scales.unsqueeze(-1)
        else:
            zeros, scales = zeros[:, self.group_of], scales[:, self.group_of]
        weights -= zeros  # small integers, which every type holds
        weights *= scales
        return weights.view(self.codes.shape)

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def part(self, rows: slice) -> GroupedWeights:
        of_rows = self.codes[rows], self.scales[rows], self.zeros[rows]
        return GroupedWeights(*of_rows, self.group_of, self.kind)

    def int4(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Int4Linear.fill`."""
        if self.group_of is not None:
            raise ModelError("its groups are of any inputs, though config.json says otherwise")
        scales = self.scales.float()
        return self.codes, scales, (8 - self.zeros.float()) * scales

    def blocks(self) -> BlockWeights:
        """The same in ggml's blocks of 32, with scales and offsets rounded to float16.

        Raises ModelError as `int4` does, and if float16 does not hold a scale, or codes are not
        around 128.
        """
        import torch

        from pipespec.engine.formats.gguf_blocks import BlockWeights

        codes, scales, middles = self.int4()
        out, inputs = codes.shape
        if self.kind == GROUPED_KIND:
            numbers = torch.stack((scales, middles - 8 * scales), -1)
            low, high = codes.view(out, -1, 2, BLOCK // 2).unbind(2)
            stored = low | high << 4
        else:
            if bool((self.zeros != 128).any()):
                raise ModelError("some groups of 8 bits have a zero point of their own")
            numbers, stored = scales.unsqueeze(-1), codes.view(out, -1, BLOCK) ^ 128
        halves = numbers.to(torch.float16)
        off = (halves.float() - numbers).abs() > HALF_ROUNDING * numbers.abs()
        if bool((off | ~halves.isfinite()).any()):
            raise ModelError("float16 does not hold some scales of its groups")
        of_block = halves.repeat_interleave(inputs // BLOCK // scales.shape[1], 1)
        factors = of_block.contiguous().view(torch.uint8).view(out, inputs // BLOCK, -1)
        return BlockWeights(torch.cat((factors, stored), -1).flatten(1), self.kind)


@dataclass(frozen=True, slots=True)
class Packing(MatrixPacking):
    """How the matrices of a checkpoint folder are packed.

    Attributes:
        bits: of a weight.
        group: inputs that share a scale; None: all inputs.
        reordered: groups are not of consecutive inputs (act-order).
        plus: added to a stored zero point.
        symmetric: no zero point differs from the middle of the codes; None: nothing says so.
        whole: codes are signed bytes instead of words of several.
    """

    path: Path
    method: str
    bits: int
    group: int | None
    reordered: bool = False
    plus: int = 0
    symmetric: bool | None = False
    whole: bool = False

    @property
    def format(self) -> str:  # type: ignore[override]
        return _KEPT.get(self.bits, _KEPT[4])[0]

    @property
    def kind(self) -> str:  # type: ignore[override]
        return _KEPT.get(self.bits, _KEPT[4])[1]

    @property
    def suffix(self) -> str:  # type: ignore[override]
        if self.method != COMPRESSED:
            return ".qweight"
        return WEIGHT if self.whole else ".weight_packed"

    @property
    def _per_word(self) -> int:
        return 1 if self.whole else WORD // self.bits

    def matrices(self, tensors: Mapping[str, Tensor]) -> list[str]:
        found = MatrixPacking.matrices(self, tensors)  # a dataclass with slots has no super()
        return [n for n in found if not self.whole or tensors[n + self.suffix].dtype == "I8"]

    @property
    def units(self) -> Units:
        group = 1 if self.reordered else self.group or (BLOCK if self.bits == 8 else 1)
        per_word = self._per_word
        return Units(math.lcm(per_word, INT4_OUT_MULTIPLE), math.lcm(per_word, group))

    def keeps(self, name: str, shape: tuple[int, ...]) -> bool:
        out, inputs = shape
        group = self.group or inputs
        if self.reordered or inputs % group or group % BLOCK:
            return False
        if self.bits == 8:
            return bool(self.symmetric)
        return self.bits == 4 and self.group in INT4_GROUP_SIZES and out % INT4_OUT_MULTIPLE == 0

    def kept_bytes(self, name: str, tensors: Mapping[str, Tensor]) -> int:
        return int(math.prod(self.shape(name, tensors)) * _KEPT[self.bits][2])

    def shape(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        codes, per_word = tensors[name + self.suffix].shape, self._per_word
        if len(codes) != 2:
            raise self.unfit(f"{name}{self.suffix} is no matrix")
        out, inputs = codes if self.method == COMPRESSED else codes[::-1]
        if self.method == AWQ:
            out *= per_word
        else:
            inputs *= per_word
        group = self.group or inputs
        groups, words = -(-inputs // group), -(-out // per_word)
        expected = {".scales": (groups, out), ".qzeros": (groups, words)}
        if self.method == COMPRESSED:
            expected = {".weight_scale": (out, groups), ZEROS: (words, groups)}
        for part, shape in expected.items():
            found = tensors.get(name + part)
            if found is None and part != ZEROS:
                raise self.unfit(f"{name}{part} is missing")
            if found is not None and found.shape != shape:
                wrong = f"{list(found.shape)}, but must be {list(shape)} for groups of {group}"
                raise self.unfit(f"{name}{part} is {wrong}")
        return out, inputs

    def read(self, name: str, files: StoredTensors, part: Part = WHOLE) -> GroupedWeights:
        import torch

        rows, columns = part
        words, of_rows = per(columns, self._per_word), per(rows, self._per_word)
        order = self._order(name, files, columns)
        # With an order of their own, the columns may be of any groups.
        groups = per(columns, self.group) if order is None else slice(None)
        if self.method == COMPRESSED:
            scales = files.read(name + ".weight_scale", rows, groups)
            codes = self._codes(files.read(name + self.suffix, rows, words), 1)
            zeros = torch.full(scales.shape, 1 << (self.bits - 1), dtype=torch.uint8)
            if (packed := files.read(name + ZEROS, of_rows, groups)) is not None:
                zeros = self._codes(packed, 0)[: len(scales)]
        else:
            scales = files.read(name + ".scales", groups, rows).T
            packed = files.read(name + ".qzeros", groups, of_rows)
            index, dim = ((columns, of_rows), 1) if self.method == AWQ else ((words, rows), 0)
            codes = self._codes(files.read(name + self.suffix, *index), dim).T
            zeros = self._codes(packed, 1).T[: len(codes)]
        inputs = codes.shape[1]
        if order is not None:
            if len(order) != inputs or int(order.max()) >= scales.shape[1]:
                raise ModelError(
                    f"the order of the inputs of {name} names groups that do not exist; fetch the "
                    "checkpoint again"
                )
        elif inputs % scales.shape[1]:  # the last group is smaller
            order = torch.arange(inputs) // (self.group or inputs)
        plus, middle = self.plus, 1 << (self.bits - 1)
        if self.method == GPTQ and self.symmetric is not False:
            # Those of version 2 may be labelled as version 1, and the reverse.
            plus = next((p for p in (0, 1) if bool((zeros == middle - p).all())), plus)
        zeros = zeros.to(torch.int16) + plus  # not wrapped: may be 16 for 4 bits
        codes, scales, zeros = (each.contiguous() for each in (codes, scales, zeros))
        return GroupedWeights(codes, scales, zeros, order, self.kind)

    def _order(self, name: str, files: StoredTensors, columns: slice) -> torch.Tensor | None:
        """The group of each of these inputs; None: they are in order."""
        import torch

        suffix = ".weight_g_idx" if self.method == COMPRESSED else ".g_idx"
        order = files.read(name + suffix, columns)
        if order is None or bool((order < 0).any()):  # -1: none (compressed-tensors)
            return None
        first = columns.start or 0
        in_order = (first + torch.arange(len(order))) // (self.group or first + len(order))
        return None if torch.equal(order.long(), in_order) else order.long()

    def _codes(self, stored: torch.Tensor, dim: int) -> torch.Tensor:
        """The codes, uint8, in words along `dim`, or in bytes."""
        import torch

        if self.whole:
            return stored.view(torch.uint8) ^ 128
        places = AWQ_ORDER if self.method == AWQ else range(WORD // self.bits)
        words = stored.movedim(dim, -1)
        codes = torch.empty((*words.shape, len(places)), dtype=torch.uint8)
        for i, place in enumerate(places):
            codes[..., i] = (words >> (place * self.bits)) & ((1 << self.bits) - 1)
        return codes.flatten(-2).movedim(-1, dim)


def packing(path: Path, config: Mapping[str, Any]) -> Packing:
    """The packing by the `quantization_config` of config.json. Raises Unreadable, ValueError."""
    make = {AWQ: _awq, GPTQ: _gptq, COMPRESSED: _compressed}[config["quant_method"]]
    found = make(path, config)
    if found.group is not None and found.group < 1:
        raise ValueError(f"groups of {found.group} weights")
    return found


def _awq(path: Path, config: Mapping[str, Any]) -> Packing:
    bits = _whole(config, "bits", config.get("w_bit", 4))
    version = str(config.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise ValueError(f"{bits} bits packed as {version!r}, where only 4 bits as 'gemm' are read")
    return Packing(path, AWQ, bits, _group(config, config.get("q_group_size", 128)))


def _gptq(path: Path, config: Mapping[str, Any]) -> Packing:
    bits = _whole(config, "bits", 4)
    form = str(config.get("checkpoint_format") or "gptq")
    if bits not in (2, 4, 8):
        raise ValueError(f"{bits} bits, where 2, 4 and 8 are read")
    if form not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
        raise ValueError(f"its format is {form!r}, where 'gptq' and 'gptq_v2' are read")
    if config.get("dynamic"):
        raise ValueError("its matrices have different numbers of bits ('dynamic')")
    return Packing(
        path,
        GPTQ,
        bits,
        _group(config, 128),
        bool(config.get("desc_act")),
        plus=form == "gptq",  # which stores zero points minus one
        symmetric=None if config.get("sym") is None else bool(config["sym"]),
    )


def _compressed(path: Path, config: Mapping[str, Any]) -> Packing:
    weights = weight_groups(config)
    groups = config["config_groups"].values()
    forms = {str(each.get("format") or config.get("format")) for each in groups}
    if len(forms) > 1:
        raise ValueError(f"its formats are {', '.join(sorted(forms))}")
    if config.get("transform_config"):
        raise ValueError("its weights are transformed ('transform_config')")
    widths = {(_whole(each, "num_bits", 8), _group(each, -1)) for each in weights}
    strategies = {str(each.get("strategy")) for each in weights}
    if len(widths) > 1 or len(strategies) > 1:
        raise ValueError("its matrices have different numbers of bits, or groups")
    (form,), ((bits, group),), (strategy,) = forms, widths, strategies
    if form not in (PACKED, *NOT_PACKED):
        raise ValueError(f"its format is {form!r}, where {PACKED!r} is read")
    if bits not in (2, 4, 8) or strategy not in ("group", "channel"):
        raise ValueError(f"{bits} bits by {strategy}")
    return Packing(
        path,
        COMPRESSED,
        8 if form in NOT_PACKED else bits,
        group if strategy == "group" else None,
        any(each.get("actorder") in ("group", True) for each in weights),
        symmetric=all(each.get("symmetric") is not False for each in weights),
        whole=form in NOT_PACKED,
    )


def _whole(config: Mapping[str, Any], name: str, default: Any) -> int:
    value = config.get(name)
    return typed(name, default if value is None else value, int)


def _group(config: Mapping[str, Any], default: Any) -> int | None:
    size = _whole(config, "group_size", default)
    return None if size == -1 else size
