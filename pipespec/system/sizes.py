"""Numbers of bytes as text."""

from __future__ import annotations


def size_text(num_bytes: float) -> str:
    """A number of bytes in GiB, or in MiB if that is less than one."""
    gib = num_bytes / 2**30
    return f"{gib:.2f} GiB" if gib >= 1 else f"{1024 * gib:.1f} MiB"
