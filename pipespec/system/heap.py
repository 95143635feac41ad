"""Memory of the process, and what the system does with it."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from typing import Any

import numpy as np


def release() -> None:
    """Return freed pages of the heap, which glibc would keep. Elsewhere it does nothing."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


HUGE_PAGE = 2 << 20


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
