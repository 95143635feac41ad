"""Products of few rows with large plain weights on a CPU.

`nn.Linear` computes `x @ W.T`. With a few rows, BLAS libraries spend more time on packing the
weights for it than on the product. Which way is faster depends on the library, the processor and
the type, so all are timed with weights of a slice, once on a machine.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pipespec.engine.ggml import compute, library
from pipespec.engine.low_bit.kept_linear import multiplied
from pipespec.system.result_cache import cached_call

# The numbers of rows that are measured: a token, and a batch with draft tokens.
SIZES = (1, 16)
# Weights that fit into caches are read fast in any order.
LEAST_BYTES = 64 << 20
# The same of one matrix, whose blocks of so many columns have a scale each.
LEAST_ROUNDED, BLOCK = 1 << 20, 32
# Only what is so many times as fast is worth another way than the first; ggml's rows do not depend
# on their batch, so it may be as much slower.
CLEARLY = 1.05
TIMES = 3
# The largest difference of two right products, relative to the largest number, and the names of the
# types in ggml.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.02}
GGML_KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

# A product of `[rows, in]` with weights, `[rows, out]`.
Product = Callable[[Tensor], Tensor]
USUAL, PACKED, GGML = "usual", "packed", "ggml"


def _packed(weight: Tensor) -> Product:
    """Weights as oneDNN reads them, an opaque tensor of as many bytes."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), SIZES[-1])
    return lambda rows: torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")


def _by_ggml(weight: Tensor) -> Product:
    found = library.load()
    if found is None:
        raise RuntimeError(library.why_not())
    memory = weight.detach().contiguous().view(torch.uint8).numpy()
    stored = compute.matrix(found, GGML_KINDS[weight.dtype], memory, tuple(weight.shape))
    return lambda rows: multiplied(stored, rows)


# By name, what makes the product of weights `[out, in]`. Raises RuntimeError or AttributeError if
# this machine cannot.
WAYS: dict[str, Callable[[Tensor], Product]] = {
    USUAL: lambda weight: lambda rows: functional.linear(rows, weight),
    # Some libraries read the weights once for it.
    "swapped": lambda weight: lambda rows: torch.mm(weight, rows.t()).t(),
    PACKED: _packed,
    GGML: _by_ggml,
}


class OtherLinear(nn.Linear):
    """A linear layer that computes in another way."""

    product: Product

    @classmethod
    def become(cls, layer: nn.Linear, product: Product, *, keeps: bool) -> None:
        """Turn a plain linear layer into one of these, which keeps its weights, or the product
        alone."""
        if not keeps:
            del layer.weight
        layer.__class__ = cls
        setattr(layer, "product", product)  # noqa: B010 - unknown to its first class

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name in torch
        found = self.product(input.reshape(-1, self.in_features))
        found = found if self.bias is None else found + self.bias
        return found.reshape(*input.shape[:-1], self.out_features)


@dataclass(frozen=True)
class Fastest:
    way: str


def num_plain_bytes(model: nn.Module) -> int:
    """The bytes of the weights of its plain linear layers."""
    return sum(each.weight.nbytes for each in filter(_is_plain, model.modules()))


def use_fastest(model: nn.Module, room: float = math.inf) -> str:
    """Let the linear layers of a model compute few rows in the way that is clearly the fastest, and
    return its name. Models of less than LEAST_BYTES are left alone.

    `room`: bytes that packed weights may take. Weights that are mapped from a file take none, and
    packed ones do.
    """
    if num_plain_bytes(model) < LEAST_BYTES:
        return USUAL
    layers = [*filter(_is_plain, model.modules())]
    owners = Counter(id(each) for part in model.modules() for each in part._parameters.values())
    own = [each for each in layers if owners[id(each.weight)] == 1]
    can_pack = sum(each.weight.nbytes for each in own) <= room
    ways = [way for way in WAYS if way != PACKED or can_pack]
    sizes = Counter[torch.Size]()
    for each in layers:
        sizes[each.weight.shape] += each.weight.nbytes
    (shape, _), *_ = sizes.most_common(1)
    some = [each.weight for each in layers if each.weight.shape == shape]
    some = some[: 1 + LEAST_BYTES // some[0].nbytes]
    depends: dict[str, Any] = {
        "shapes": [list(each.shape) for each in some],
        "type": str(some[0].dtype),
        "ways": ways,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "processor": sorted(library.cpu_flags()),
        "ggml": str(getattr(library.load(), "folder", None)),
    }
    fastest = cached_call("products", Fastest, depends, measured, some, ways).way
    for layer in own if fastest == PACKED else layers if fastest != USUAL else ():
        OtherLinear.become(layer, WAYS[fastest](layer.weight), keeps=fastest != PACKED)
    return fastest


def use_eight_bits(model: nn.Module) -> None:
    """Let the linear layers of a draft that do not fit into caches multiply by weights rounded to 8
    bits, if ggml is there: a pass reads all of them, and rounding costs some accuracy alone."""
    found = library.load()
    for each in filter(_is_plain, model.modules() if found is not None else ()):
        if each.weight.nbytes >= LEAST_ROUNDED and not each.in_features % BLOCK:
            assert found is not None
            blocks = quantize(each.weight.detach().float().numpy(), GGMLQuantizationType.Q8_0)
            shape = each.out_features, each.in_features
            stored = compute.laid_out(found, "Q8_0", blocks, shape)
            OtherLinear.become(each, partial(multiplied, stored), keeps=False)


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    return (
        type(module) is nn.Linear
        and module.weight.dtype in TOLERANCE
        and module.weight.numel() > 0  # not so on a device that has no part of it
        and not is_traceable_wrapper_subclass(module.weight)
    )


@torch.inference_mode()
def measured(weights: list[Tensor], ways: Iterable[str]) -> Fastest:
    """Times all ways with these weights of one shape."""
    inputs = [torch.randn(size, weights[0].shape[1]).to(weights[0].dtype) for size in SIZES]
    expected = functional.linear(inputs[-1], weights[0])
    most = TOLERANCE[expected.dtype] * expected.abs().max()
    took = {}
    for way in ways:
        try:
            products = [WAYS[way](each) for each in weights]
            off = (products[0](inputs[-1]) - expected).abs().max()
            if most.isfinite() and not off <= most:  # weights without finite products take as long
                continue
        except (RuntimeError, AttributeError):
            continue
        took[way] = sum(least_seconds(products, rows) for rows in inputs)
    best = min(took.values())
    if took.get(GGML, math.inf) <= CLEARLY * best:
        return Fastest(GGML)
    if took[USUAL] <= CLEARLY * best:
        return Fastest(USUAL)
    return Fastest(min(took, key=took.__getitem__))


def least_seconds(products: Iterable[Product], rows: Tensor) -> float:
    """The least time of some calls, as others may use the machine."""
    took = []
    for _ in range(TIMES):
        start = time.perf_counter()
        for product in products:
            product(rows)
        took.append(time.perf_counter() - start)
    return min(took)
