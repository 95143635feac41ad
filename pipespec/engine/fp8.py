"""Layers whose weights stay in 8-bit floats and are dequantised as they are used.

A few rows of weights at a time become numbers of the model's type, so that no more than these are
in memory, and are multiplied with blocks of rows of the batch (`pipespec.engine.row_blocks`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipespec.engine.formats.fp8 import Fp8Weights
from pipespec.engine.row_blocks import ROWS, blocks_of
from pipespec.errors import ModelError

# Weights that are dequantised at a time: on a CPU as many as its caches hold.
CHUNK = {"cpu": 1 << 18, "cuda": 1 << 24}
# The matrix of an expert in the files: its layer, its number, its name.
_EXPERT = re.compile(r"(?:^|\.)layers\.(\d+)\..*\bexperts\.(\d+)\.(\w+)$")
# The names in the files of the parts of each stack of Transformers.
_STACKS = {
    "gate_up_proj": (("gate_proj", "w1"), ("up_proj", "w3")),
    "down_proj": (("down_proj", "w2"),),
}
PLAIN = "set model.keep_quantized=no"


class Fp8Linear(nn.Module):
    """A linear layer with weights `[out, in]` in FP8, the matrix `source` of the files.

    It has no weights until `fill`; `bias` is loaded like that of any layer.
    """

    codes: Tensor
    scales: Tensor

    def __init__(self, source: str, out_features: int, in_features: int, bias: Any = None):
        super().__init__()
        self.source = source
        self.out_features, self.in_features = out_features, in_features
        self.bias = bias
        self.height = self.width = 0
        self.register_buffer("codes", None)
        self.register_buffer("scales", None)

    def fill(self, weights: Fp8Weights, device: torch.device) -> None:
        """Set the weights. Raises ModelError if they do not fit."""
        shape = (self.out_features, self.in_features)
        if tuple(weights.codes.shape) != shape:
            raise ModelError(f"it is {list(weights.codes.shape)}, but must be {list(shape)}")
        self.height, self.width = weights.height, weights.width
        self.codes, self.scales = weights.codes.to(device), weights.scales.to(device)
        if self.codes.data_ptr() % 2:  # it is read in pairs
            self.codes = self.codes.clone()

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        rows = x.reshape(-1, self.in_features)
        blocks = blocks_of(rows)
        y = x.new_empty(len(blocks) * ROWS, self.out_features)
        step = self._step(x.device.type)
        for start in range(0, self.out_features, step):
            weights = self.dequantised(start, min(start + step, self.out_features), x.dtype)
            for i, block in enumerate(blocks):
                product = functional.linear(block, weights)
                y[i * ROWS : (i + 1) * ROWS, start : start + step] = product
        y = y[: len(rows)].view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def dequantised(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """These rows of the weights, `[stop - start, in]`."""
        if dtype == torch.float16:  # which does not hold small scales
            return self.dequantised(start, stop, torch.float32).to(dtype)
        weights = _decoded(self.codes[start:stop], dtype)
        scales = self.scales.to(dtype)
        if len(scales) > 1:
            scales = scales[torch.arange(start, stop, device=scales.device) // self.height]
        if scales.shape[1] == 1:
            return weights.mul_(scales)
        if self.in_features % self.width:
            return weights.mul_(scales.repeat_interleave(self.width, 1)[:, : self.in_features])
        by_block = weights.view(len(weights), -1, self.width)
        by_block.mul_(scales.unsqueeze(-1))
        return weights

    def _step(self, device: str) -> int:
        """How many rows of the weights are dequantised at a time."""
        rows = max(CHUNK[device] // self.in_features, 1)
        return -(-rows // ROWS) * ROWS


class Fp8Stack(nn.Module):
    """The matrices of the experts of a layer, in place of a parameter `[experts, out, in]` whose
    rows may be those of several matrices of the files."""

    def __init__(self, experts: Iterable[Sequence[Fp8Linear]]):
        super().__init__()
        self.experts = nn.ModuleList(nn.ModuleList(parts) for parts in experts)

    def __getitem__(self, expert: int | Tensor) -> ExpertMatrix:
        return ExpertMatrix(self.experts[int(expert)].children())


class ExpertMatrix:
    """One matrix of a stack, as Transformers' code of a mixture takes it: for
    `torch.nn.functional.linear`."""

    def __init__(self, parts: Iterable[nn.Module]):
        self.parts = list(parts)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute `linear(rows, matrix)`."""
        if function is not functional.linear or len(args) != 2 or kwargs:
            return NotImplemented
        rows, matrix = args
        return torch.cat([part(rows) for part in matrix.parts], -1)


@cache
def _pairs(dtype: torch.dtype) -> Tensor:
    """The two numbers of each pair of codes, as one integer, by the pair's 16 bits."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)
    pairs = torch.arange(1 << 16)
    both = torch.stack((numbers[pairs & 255], numbers[pairs >> 8]), -1)
    return both.view(torch.int64 if dtype == torch.float32 else torch.int32).flatten()


def _decoded(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of codes `[rows, in]`, without their scales."""
    if codes.device.type != "cpu":
        return codes.to(dtype)
    # Several times as fast as PyTorch's own conversion, one code after the other.
    pairs = codes.view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)
    found = _pairs(dtype).index_select(0, pairs.flatten())
    return found.view(dtype).view(codes.shape)


def replace_experts(model: nn.Module, names: Iterable[str]) -> None:
    """Let the mixtures of a model have their experts, of these names in the files, in FP8. Raises
    ModelError if a mixture is of another form."""
    by_layer: dict[int, dict[tuple[int, str], str]] = {}
    for name in names:
        if (found := _EXPERT.search(name)) is not None:
            by_layer.setdefault(int(found[1]), {})[int(found[2]), found[3]] = name
    for path, module in list(model.named_modules()):
        found = re.search(r"(?:^|\.)layers\.(\d+)\..*\bexperts$", path)
        held = by_layer.get(int(found[1])) if found else None
        if held:
            _replace_stacks(module, held, path)


def _replace_stacks(module: nn.Module, held: Mapping[tuple[int, str], str], path: str) -> None:
    for stack, of_parts in _STACKS.items():
        plain = getattr(module, stack, None)
        if not isinstance(plain, Tensor) or plain.ndim != 3 or getattr(module, "has_bias", False):
            raise ModelError(f"the experts {path} have no place for matrices in FP8; {PLAIN}")
        count, out, inputs = plain.shape
        delattr(module, stack)
        experts = []
        for expert in range(count):
            sources = [held[expert, _name(held, expert, names, path)] for names in of_parts]
            parts = [Fp8Linear(source, out // len(sources), inputs) for source in sources]
            experts.append(parts)
        setattr(module, stack, Fp8Stack(experts))
    # Transformers' own loop over the experts that rows have chosen.
    config: Any = copy.copy(module.config)
    config._experts_implementation = "eager"
    module.config = config
    module._is_hf_initialized = True  # type: ignore[assignment]


def _name(held: Mapping[tuple[int, str], str], expert: int, names: Sequence[str], path: str) -> str:
    """Which of these names the files have."""
    for name in names:
        if (expert, name) in held:
            return name
    raise ModelError(f"{path}.{expert} has no {names[0]} in FP8; {PLAIN}")
