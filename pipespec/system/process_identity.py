"""Identifies processes by id and start time, and starts some that end with this one."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

import psutil

LARGEST_PID = 2**22
# Starts are rounded to the second where the system states its own start in whole seconds.
ROUNDING_S = 2.0
PR_SET_PDEATHSIG = 1
Made = TypeVar("Made")


def own_start_time() -> float:
    """When this process started, in seconds since boot."""
    return since_boot(psutil.Process())


def find_process(pid: int, created: float) -> psutil.Process | None:
    """The process with this id that started `created` seconds after boot; None: it has ended."""
    if not 0 < pid <= LARGEST_PID:
        return None
    try:
        process = psutil.Process(pid)
        same = abs(since_boot(process) - created) < ROUNDING_S
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def since_boot(process: psutil.Process) -> float:
    """When a process started, in seconds since boot, whatever the system clock is set to."""
    return float(process.create_time() - psutil.boot_time())


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process. False if it has ended."""
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def is_ours(process: psutil.Process) -> bool:
    return bool(process.uids().real == os.getuid())


def die_with_parent(parent: int) -> Callable[[], None]:
    """A `preexec_fn` that ends a child with the process `parent`, on Linux."""
    if sys.platform != "linux":
        return lambda: None
    # Loaded here: between fork and exec little is safe.
    libc = ctypes.CDLL(None)

    def request_kill() -> None:
        # SIGKILL also ends a process that hangs.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return request_kill


class Spawner:
    """Linux ends a child that asks for it (`die_with_parent`) with the thread that made it. This
    one makes it for any other thread, and lives until `close` or the end of the process."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # An executor's thread would be joined before those that still use the child.
        self._thread = threading.Thread(target=self._run, name="spawner", daemon=True)

    def make(self, spawn: Callable[[], Made]) -> Made:
        made: Future[Made] = Future()

        def order() -> None:
            try:
                made.set_result(spawn())
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                made.set_exception(error)

        if not self._thread.is_alive():
            self._thread.start()
        self._orders.put(order)
        return made.result()

    def close(self) -> None:
        if self._thread.is_alive():
            self._orders.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            order()
