"""Main memory: what is free of it, and what the system does with that of this process."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

HUGE_PAGE = 2 << 20
UNLIMITED = 2**62


def release() -> None:
    """Return freed pages of the heap, which glibc would keep. Elsewhere it does nothing."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, of NumPy, ggml, or of PyTorch on a CPU or a GPU."""
    said = ("out of memory", "can't allocate memory", "std::bad_alloc")
    return isinstance(error, MemoryError) or any(each in str(error) for each in said)


def use_huge_pages(address: int, num_bytes: int) -> None:
    """Let memory that is not used yet be of huge pages. Where there are none it does nothing."""
    first = address + -address % HUGE_PAGE
    size = (address + num_bytes - first) // HUGE_PAGE * HUGE_PAGE
    if size > 0 and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError, AttributeError):
            advise = ctypes.CDLL(None).madvise
            advise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)


def leave_to_file(rows: np.ndarray) -> None:
    """Give the pages of an array in a mapped file back, which are read again when they are used;
    elsewhere it does nothing."""
    owner: Any = rows
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    if isinstance(owner, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        start = rows.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
        first = start + -start % mmap.PAGESIZE
        size = (start + rows.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if size > 0:
            owner.madvise(mmap.MADV_DONTNEED, first, size)


def free_bytes() -> int:
    """Bytes that this process may still use, those included that the system gives way of."""
    return min(psutil.virtual_memory().available, cgroup_free())


def cgroup_free(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that the control groups of this process leave it; UNLIMITED without a limit. Files that
    the system keeps in memory count as free: they give way. Version 1 and 2 of the interface; in a
    container the limits of the group may be at the root."""
    free = UNLIMITED
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return free
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            base = root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(base):
                free = min(free, _group_free(folder, *names))
    return free


def _group_free(folder: Path, limit: str, usage: str, prefix: str) -> int:
    try:
        most = int((folder / limit).read_text())
        used = int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # "max", or no such group here
        return UNLIMITED
    files = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
    return max(most - used + files, 0)
