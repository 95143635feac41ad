"""The CUDA devices of this machine."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipespec.errors import ConfigError

DRIVER = "libcuda.so.1"
GIB = 2**30


def num_cuda() -> int:
    """How many CUDA devices torch can use in a new process; CUDA_VISIBLE_DEVICES counts. The driver
    is asked, as importing torch takes seconds."""
    kind, built_for = _torch_built_for()
    if kind == "hip":  # whose devices torch calls cuda too
        import torch

        return torch.cuda.device_count()
    if kind is None:
        return 0
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return 0
    # The first call reads CUDA_VISIBLE_DEVICES; none of them makes a context.
    version, count = ctypes.c_int(), ctypes.c_int()
    failed = (
        driver.cuInit(0)
        or driver.cuDriverGetVersion(ctypes.byref(version))
        or driver.cuDeviceGetCount(ctypes.byref(count))
    )
    usable = not failed and version.value // 1000 >= int(built_for.partition(".")[0])
    return count.value if usable else 0


def _torch_built_for() -> tuple[str | None, str]:
    """What torch was built for, "cuda" or "hip", and its version; None: neither, or no torch."""
    spec = find_spec("torch")  # which imports nothing
    if spec is None or spec.origin is None:
        return None, ""
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None, ""
    for kind in ("hip", "cuda"):
        found = re.search(rf"^{kind}\b[^=\n]*= *['\"](\d[^'\"]*)", text, re.MULTILINE)
        if found:
            return kind, found[1]
    return None, ""


def cuda_figures() -> Iterator[dict[str, Any]]:
    import torch

    for index in range(num_cuda()):
        free, total = torch.cuda.mem_get_info(index)
        yield {
            "name": f"cuda:{index}",
            "model": torch.cuda.get_device_name(index),
            "memory_gib": round(total / GIB, 1),
            "free_gib": round(free / GIB, 1),
        }


def require_device(device: str, asks: str, remedy: str = "see `pipespec doctor`") -> None:
    """Raise ConfigError if this machine lacks a device such as `cuda:1`; `asks`: the clause that
    says who asks for it."""
    kind, _, index = device.partition(":")
    count = num_cuda() if kind == "cuda" else 1
    if int(index or 0) >= count:
        raise ConfigError(f"{asks} {device}, but this machine has {count} CUDA devices; {remedy}.")


def resolve_devices(names: list[str], num_ranks: int) -> tuple[str, ...]:
    """One device per rank. "auto" and "cuda" go round the CUDA devices; "auto" is CPU without.
    Raises ConfigError: this machine lacks one of them."""
    count = num_cuda() if set(names) != {"cpu"} else 0
    names = names * num_ranks if len(names) == 1 else names
    devices = []
    for rank, name in enumerate(names):
        if name == "auto":
            name = "cuda" if count else "cpu"
        require_device(name, f"cluster.devices asks at rank {rank} for")
        kind, _, index = name.partition(":")
        # The head's draft shares a device only when there are fewer devices than ranks.
        devices.append(name if index or kind == "cpu" else f"cuda:{(rank - 1) % count}")
    return tuple(devices)
