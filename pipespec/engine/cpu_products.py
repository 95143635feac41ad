"""Products of few rows with large weights on a CPU.

`nn.Linear` computes `x @ W.T`. With a few rows, BLAS libraries spend more time on packing the
weights for it than on the product. There are two other ways:

- **packed**: the weights are laid out once as oneDNN reads them, and the plain ones are dropped.
- **swapped**: `W @ x.T` has the same value, and some libraries read the weights once for it. Only
  in float32, where that changes a result by no more than its rounding.

Which is faster depends on the library, the processor and the number of rows, so it is measured on
the weights of the slice.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# The numbers of rows that are measured; one in between is computed as the next larger.
SIZES = (1, 2, 4, 8, 16, 32)
# Weights that fit into caches are read fast in any order.
LEAST_BYTES = 64 << 20
# Only what is so many times as fast is worth another way.
CLEARLY = 1.05
TIMES = 3
# The largest difference of two right products, relative to the largest number, by type.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02}

# Calls what it is given, and returns how many seconds a call takes.
Stopwatch = Callable[[Callable[[], object]], float]


@dataclass(frozen=True)
class Choice:
    """How the linear layers of a slice are computed.

    Attributes:
        packed: their weights are packed, those of a tied head excepted.
        swapped: the sizes of batches that other layers compute as `W @ x.T`.
        lacking: bytes that packed weights would take, if they are not packed for want of room.
    """

    packed: bool = False
    swapped: tuple[int, ...] = ()
    lacking: int = 0


class SwappedLinear(nn.Linear):
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


class PackedLinear(nn.Linear):
    """A linear layer whose weights are in oneDNN's layout alone."""

    packed: Tensor

    @classmethod
    def become(cls, layer: nn.Linear) -> None:
        """Turn a plain linear layer into one of these, and free its plain weights."""
        packed = pack(layer.weight)
        del layer.weight
        layer.__class__ = cls
        setattr(layer, "packed", packed)  # noqa: B010 - unknown to its first class

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name in torch
        return packed_product(input, self.packed, self.bias)


def pack(weight: Tensor) -> Tensor:
    """The weights `[out, in]` as oneDNN reads them, an opaque tensor of as many bytes.

    Raises RuntimeError or AttributeError if this build of PyTorch or this processor cannot.
    """
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), SIZES[-1])
    return packed


def packed_product(inputs: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """`nn.functional.linear` of `[..., in]` with packed weights, `[..., out]`."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, packed, bias, "none", [], "")
    return product


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


def use_fastest(
    model: nn.Module, room: float = math.inf, time_s: Stopwatch = least_seconds
) -> Choice:
    """Let the linear layers of a model compute batches of few rows in the way that is clearly the
    fastest. Models of less than LEAST_BYTES are left alone.

    `room`: bytes that packed weights may take. Weights that are mapped from a file take none, and
    packed ones do.
    """
    layers = [each for each in model.modules() if _is_plain(each)]
    if sum(each.weight.nbytes for each in layers) < LEAST_BYTES:
        return Choice()
    owners = Counter(id(each) for part in model.modules() for each in part._parameters.values())
    own = [each for each in layers if owners[id(each.weight)] == 1]
    choice = fastest(_largest_alike(own or layers), time_s)
    packed = own if choice.packed else []
    lacking = sum(each.weight.nbytes for each in packed)
    if lacking > room:
        packed = []
    else:
        lacking = 0
    for layer in packed:
        PackedLinear.become(layer)
    left = [each for each in layers if type(each) is nn.Linear]
    for layer in left if choice.swapped else ():
        SwappedLinear.become(layer, choice.swapped)
    return Choice(bool(packed), choice.swapped if left else (), lacking)


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it is a linear layer with plain weights of a type that has other ways."""
    return (
        type(module) is nn.Linear
        and module.weight.dtype in TOLERANCE
        and module.weight.numel() > 0  # not so on a tensor-parallel member that has no part of it
        and not is_traceable_wrapper_subclass(module.weight)
    )


@torch.inference_mode()
def fastest(layers: Sequence[nn.Linear], time_s: Stopwatch) -> Choice:
    """The clearly fastest way to compute these layers, which are alike. Packed weights are all that
    is left of them, so the sum of the times of all sizes decides."""
    dtype = layers[0].weight.dtype
    inputs = {size: torch.randn(size, layers[0].in_features, dtype=dtype) for size in SIZES}

    def usual(inputs: Tensor) -> None:
        for layer in layers:
            layer(inputs)

    def swapped(inputs: Tensor) -> None:
        for layer in layers:
            swapped_product(inputs, layer.weight, layer.bias)

    plain_s, faster = 0.0, []
    for size, rows in inputs.items():
        usual_s = swapped_s = time_s(partial(usual, rows))
        if dtype == torch.float32 and size > 1:
            swapped_s = time_s(partial(swapped, rows))
        if usual_s > CLEARLY * swapped_s:
            faster.append(size)
        plain_s += min(usual_s, swapped_s)
    packed_s = _packed_seconds(layers, list(inputs.values()), time_s)
    packed = packed_s is not None and plain_s > CLEARLY * packed_s
    return Choice(packed, tuple(faster))


def _packed_seconds(
    layers: Sequence[nn.Linear], inputs: Sequence[Tensor], time_s: Stopwatch
) -> float | None:
    """How long packed layers take for all inputs; None: they cannot be packed here, or give other
    results."""
    first, largest = layers[0], inputs[-1]
    try:
        weights = [pack(layer.weight) for layer in layers]
        found = packed_product(largest, weights[0], first.bias)
    except (RuntimeError, AttributeError):
        return None
    off = (found - first(largest)).abs().max() / found.abs().max()
    if not off <= TOLERANCE[first.weight.dtype]:
        return None

    def packed(inputs: Tensor) -> None:
        for layer, weight in zip(layers, weights, strict=True):
            packed_product(inputs, weight, layer.bias)

    return sum(time_s(partial(packed, rows)) for rows in inputs)


def _largest_alike(layers: Sequence[nn.Linear]) -> list[nn.Linear]:
    """Layers of the shape that has most weights in all, and no more of them than LEAST_BYTES."""

    def shape(layer: nn.Linear) -> tuple[int, int]:
        return layer.in_features, layer.out_features

    alike = [list(group) for _, group in groupby(sorted(layers, key=shape), shape)]
    most = max(alike, key=lambda group: sum(each.weight.nbytes for each in group))
    return most[: 1 + LEAST_BYTES // most[0].weight.nbytes]
