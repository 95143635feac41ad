"""Gives memory that a process has freed back to the system."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def release() -> None:
    """Return freed pages of the heap, which glibc would keep. Elsewhere it does nothing."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # another C library
        return None
