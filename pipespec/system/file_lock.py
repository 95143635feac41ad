"""Locks of files, which end with the process that holds them."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def lock_file(path: Path, *, wait: bool = False) -> int | None:
    """The descriptor of a file, made if need be, that is locked as long as it is open; None:
    another process holds it, and this must not `wait`. Raises OSError."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if _is_at(path, descriptor):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder removed the file between our two calls


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
