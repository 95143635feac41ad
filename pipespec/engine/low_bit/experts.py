"""The experts of a mixture as layers whose weights stay in the few bits of their files, and the
loop over the experts that rows chose.

Transformers' own loop waits for the device several times for each expert; this one waits once in a
layer, for how many rows chose each.
"""

from __future__ import annotations

import copy
import ctypes
import re
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipespec.engine.formats.stored import WHOLE, Part, require_shape
from pipespec.engine.ggml import compute, library
from pipespec.engine.ggml.compute import computer, matrix
from pipespec.engine.low_bit.kept_linear import as_ggml, linear_in_blocks
from pipespec.system.device_copy import to_host
from pipespec.system.silence_warnings import silence_warnings

with silence_warnings():
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

# The names in the files of the parts of each stack of Transformers.
STACKS = {
    "gate_up_proj": (("gate_proj", "w1"), ("up_proj", "w3")),
    "down_proj": (("down_proj", "w2"),),
}
MIXTURE = re.compile(r"(?:^|\.)layers\.(\d+)\..*\bexperts$")
PLAIN = "set model.keep_quantized=no"
_LOOP, _TRANSFORMERS = "pipespec", "eager"
# The functions by which Transformers' code multiplies rows with a matrix of an expert.
_PRODUCTS = (functional.linear, torch.Tensor.__matmul__, torch.Tensor.matmul, torch.matmul)


class ExpertMatrix:
    """One matrix of a stack, as Transformers' code of a mixture takes it: for
    `torch.nn.functional.linear`, or, where stacks are transposed, for `rows @ matrix`."""

    def __init__(self, parts: Iterable[Callable[[Tensor], Tensor]]):
        self.parts = list(parts)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function not in _PRODUCTS or len(args) != 2 or kwargs:
            return NotImplemented
        rows, matrix = args
        return torch.cat([part(rows) for part in matrix.parts], -1)


class ExpertStack(nn.Module):
    """The matrices of the experts of a layer, in place of a parameter `[experts, out, in]` whose
    rows may be those of several matrices of the files."""

    def __init__(self, experts: Iterable[Sequence[nn.Module]]):
        super().__init__()
        self.experts = nn.ModuleList(nn.ModuleList(parts) for parts in experts)

    def __getitem__(self, expert: int | Tensor) -> ExpertMatrix:
        return ExpertMatrix(self.experts[int(expert)].children())


class RowBlockStack(nn.Module):
    """A plain stack `[experts, out, in]`; multiplied in blocks of rows."""

    def __init__(self, plain: nn.Parameter):
        super().__init__()
        self.plain = plain

    def __getitem__(self, expert: int | Tensor) -> ExpertMatrix:
        return ExpertMatrix([partial(linear_in_blocks, weight=self.plain[int(expert)])])


