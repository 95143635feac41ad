"""Files that another process may read at any moment, or write at the same one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write a file, for this user alone, that whoever reads it finds as it was, or whole; with
    `durable` also after a loss of power, which takes longer.

    Raises OSError; then, and when it is interrupted, nothing has changed.
    """
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
