"""Products whose rows do not depend on the other rows of their batch.

Libraries choose another kernel, and so another order of sums, for another number of rows. Here a
batch is always computed in blocks of the same number of rows, of which the last is filled up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ROWS = 16
# The names of modules that choose the experts of rows; they return tensors `[rows, ...]`.
_ROUTERS = ("gate", "router")


def blocks_of(rows: Tensor) -> tuple[Tensor, ...]:
    """`[rows, in]` as blocks `[ROWS, in]`, the last with rows of zeros at its end."""
    return functional.pad(rows, (0, 0, 0, -len(rows) % ROWS)).split(ROWS)


def block_product(block: Tensor, weights: Tensor) -> Tensor:
    """`functional.linear` of a block of rows. On a CPU the operands are swapped, as libraries lay
    out the second one anew in every product, and weights are many more."""
    if block.device.type == "cpu":
        return torch.mm(weights, block.t()).t()
    return functional.linear(block, weights)


def linear_in_blocks(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`functional.linear`, computed in blocks of rows: `[..., in]` -> `[..., out]`."""
    rows = x.reshape(math.prod(x.shape[:-1]), weight.shape[1])  # which may be 0
    product = torch.cat([functional.linear(block, weight, bias) for block in blocks_of(rows)])
    return product[: len(rows)].view(*x.shape[:-1], len(weight))


class RowBlockLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name in torch
        return linear_in_blocks(input, self.weight, self.bias)


def make_batch_invariant(model: nn.Module) -> None:
    """Let the plain linear layers of a model, and what chooses experts, compute blocks of rows."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            module.__class__ = RowBlockLinear
        elif name.rpartition(".")[2] in _ROUTERS:
            setattr(module, "forward", partial(_in_blocks, module.forward))  # noqa: B010


def _in_blocks(forward: Callable[..., Any], hidden: Tensor, *rest: Any, **more: Any) -> Any:
    """What `forward` returns of `[..., hidden]`, tensors `[rows, ...]`, computed in blocks."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    found = [forward(block, *rest, **more) for block in blocks_of(rows)]
    if isinstance(found[0], Tensor):
        return torch.cat(found)[: len(rows)]
    return tuple(torch.cat(parts)[: len(rows)] for parts in zip(*found, strict=True))
