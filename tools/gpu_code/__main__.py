"""Compiles the attention kernels for GPUs that this machine lacks, and checks what they need.

    python -m tools.gpu_code [--jobs N]

Fails if a kernel is not compiled, needs more shared memory than a program may have, or spills
registers without being on the list of known spills.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import defaultdict

import triton

from pipespec.engine.attention.triton_backend import SHARED_KIB, Capability
from tools.gpu_code.compiling import Compiled, compile_all
from tools.gpu_code.matrix import Variant, covering_cases, variants


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_code", description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    wanted = variants(covering_cases())
    print(f"{len(wanted)} kernels, with Triton {triton.__version__}", flush=True)
    found = list[tuple[Variant, Compiled]]()
    faults = list[str]()
    for variant, compiled in compile_all(wanted, options.jobs):
        found.append((variant, compiled))
        for fault in compiled.faults(variant):
            faults.append(f"{variant.label} {fault}")
            print(faults[-1], flush=True)
        if len(found) % 100 == 0:
            print(f"{len(found)} of {len(wanted)}", flush=True)
    _print_summary(found)
    print(f"{len(faults)} faults; {time.monotonic() - began:.0f} s")
    return 1 if faults else 0


def _print_summary(found: list[tuple[Variant, Compiled]]) -> None:
    by_arch = defaultdict[Capability, list[Compiled]](list)
    for variant, compiled in found:
        by_arch[variant.capability].append(compiled)
    print("GPU      kernels  registers  shared KiB  of  spills  compile s, longest")
    for capability, each in sorted(by_arch.items()):
        print(
            "sm_{}{}".format(*capability).ljust(8),
            f"{len(each):7}",
            f"{max(c.registers for c in each):10}",
            f"{max(c.shared_bytes for c in each) / 1024:11.1f}",
            f"{SHARED_KIB[capability]:3}",
            f"{sum(c.spilled_bytes > 0 for c in each):7}",
            f"{max(c.seconds for c in each):19.1f}",
        )


if __name__ == "__main__":
    sys.exit(main())
