"""Writes files that other processes may read or write at the same time."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write a file that only this user can read. A concurrent reader sees the old or the new
    content, never a part; with `durable`, which is slower, also after a loss of power. Raises
    OSError; then, and when it is interrupted, the file is unchanged."""
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".partial")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
