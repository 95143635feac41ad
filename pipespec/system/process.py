"""Processes by number and start: a number alone may be another's by now."""

from __future__ import annotations

import os

import psutil

LARGEST_PID = 2**22
# A process's start is told in wall-clock time, which may be set right meanwhile.
CLOCK_DRIFT_S = 2.0


def started() -> float:
    """When this process began, in seconds since 1970."""
    return float(psutil.Process().create_time())


def running(pid: int, created: float) -> psutil.Process | None:
    """The process of that number which began then (seconds since 1970), unless it has ended."""
    if not 0 < pid <= LARGEST_PID:
        return None
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - created) < CLOCK_DRIFT_S
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def is_ours(process: psutil.Process) -> bool:
    """Whether it is this user's. Raises psutil.NoSuchProcess if it has ended."""
    return bool(process.uids().real == os.getuid())
