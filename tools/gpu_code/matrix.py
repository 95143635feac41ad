"""Which kernels are compiled for which GPUs: what our backend launches for layers of many shapes.

Cases that make the same constants at compile time are compiled once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from pipespec.engine.attention import kernels
from pipespec.engine.attention.attention_plan import LayerOptions, LayerPool, causal_plan
from pipespec.engine.attention.triton_backend import SHARED_KIB, Capability, TritonBackend

NUM_SLOTS = 64
KERNELS = ("store", "attend", "merge")


class Case(NamedTuple):
    """A layer on a GPU: the sizes of a head's K and V, how many KV heads there are and how many
    query heads each has, and the layer's options."""

    capability: Capability
    dtype: torch.dtype
    dims: tuple[int, int]
    group: int
    reach: str
    softcap: bool
    sinks: bool
    kv_heads: int


AXES = Case(
    tuple(SHARED_KIB),  # type: ignore[arg-type]
    (torch.float32, torch.bfloat16, torch.float16),  # type: ignore[arg-type]
    # The last is that of DeepSeek's latent attention, written out.
    ((64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128)),  # type: ignore[arg-type]
    (1, 2, 4, 8, 16),  # type: ignore[arg-type]
    ("", "window", "chunk"),  # type: ignore[arg-type]
    (False, True),  # type: ignore[arg-type]
    (False, True),  # type: ignore[arg-type]
    (8, 1),  # type: ignore[arg-type]
)


@dataclass(frozen=True)
class Variant:
    """A kernel with all that Triton compiles it by; `arguments` is `[signature, constants,
    alignments]` as JSON. `label` says for which layer, which makes no other kernel."""

    kernel: str
    capability: Capability
    arguments: str
    warps: int
    stages: int
    label: str = field(compare=False)


def covering_cases() -> list[Case]:
    """A selection of the matrix. Every GPU, type and power of two of a head size has a program of
    many heads with a soft cap and a window or a chunk, which is nearest to the limits; and every
    two values of two axes occur together."""
    cases = map(Case._make, product(*AXES))
    pairs = {case: set(combinations(enumerate(case), 2)) for case in cases}
    powers = {(power, power) for power in (64, 128, 256)}
    many = [c for c in pairs if c.group == 16 and c.kv_heads == 8 and c.dims in powers]
    largest = [c for c in many if c.softcap and c.reach]
    missing = set[tuple[Any, ...]]().union(*pairs.values())
    chosen = []

    def choose(cases: Iterable[Case]) -> None:
        chosen.append(max(cases, key=lambda case: len(pairs[case] & missing)))
        missing.difference_update(pairs[chosen[-1]])

    for where in dict.fromkeys(case[:3] for case in largest):
        choose(case for case in largest if case[:3] == where)
    while missing:
        choose(pairs)
    return chosen


def variants(cases: Iterable[Case]) -> list[Variant]:
    """What our backend makes Triton compile for these layers."""
    return list(dict.fromkeys(each for case in cases for each in compiled_for(case, [1])))


def compiled_for(case: Case, batches: Sequence[int]) -> list[Variant]:
    """What Triton compiles for batches of so many rows, one after another; each launch once."""
    noted: list[Variant] = []

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:  # noqa: A002
        attributes = {path: list(each) for path, each in compile["configs"][0].items()}
        # JSON has no tuples for keys.
        listed = (sorted(by_path.items()) for by_path in (compile["constants"], attributes))
        arguments = json.dumps((compile["signature"], *listed))
        label = f"{fn.name.rpartition('.')[2]} {_label(case)}"
        arch = (compile["num_warps"], compile["num_stages"])
        name = fn.jit_function.__name__
        noted.append(Variant(name, case.capability, arguments, *arch, label))
        return True  # do not compile

    with knobs.runtime.scope(), pretended_gpu(case.capability):
        knobs.runtime.jit_cache_hook = note
        _attend(case, batches)
    return list(dict.fromkeys(noted))


def source_of(variant: Variant) -> tuple[JITFunction, dict[str, str], dict[Any, Any], Any]:
    """The kernel, and its signature, constants and alignments as Triton takes them."""
    signature, constants, attributes = json.loads(variant.arguments)
    unlisted = ({tuple(path): each for path, each in part} for part in (constants, attributes))
    return (getattr(kernels, variant.kernel), signature, *unlisted)


@contextmanager
def pretended_gpu(capability: Capability) -> Iterator[None]:
    """Within, our own code launches kernels, and Triton prepares them for such a GPU in place of
    running them."""
    stand_ins = {name: _Kernel(getattr(kernels, name)) for name in KERNELS}
    arch = 10 * capability[0] + capability[1]
    asked = {
        "get_current_target": lambda: GPUTarget("cuda", arch, 32),
        "get_current_device": lambda: arch,  # Triton keeps what it compiled by device
        "get_current_stream": lambda _device: 0,
    }
    with (
        mock.patch.multiple(kernels, **stand_ins),
        mock.patch.object(triton.runtime.driver, "_active", SimpleNamespace(**asked)),
    ):
        yield


@dataclass(frozen=True)
class _Kernel:
    """Stands in for a kernel: `kernel[grid](...)`."""

    function: JITFunction

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        return partial(self.function.run, grid=grid, warmup=True)


def _label(case: Case) -> str:
    arch = "sm_{}{}".format(*case.capability)
    dtype = str(case.dtype).removeprefix("torch.")
    options = [case.reach, "softcap" * case.softcap, "sinks" * case.sinks]
    sizes = "/".join(map(str, dict.fromkeys(case.dims)))
    used = "+".join(filter(None, options)) or "plain"
    return f"{arch} {dtype} {sizes} group {case.group} heads {case.kv_heads} {used}"


def _attend(case: Case, batches: Sequence[int]) -> None:
    """Batches of one layer with this backend."""
    dim, value_dim = case.dims
    heads = case.kv_heads * case.group
    sinks = torch.zeros(heads, dtype=case.dtype) if case.sinks else None
    reach = {case.reach: 32} if case.reach else {}
    options = LayerOptions(0.1, softcap=30.0 if case.softcap else None, sinks=sinks, **reach)
    sizes = ((heads, dim), (case.kv_heads, dim), (case.kv_heads, value_dim))
    pool = LayerPool(*(torch.zeros(NUM_SLOTS + 1, *s, dtype=case.dtype) for s in sizes[1:]))
    backend = TritonBackend("cpu", NUM_SLOTS, case.capability)
    for rows in batches:
        slots = torch.arange(NUM_SLOTS).numpy()
        backend.prepare(causal_plan(slots[:rows], slots[rows : 2 * rows]))
        backend.attend(*(torch.zeros(rows, *s, dtype=case.dtype) for s in sizes), pool, options)
