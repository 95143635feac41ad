"""Triton on a machine without a GPU: our own code launches kernels, and Triton prepares them for a
GPU in place of running them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from pipespec.engine.attention import kernels
from pipespec.engine.attention.triton_backend import Capability

KERNELS = ("store", "attend", "merge")


class _Driver:
    """What Triton asks a driver before it compiles."""

    def __init__(self, capability: Capability):
        self._arch = capability[0] * 10 + capability[1]

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return self._arch  # Triton keeps what it compiled by device

    def get_current_stream(self, _device: int) -> int:
        return 0


class _Kernel:
    """Stands in for a kernel: `kernel[grid](...)`."""

    def __init__(self, function: JITFunction):
        self._function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        return partial(self._function.run, grid=grid, warmup=True)


@contextmanager
def pretended_gpu(capability: Capability) -> Iterator[None]:
    """Within, launches of our kernels make Triton compile for such a GPU."""
    before = {name: getattr(kernels, name) for name in KERNELS}
    driver = triton.runtime.driver
    driver.set_active(_Driver(capability))
    for name, function in before.items():
        setattr(kernels, name, _Kernel(function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(kernels, name, function)
        driver._active = None
