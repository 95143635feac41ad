"""Processes that may end at any moment, even while they are looked at."""

from __future__ import annotations

from contextlib import suppress

import psutil


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return pid > 0 and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_line(process: psutil.Process) -> str:
    """The words it was started with; "" if it has ended."""
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return " ".join(process.cmdline())
    return ""
