"""Products of few rows with large weights on a CPU, in float32.

`nn.Linear` computes `x @ W.T`. With a few rows, BLAS libraries spend more time on packing the
weights for it than on the product; `W @ x.T` has the same value, and some read the weights once for
it. Which is faster depends on the library, the processor and the number of rows, so it is measured
on the weights of the slice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, nn

# The numbers of rows that are measured; one in between is computed as the next larger.
SIZES = (2, 4, 8, 16, 32)
# Weights that fit into caches are read fast in any order.
LEAST_BYTES = 64 << 20
# Only what is so many times as fast is worth another way.
CLEARLY = 1.05
TIMES = 3

# Calls what it is given, and returns how many seconds a call takes.
Stopwatch = Callable[[Callable[[], object]], float]


class FewRowsLinear(nn.Linear):
    """A linear layer that computes batches of the `swapped` sizes as `W @ x.T`."""

    swapped: frozenset[int]

    @classmethod
    def become(cls, layer: nn.Linear, swapped: Collection[int]) -> None:
        """Turn a plain linear layer into one of these, with the same weights."""
        layer.__class__ = cls
        setattr(layer, "swapped", frozenset(swapped))  # noqa: B010 - unknown to its first class

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name in torch
        rows = input.numel() // input.shape[-1]
        if rows < 2 or rows > SIZES[-1] or 1 << (rows - 1).bit_length() not in self.swapped:
            return super().forward(input)
        return swapped_product(input, self.weight, self.bias)


def swapped_product(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`nn.functional.linear` of `[..., in]` with its operands swapped, `[..., out]`."""
    product = torch.mm(weight, inputs.reshape(-1, inputs.shape[-1]).t()).t()
    if bias is not None:
        product = product + bias
    return product.reshape(*inputs.shape[:-1], len(weight)).contiguous()


def least_seconds(call: Callable[[], object]) -> float:
    """The least time of some calls, as others may use the machine."""
    took = []
    for _ in range(TIMES):
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
    return min(took)


def swap_where_faster(model: nn.Module, time_s: Stopwatch = least_seconds) -> tuple[int, ...]:
    """Let the linear layers of a model compute batches of some sizes as `W @ x.T`, where that is
    clearly faster; returns these sizes. Models of less than LEAST_BYTES are left alone."""
    layers = [each for each in model.modules() if type(each) is nn.Linear]
    if sum(each.weight.nbytes for each in layers) < LEAST_BYTES:
        return ()
    sizes = faster_sizes(_largest_alike(layers), time_s)
    for layer in layers if sizes else ():
        FewRowsLinear.become(layer, sizes)
    return tuple(sizes)


@torch.inference_mode()
def faster_sizes(layers: Sequence[nn.Linear], time_s: Stopwatch) -> Collection[int]:
    """The sizes of batches for which the swapped product of these layers is clearly faster."""

    def usual(inputs: Tensor) -> None:
        for layer in layers:
            layer(inputs)

    def swapped(inputs: Tensor) -> None:
        for layer in layers:
            swapped_product(inputs, layer.weight, layer.bias)

    found = []
    for rows in SIZES:
        inputs = torch.randn(rows, layers[0].in_features)
        if time_s(partial(usual, inputs)) > CLEARLY * time_s(partial(swapped, inputs)):
            found.append(rows)
    return found


def _largest_alike(layers: Sequence[nn.Linear]) -> list[nn.Linear]:
    """Layers of the shape that has most weights in all, and no more of them than LEAST_BYTES."""

    def shape(layer: nn.Linear) -> tuple[int, int]:
        return layer.in_features, layer.out_features

    alike = [list(group) for _, group in groupby(sorted(layers, key=shape), shape)]
    most = max(alike, key=lambda group: sum(each.weight.nbytes for each in group))
    return most[: 1 + LEAST_BYTES // most[0].weight.nbytes]
