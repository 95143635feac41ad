"""Compiles kernels for GPUs that this machine lacks, and reads what they need of one."""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from typing import NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pipespec.engine.attention.triton_backend import LEAST_SHARED_KIB, SHARED_KIB
from tools.gpu_code.matrix import Variant, source_of

# Columns of tensor memory of a multiprocessor (sm_100).
TENSOR_COLUMNS = 512


class KnownSpill(NamedTuple):
    """Kernels that may spill: a pattern of their labels, the most bytes, the most registers that
    they have all the same, and why."""

    pattern: str
    spilled_bytes: int
    registers: int
    reason: str


KNOWN_SPILLS = (
    KnownSpill(
        "^attend ",
        32,
        168,
        "ptxas gives up a few of 255 registers that it may use, so that one program more fits a "
        "multiprocessor: 168 registers for each of 384 threads, 128 of 512, 80 of 768, 64 of 1024",
    ),
    KnownSpill(
        "^attend sm_90 b?float16 128 ",
        88,
        255,
        "on an H200 four warps with 44 bytes spilled were faster than eight with none: "
        "benchmarks/results/attention_launch_h200.json",
    ),
)
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class Compiled:
    """What a compiled kernel needs; `error` is why it could not be compiled, or empty."""

    registers: int = 0
    spilled_bytes: int = 0
    shared_bytes: int = 0
    tensor_columns: int = 0
    seconds: float = 0.0
    error: str = ""

    def faults(self, variant: Variant) -> list[str]:
        """Why this kernel must not be launched as it is."""
        if self.error:
            return [f"is not compiled: {self.error}"]
        found = []
        limit = SHARED_KIB.get(variant.capability, LEAST_SHARED_KIB)
        if self.shared_bytes > limit << 10:
            needed = f"{self.shared_bytes / 1024:.1f} KiB"
            found.append(f"needs {needed} of shared memory, and a program may have {limit}")
        if self.tensor_columns > TENSOR_COLUMNS:
            found.append(f"needs {self.tensor_columns} columns of tensor memory")
        known = any(
            re.search(each.pattern, variant.label)
            and self.spilled_bytes <= each.spilled_bytes
            and self.registers <= each.registers
            for each in KNOWN_SPILLS
        )
        if self.spilled_bytes and not known:
            found.append(f"spills {self.spilled_bytes} bytes of registers")
        return found


def compile_variant(variant: Variant) -> Compiled:
    """Compile one kernel with Triton's own ptxas."""
    function, signature, constants, attributes = source_of(variant)
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    major, minor = variant.capability
    options = {
        "num_warps": variant.warps,
        "num_stages": variant.stages,
        "enable_fp_fusion": True,  # as `triton_backend.OPTIONS` says
    }
    began, printed = time.monotonic(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope(), knobs.nvidia.scope():
        knobs.cache.dir = folder
        knobs.nvidia.dump_ptxas_log = True
        try:
            with contextlib.redirect_stdout(printed):
                target = GPUTarget("cuda", 10 * major + minor, 32)
                made = triton.compile(source, target=target, options=options)
        except Exception as error:  # noqa: BLE001 - compilers raise anything
            why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            return Compiled(seconds=time.monotonic() - began, error=why)
    log = printed.getvalue()
    registers, spilled = _REGISTERS.search(log), _SPILLED.search(log)
    if registers is None or spilled is None:
        return Compiled(error=f"ptxas does not say what the kernel needs: {log[:200]!r}")
    return Compiled(
        int(registers[1]),
        max(map(int, spilled.groups())),
        made.metadata.shared,
        made.metadata.tmem_size or 0,
        time.monotonic() - began,
    )


def compile_all(variants: Sequence[Variant], jobs: int) -> Iterator[tuple[Variant, Compiled]]:
    """Compile in `jobs` processes; yields each kernel as it is known."""
    # Started afresh: torch's threads must not be forked.
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        running = {pool.submit(compile_variant, each): each for each in variants}
        try:
            for done in as_completed(running):
                yield running[done], done.result()
        finally:
            pool.shutdown(cancel_futures=True)
