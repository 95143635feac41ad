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

from pipespec.engine.formats.lazy import WHOLE, Part, Units, per
from pipespec.engine.formats.matrix_packing import (
    BLOCK,
    GROUPED_KIND,
    WIDE_KIND,
    MatrixPacking,
    unfit,
    unsupported,
)
from pipespec.engine.formats.safetensors_headers import Tensor
from pipespec.engine.formats.stored import StoredTensors
from pipespec.errors import ModelError
from pipespec.system.validation import Unreadable, typed

if TYPE_CHECKING:  # headers are read without them
    import torch

    from pipespec.engine.formats.groups import GroupedWeights

# The formats of integers of 4 and 8 bits in memory, the kinds of ggml's blocks that they become,
# and bytes of a weight.
PACKED_INT4, PACKED_INT8 = "int4", "integers"
_KEPT = {4: (PACKED_INT4, GROUPED_KIND, 20 / 32), 8: (PACKED_INT8, WIDE_KIND, 34 / 32)}
# Group sizes that the kernel for packed 4-bit weights supports, and the divisor of `out`.
INT4_GROUP_SIZES = (32, 64, 128)
INT4_OUT_MULTIPLE = 16
AWQ, GPTQ, COMPRESSED = "awq", "gptq", "compressed-tensors"
WORD = 32  # bits of the integers into which codes are packed
# The place in a word of each of eight neighbouring columns in AWQ.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
PACKED = "pack-quantized"
# Formats of compressed-tensors that store each integer in a byte of its own.
NOT_PACKED = ("naive-quantized", "int-quantized")


