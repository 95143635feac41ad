"""Processes by number and start: a number alone may be another's by now."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

import psutil

LARGEST_PID = 2**22
# A process's start is told in wall-clock time, which may be set right meanwhile.
CLOCK_DRIFT_S = 2.0
PR_SET_PDEATHSIG = 1


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


def dying_with(parent: int) -> Callable[[], None]:
    """What a child of the process `parent` runs so that it never outlives it, where the system can
    do that. It may run between fork and exec."""
    if sys.platform != "linux":
        return lambda: None
    # Loaded here: between fork and exec little is safe.
    libc = ctypes.CDLL(None)

    def ask() -> None:
        # What hangs hears nothing else.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return ask
