"""Files that another process may read at any moment."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that whoever reads it finds as it was, or whole."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(data)
    partial.rename(path)
