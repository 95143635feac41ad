"""Runs our kernels on the CPU as they are compiled for a GPU: their PTX, in an emulator."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

from pipespec.engine.attention.launch_table import Capability
from tools.gpu_code.pretended_driver import LaunchedKernel, pretended_gpu
from tools.gpu_code.ptx_machine import Machine
from tools.gpu_code.ptx_memory import Memory
from tools.gpu_code.ptx_text import read_program

# What the emulator knows the instructions of.
CAPABILITY: Capability = (8, 0)
CACHE = Path("build/gpu_code/triton")


# The first slot of a pool gets this number, as in a pool of so many slots: what is computed from a
# slot in 32 bits is wrong then.
FIRST_SLOT = 1 << 25
_POOLS, _SLOTS = ("keys", "values"), ("write", "slots")


@contextmanager
def emulated_gpu(cache: str | os.PathLike[str] = CACHE) -> Iterator[None]:
    """Within, launches of our kernels with tensors on the CPU are emulated. What is compiled is
    kept in the folder `cache`."""
    machines: dict[str, Machine] = {}

    def run(function: JITFunction, launch: LaunchedKernel) -> None:
        compiled = function.run(*launch.args, grid=launch.grid, warmup=True, **launch.constants)
        if compiled.hash not in machines:
            program = read_program(compiled.asm["ptx"])
            machines[compiled.hash] = Machine(program, compiled.metadata.shared)
        _run(machines[compiled.hash], _arguments(function, launch, compiled), launch.grid)

    with knobs.cache.scope(), pretended_gpu(CAPABILITY, run):
        knobs.cache.dir = str(Path(cache).absolute())
        yield


def _arguments(function: JITFunction, launch: LaunchedKernel, compiled: Any) -> dict[str, Any]:
    """What the compiled kernel is given, by name, without what became constants."""
    signature = inspect.signature(function.fn)
    named = {name: x for name, x in launch.constants.items() if name in signature.parameters}
    given = signature.bind(*launch.args, **named).arguments
    kinds = compiled.src.signature
    return {name: value for name, value in given.items() if kinds[name] != "constexpr"}


def _run(machine: Machine, arguments: dict[str, Any], grid: tuple[int, ...]) -> None:
    tensors = {
        (each.data_ptr(), each.nbytes): each
        for each in arguments.values()
        if isinstance(each, Tensor)
    }
    views = [each.view(-1).view(torch.uint8).numpy() for each in tensors.values()]
    memory, addresses = Memory.holding(views, [pointer % 16 for pointer, _ in tensors])
    places = dict(zip(tensors, addresses, strict=True))
    numbers = dict(arguments)
    for name, each in arguments.items():
        if isinstance(each, Tensor):
            assert each.is_contiguous(), name
            place = places[each.data_ptr(), each.nbytes]
            numbers[name] = place
            if name in _POOLS:
                numbers[name] -= FIRST_SLOT * each[0].nbytes
            elif name in _SLOTS:
                memory.at(place, each.nbytes).view(np.int32)[:] += FIRST_SLOT
    machine.launch(grid, [*numbers.values(), 0, 0], memory)  # and two scratch pointers, for nothing
    slots = {arguments[name].data_ptr() for name in _SLOTS if name in arguments}
    for (pointer, _), view, address in zip(tensors, views, addresses, strict=True):
        if pointer not in slots:
            np.copyto(view, memory.at(address, len(view)))
