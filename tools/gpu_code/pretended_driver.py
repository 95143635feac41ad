"""Triton on a machine without a GPU: kernels are launched by our own code, and what Triton would
compile for a GPU is noted, or compiled, in place of running."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from pipespec.engine.attention import kernels
from pipespec.engine.attention.launch_table import Capability

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


@dataclass(frozen=True)
class LaunchedKernel:
    """A launch of a kernel."""

    name: str
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]


# Called with every launch.
Observer = Callable[[JITFunction, LaunchedKernel], None]


class _Kernel:
    """Stands in for a kernel: `kernel[grid](...)`."""

    def __init__(self, function: JITFunction, observe: Observer):
        self._function, self._observe = function, observe

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        name = self._function.__name__

        def launch(*args: Any, **constants: Any) -> None:
            self._observe(self._function, LaunchedKernel(name, grid, args, constants))

        return launch


@contextmanager
def pretended_gpu(capability: Capability, observe: Observer) -> Iterator[None]:
    """Within, launches of our kernels are observed, and Triton compiles for such a GPU."""
    before = {name: getattr(kernels, name) for name in KERNELS}
    driver = triton.runtime.driver
    driver.set_active(_Driver(capability))
    for name, function in before.items():
        setattr(kernels, name, _Kernel(function, observe))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(kernels, name, function)
        driver._active = None