@dataclass(frozen=True, slots=True)
class Packing(MatrixPacking):
    """How the matrices of a checkpoint folder are packed.

    Attributes:
        bits: of a weight.
        group: inputs that share a scale; None: all inputs.
        reordered: groups are not of consecutive inputs (act-order).
        suffix: of the name of the tensor with the codes of a matrix.
        parts: suffixes of the other tensors that a matrix must have.
        plus: added to a stored zero point.
        symmetric: no zero point differs from the middle of the codes.
        whole: codes are signed bytes instead of words of several.
    """

    path: Path
    method: str
    bits: int
    group: int | None
    reordered: bool
    suffix: str
    parts: tuple[str, ...]
    plus: int = 0
    symmetric: bool = False
    whole: bool = False

    @property
    def format(self) -> str:  # type: ignore[override]
        return _KEPT.get(self.bits, _KEPT[4])[0]

    @property
    def kind(self) -> str:  # type: ignore[override]
        return _KEPT.get(self.bits, _KEPT[4])[1]

    @property
    def _per_word(self) -> int:
        return 1 if self.whole else WORD // self.bits

    def matrices(self, tensors: Mapping[str, Tensor]) -> list[str]:
        found = MatrixPacking.matrices(self, tensors)  # a dataclass with slots has no super()
        return [n for n in found if not self.whole or tensors[n + self.suffix].dtype == "I8"]

    @property
    def units(self) -> Units:
        per_word = self._per_word
        return Units(
            math.lcm(per_word, INT4_OUT_MULTIPLE),
            math.lcm(
                per_word, 1 if self.reordered else self.group or (BLOCK if self.bits == 8 else 1)
            ),
        )

    def keeps(self, name: str, shape: tuple[int, ...]) -> bool:
        if len(shape) != 2:
            return False
        out, inputs = shape
        group = self.group or inputs
        if self.reordered or inputs % group or group % BLOCK:
            return False
        if self.bits == 8:
            return self.symmetric
        return self.bits == 4 and self.group in INT4_GROUP_SIZES and out % INT4_OUT_MULTIPLE == 0

    def kept_bytes(self, name: str, tensors: Mapping[str, Tensor]) -> int:
        """Bytes of a matrix that stays packed, as on a CPU: one or two numbers of 16 bits for each
        block; a GPU has them for each group."""
        return int(math.prod(self.shape(name, tensors)) * _KEPT[self.bits][2])

    def shape(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        try:
            return self._shape(name, tensors)
        except ValueError as error:
            raise unfit(self.path, error) from error

    def _shape(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        codes = tensors[name + self.suffix].shape
        per_word = self._per_word
        if len(codes) != 2:
            raise ValueError(f"{name}{self.suffix} is no matrix")
        if self.method == AWQ:
            out, inputs = codes[1] * per_word, codes[0]
        elif self.method == GPTQ:
            out, inputs = codes[1], codes[0] * per_word
        else:
            out, inputs = codes[0], codes[1] * per_word
        for part in self.parts:
            if name + part not in tensors:
                raise ValueError(f"{name}{part} is missing")
        groups = -(-inputs // (self.group or inputs))
        for part, expected in self._expected(out, groups).items():
            found = tensors.get(name + part)
            if found is not None and found.shape != expected:
                raise ValueError(
                    f"{name}{part} is {list(found.shape)}, but must be {list(expected)} for groups "
                    f"of {self.group or inputs}"
                )
        return out, inputs

    def _expected(self, out: int, groups: int) -> dict[str, tuple[int, int]]:
        per_word = self._per_word
        if self.method == COMPRESSED:
            words = (-(-out // per_word), groups)
            return {".weight_scale": (out, groups), ".weight_zero_point": words}
        return {".scales": (groups, out), ".qzeros": (groups, -(-out // per_word))}

    def read(self, name: str, files: StoredTensors, part: Part = WHOLE) -> GroupedWeights:
        import torch

        from pipespec.engine.formats.groups import GroupedWeights

        def need(suffix: str, *index: slice) -> torch.Tensor:
            found = files.read(name + suffix, *index)
            assert found is not None, "the headers contain it"
            return found

        rows, columns = part
        per_word = self._per_word
        words, of_rows = per(columns, per_word), per(rows, per_word)
        first = columns.start or 0
        ordered_by = ".weight_g_idx" if self.method == COMPRESSED else ".g_idx"
        order = files.read(name + ordered_by, columns)
        if order is not None:
            in_order = (first + torch.arange(len(order))) // (self.group or first + len(order))
            none = bool((order < 0).any())  # -1: none (compressed-tensors)
            order = None if none or torch.equal(order.long(), in_order) else order.long()
        # With an order of their own, the columns may be of any groups.
        groups = per(columns, self.group) if order is None else slice(None)
        if self.method == COMPRESSED:
            scales = need(".weight_scale", rows, groups)
            packed = files.read(name + ".weight_zero_point", of_rows, groups)
            if self.whole:
                codes = need(self.suffix, rows, words).view(torch.uint8) ^ 128
                packed = None if packed is None else packed.view(torch.uint8) ^ 128
            else:
                codes = unpack(need(self.suffix, rows, words), self.bits, 1)
                packed = None if packed is None else unpack(packed, self.bits, 0)[: len(scales)]
            middle = torch.full(scales.shape, 1 << (self.bits - 1), dtype=torch.uint8)
            zeros = middle if packed is None else packed
        else:
            scales = need(".scales", groups, rows).T
            packed = need(".qzeros", groups, of_rows)
            if self.method == AWQ:
                codes = unpack(need(self.suffix, columns, of_rows), self.bits, 1, AWQ_ORDER).T
                zeros = unpack(packed, self.bits, 1, AWQ_ORDER).T
            else:
                codes = unpack(need(self.suffix, words, rows), self.bits, 0).T
                zeros = unpack(packed, self.bits, 1)[:, : codes.shape[0]].T
        inputs = codes.shape[1]
        group_of = torch.arange(inputs) // (self.group or inputs)
        if order is not None:
            group_of = order
            if len(group_of) != inputs or int(group_of.max()) >= scales.shape[1]:
                raise ModelError(
                    f"the order of the inputs of {name} names groups that do not exist; fetch the "
                    "checkpoint again"
                )
            used = slice(int(group_of.min()), int(group_of.max()) + 1)
            scales, zeros, group_of = scales[:, used], zeros[:, used], group_of - used.start
        zeros = zeros.to(torch.int16) + self.plus  # not wrapped: may be 16 for 4 bits
        codes, scales, zeros = (each.contiguous() for each in (codes, scales, zeros))
        return GroupedWeights(codes, scales, zeros, group_of, self.kind)


def packing(path: Path, config: Mapping[str, Any]) -> Packing:
    """The packing by the `quantization_config` of config.json. Raises ModelError."""
    try:
        method = str(config.get("quant_method"))
        found = {AWQ: _awq, GPTQ: _gptq, COMPRESSED: _compressed}[method](path, config)
        if found.group is not None and found.group < 1:
            raise ValueError(f"groups of {found.group} weights")
    except (Unreadable, ValueError) as error:
        raise unsupported(path, method, error) from error
    return found


def _awq(path: Path, config: Mapping[str, Any]) -> Packing:
    bits = _whole(config, "bits", config.get("w_bit", 4))
    version = str(config.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise ValueError(f"{bits} bits packed as {version!r}, where only 4 bits as 'gemm' are read")
    group = _group(config, config.get("q_group_size", 128))
    return Packing(path, AWQ, bits, group, False, ".qweight", (".qzeros", ".scales"))


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
        ".qweight",
        (".qzeros", ".scales"),
        plus=form == "gptq",  # which stores zero points minus one
        symmetric=config.get("sym") is True,
    )


def _compressed(path: Path, config: Mapping[str, Any]) -> Packing:
    groups = _object(config, "config_groups")
    for name in groups:
        _object(groups, name)
    weights = [_object(each, "weights") for each in groups.values()]
    forms = {str(each.get("format") or config.get("format")) for each in groups.values()}
    if len(weights) == 0 or len(forms) > 1:
        raise ValueError(f"its formats are {', '.join(sorted(forms)) or 'none'}")
    if config.get("transform_config"):
        raise ValueError("its weights are transformed ('transform_config')")
    widths = {_whole(each, "num_bits", 8) for each in weights}
    sizes = {_group(each, -1) for each in weights}
    if len(widths) > 1 or len(sizes) > 1:
        raise ValueError("its matrices have different numbers of bits, or groups")
    strategies = {str(each.get("strategy")) for each in weights}
    form, bits = forms.pop(), widths.pop()
    if form not in (PACKED, *NOT_PACKED):
        raise ValueError(f"its format is {form!r}, where {PACKED!r} is read")
    whole = form in NOT_PACKED
    if bits not in (2, 4, 8) or strategies - {"group", "channel"}:
        raise ValueError(f"{bits} bits by {', '.join(sorted(strategies))}")
    return Packing(
        path,
        COMPRESSED,
        8 if whole else bits,
        sizes.pop() if strategies == {"group"} else None,
        any(each.get("actorder") in ("group", True) for each in weights),
        ".weight" if whole else ".weight_packed",
        (".weight_scale",),
        symmetric=all(each.get("symmetric") is not False for each in weights),
        whole=whole,
    )


def _object(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name)
    if not isinstance(value, dict):
        raise ValueError(f"{name} is no object")
    return value


def _whole(config: Mapping[str, Any], name: str, default: Any) -> int:
    value = config.get(name)
    return typed(name, default if value is None else value, int)


def _group(config: Mapping[str, Any], default: Any) -> int | None:
    size = _whole(config, "group_size", default)
    return None if size == -1 else size


def unpack(
    words: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Unpack the codes in words of 32 bits, the lowest first, to uint8, along `dim`.

    `order`: the place of each code in its word, if not in order.
    """
    import torch

    places = order or range(WORD // bits)
    words = words.movedim(dim, -1)
    codes = torch.empty((*words.shape, len(places)), dtype=torch.uint8)
    for i, place in enumerate(places):
        codes[..., i] = (words >> (place * bits)) & ((1 << bits) - 1)
    return codes.flatten(-2).movedim(-1, dim)
