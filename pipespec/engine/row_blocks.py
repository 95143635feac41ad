"""Products whose rows do not depend on the other rows of their batch.

Libraries choose another kernel, and so another order of sums, for another number of rows. Here a
batch is always computed in blocks of the same number of rows, of which the last is filled up, or of
twice as many where a row has the same bits in these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ROWS = 16
# Rows of a block where there are more, if this machine computes a row of it with the same bits.
WIDE = 32
# The names of modules that choose the experts of rows; they return tensors `[rows, ...]`.
_ROUTERS = ("gate", "router")


def blocks_of(rows: Tensor, size: int = ROWS) -> tuple[Tensor, ...]:
    """`[rows, in]` as blocks `[size, in]`, the last with rows of zeros at its end."""
    return functional.pad(rows, (0, 0, 0, -len(rows) % size)).split(size)


def widest_block(rows: int, shapes: Iterable[tuple[int, int]], like: Tensor) -> int:
    """Of how many rows the blocks of a batch can be, ROWS or WIDE, to be multiplied with weights of
    these shapes `[out, in]`, in the type and on the device of `like`.

    Tested on a CPU alone, when a shape is first used.
    """
    if like.device.type != "cpu" or rows <= ROWS:
        return ROWS
    threads = torch.get_num_threads()
    return WIDE if all(_wide_agrees(*shape, like.dtype, threads) for shape in shapes) else ROWS


@cache
def _wide_agrees(
    out: int,
    inputs: int,
    dtype: torch.dtype,
    threads: int,  # noqa: ARG001 - libraries may divide sums among them
) -> bool:
    """Whether a block of WIDE rows has the bits of its parts of ROWS rows.

    The exact products are zero, so the results are nothing but the rounding of sums, which differs
    if these are in another order.
    """
    random = torch.Generator().manual_seed(0)
    half = inputs // 2
    order = torch.randperm(half, generator=random)
    rows, weights = torch.zeros(WIDE, inputs, dtype=dtype), torch.zeros(out, inputs, dtype=dtype)
    for matrix, sign in ((rows, -1), (weights, 1)):
        matrix[:, :half].normal_(generator=random)
        matrix[:, half : 2 * half] = matrix[:, order] * sign
    parts = [functional.linear(part, weights) for part in rows.split(ROWS)]
    return torch.equal(functional.linear(rows, weights), torch.cat(parts))


def linear_in_blocks(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`functional.linear`, computed in blocks of rows: `[..., in]` -> `[..., out]`."""
    rows = x.reshape(-1, weight.shape[1])
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