class GgmlExperts(nn.Module):
    """The same multiplied by ggml: `sources[expert]` are the names of the matrices, each
    `[out_features, in_features]`. A row of a product does not depend on the rest of its batch."""

    part: Part

    def __init__(self, sources: Sequence[Sequence[str]], out_features: int, in_features: int):
        super().__init__()
        self.sources, self.source, self.part = sources, sources[0][0], WHOLE
        self.out_features, self.in_features = out_features, in_features
        self.weights: list[compute.GgmlTensor] = []
        self.turns = 1  # how many of the weights have the rows of one matrix in turns

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.weights)

    def fill(self, weights: Sequence[Sequence[Any]], device: torch.device) -> None:
        """Set the weights of each expert, without a copy of those that are one after the other in
        ggml's types. Raises ModelError if they do not fit."""
        found_library, count = library.load(), len(weights)
        assert found_library is not None and device.type == "cpu"
        for matrices in zip(*weights, strict=True):
            for each in matrices:
                require_shape(self, each.shape)
            found = [as_ggml(each) for each in matrices]
            self.turns = len(found[0].parts)
            shape = count, self.out_features // self.turns, self.in_features
            for parts in zip(*(each.parts for each in found), strict=True):
                self.weights.append(matrix(found_library, found[0].kind, stacked(parts), shape))

    def __getitem__(self, expert: int | Tensor) -> ExpertMatrix:
        number = torch.tensor([[int(expert)]])

        def product(rows: Tensor) -> Tensor:
            return self.product(rows.unsqueeze(1), number.expand(len(rows), 1)).squeeze(1)

        return ExpertMatrix([product])

    def product(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """`[rows, k or 1, in]` and the chosen experts `[rows, k]` -> `[rows, k, out]` of all
        matrices together, in the type of the rows."""
        inputs, experts = rows.float().numpy(), chosen.to(torch.int32).numpy()
        found = [
            torch.from_numpy(compute.expert_product(computer(), each, inputs, experts))
            for each in self.weights
        ]
        y = torch.cat(found, -1) if self.turns == 1 else torch.stack(found, -1).flatten(-2)
        return y.to(rows.dtype)


def stacked(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays of one shape as one, uint8; without a copy if they are one after the other."""
    first, size = parts[0].ctypes.data, parts[0].nbytes
    if all(
        each.flags.c_contiguous and each.ctypes.data == first + i * size
        for i, each in enumerate(parts)
    ):
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * (size * len(parts))).from_address(first))
        weakref.finalize(memory, list, parts)  # keeps them alive as long
        return memory
    return np.stack(parts)


def make_experts_batch_invariant(model: nn.Module) -> None:
    """Let the experts of a model that are plain compute blocks of rows; stacks that Transformers
    has transposed stay as they are."""
    for path, module in list(model.named_modules()):
        transposed = getattr(module, "is_transposed", False)
        if MIXTURE.search(path) is None or transposed or getattr(module, "has_bias", False):
            continue
        for stack in STACKS:
            plain = getattr(module, stack, None)
            if isinstance(plain, nn.Parameter) and plain.ndim == 3:
                delattr(module, stack)
                setattr(module, stack, RowBlockStack(plain))
                use_loop(module)


# --- the loop ---------------------------------------------------------------------------------


def use_loop(module: Any) -> None:
    """Let a mixture's module compute its experts in this loop, or in Transformers' own where it
    computes them in another way than by `_apply_gate` between two products."""
    known = getattr(module, "has_gate", False) and not module.has_post_expert_norm
    if known:
        ALL_EXPERTS_FUNCTIONS.register(_LOOP, loop_over_experts)
    config: Any = copy.copy(module.config)
    config._experts_implementation = _LOOP if known else _TRANSFORMERS
    module.config = config
    module._is_hf_initialized = True


def loop_over_experts(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """`[rows, hidden]`, the experts of each row and their weights, `[rows, k]` -> `[rows, hidden]`;
    each row's experts are added by rising number."""
    if isinstance(module.gate_up_proj, GgmlExperts) and isinstance(module.down_proj, GgmlExperts):
        return _by_ggml(module, hidden_states, top_k_index, top_k_weights)
    chosen, order = top_k_index.flatten().sort(stable=True)
    numbers = torch.arange(module.num_experts, device=chosen.device)
    (ends,) = to_host(torch.searchsorted(chosen, numbers, right=True))
    rows = order // top_k_index.shape[-1]
    weights = top_k_weights.flatten().index_select(0, order).unsqueeze(-1)
    out = torch.zeros_like(hidden_states)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            mine = rows[start:end]
            found = _product(module, "gate_up_proj", expert, hidden_states.index_select(0, mine))
            found = _product(module, "down_proj", expert, module._apply_gate(found))
            out.index_add_(0, mine, (found * weights[start:end]).to(out.dtype))
        start = end
    return out


def _by_ggml(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The same where ggml multiplies with all experts at once."""
    chosen, order = chosen.sort(-1)
    weights = (weights.gather(-1, order) * (chosen < module.num_experts)).unsqueeze(-1)
    chosen = chosen.clamp(max=module.num_experts - 1)

    def product(stack: str, rows: Tensor) -> Tensor:
        found: Tensor = getattr(module, stack).product(rows, chosen)
        return found + getattr(module, f"{stack}_bias")[chosen] if module.has_bias else found

    found = product("gate_up_proj", hidden.unsqueeze(1))
    found = product("down_proj", module._apply_gate(found)) * weights
    out = torch.zeros_like(hidden)
    for each in found.to(out.dtype).unbind(1):
        out += each
    return out


def _product(module: Any, stack: str, expert: int, rows: Tensor) -> Tensor:
    matrix = getattr(module, stack)[expert]
    found: Tensor = rows @ matrix if module.is_transposed else functional.linear(rows, matrix)
    return found + getattr(module, f"{stack}_bias")[expert] if module.has_bias else found
