"""Products whose rows do not depend on the other rows of their batch.

Libraries choose another kernel, and so another order of sums, for another number of rows. Here a
batch is always computed in blocks of the same number of rows, of which the last is filled up, or of
two or four times as many where a row has the same bits in these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipespec.engine.fill_in_parts import row_parts

ROWS = 16
# Rows of a block where there are more than ROWS: the first number with which this machine computes
# a row with the same bits. One is enough, as libraries keep code for each.
WIDER = (64, 32)
# The names of modules that choose the experts of rows; they return tensors `[rows, ...]`.
_ROUTERS = ("gate", "router")
# Whether a block has the bits of its parts, by its rows, the shape and type of the weights and the
# number of threads.
_agreeing: dict[tuple[object, ...], bool] = {}


def blocks_of(rows: Tensor, size: int = ROWS) -> tuple[Tensor, ...]:
    """`[rows, in]` as blocks `[size, in]`, the last with rows of zeros at its end."""
    return functional.pad(rows, (0, 0, 0, -len(rows) % size)).split(size)


def block_product(block: Tensor, weights: Tensor) -> Tensor:
    """`functional.linear` of a block of rows. On a CPU the operands are swapped, as libraries lay
    out the second one anew in every product, and weights are many more."""
    if block.device.type == "cpu":
        return torch.mm(weights, block.t()).t()
    return functional.linear(block, weights)


def widest_block(rows: int, memory: Collection[Tensor]) -> int:
    """Of how many rows the blocks of a batch can be, ROWS or one of WIDER, to be multiplied by
    `block_product` with weights of the shapes `[out, in]`, the type and the device of `memory`,
    whose contents are lost.

    Tested on a CPU alone, when a shape is first used.
    """
    if rows <= ROWS:
        return ROWS
    wider = (size for size in WIDER if all(_agrees(size, each) for each in memory))
    return next(wider, ROWS)


def _agrees(size: int, weights: Tensor) -> bool:
    """Whether a block of `size` rows has the bits of its parts of ROWS rows."""
    if weights.device.type != "cpu":
        return False
    # Libraries may divide sums among threads.
    key = (size, *weights.shape, weights.dtype, torch.get_num_threads())
    if key not in _agreeing:
        _agreeing[key] = _test_size(size, weights)
    return _agreeing[key]


def _test_size(size: int, weights: Tensor) -> bool:
    """The same, tested with other weights in their place, as a test must not take more memory.

    The exact products are zero, so the results are nothing but the rounding of sums, which differs
    if these are in another order.
    """
    random = torch.Generator().manual_seed(0)
    inputs = weights.shape[1]
    half = inputs // 2
    order = torch.randperm(half, generator=random)
    rows = weights.new_empty(size, inputs)
    for matrix, sign in ((rows, -1), (weights, 1)):
        for some in row_parts((len(matrix), inputs)):
            part = matrix[some]
            part[:, :half].normal_(generator=random)
            part[:, half : 2 * half] = part[:, order] * sign
            part[:, 2 * half :] = 0
    parts = [block_product(part, weights) for part in rows.split(ROWS)]
    return torch.equal(block_product(rows, weights), torch.cat(parts))


def linear_in_blocks(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`functional.linear`, computed in blocks of rows: `[..., in]` -> `[..., out]`."""
    rows = x.reshape(math.prod(x.shape[:-1]), weight.shape[1])  # which may be 0
    product = torch.cat([functional.linear(block, weight, bias) for block in blocks_of(rows)])
    return product[: len(rows)].view(*x.shape[:-1], len(weight))


class RowBlockLinear(nn.Linear):
    """A linear layer that computes blocks of rows."""

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
