"""Locks of folders of the parts cache: one process at a time fetches into a folder."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipespec.engine.parts.parts_file import RECORDS, reported
from pipespec.errors import ModelError
from pipespec.system.atomic_write import write_atomically

# Seconds between two tries to get a lock that a process of another run holds.
RETRY_S = 0.2


@contextmanager
def sole_fetcher(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Be the only process that fetches into a folder; the lock ends with the process. Raises
    ModelError if another one is and this must not `wait`."""
    descriptor = _opened(folder)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise ModelError(f"a process fetches into {folder}; wait until it has ended") from None
        yield
    finally:
        os.close(descriptor)


class RunLock:
    """The lock of a folder for all hosts of one run, as several may share a file system. It is held
    until `release`, or the end of the process.

    Waits until no process of another run fetches into the folder. Raises ModelError.

    Attributes:
        owner: the host that holds it: this one, or the first of the run that asked.
    """

    def __init__(self, folder: Path, run: str, host: str) -> None:
        self.owner = host
        self._descriptor = _opened(folder)
        record = folder / RECORDS / "owner"
        with reported(folder):
            while True:
                try:
                    fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    known = record.read_text().split() if record.exists() else []
                    if known[:1] == [run]:
                        self.owner = known[1]
                        return
                    time.sleep(RETRY_S)
                else:
                    write_atomically(record, f"{run} {host}".encode())
                    return

    def release(self) -> None:
        """Let others fetch into the folder."""
        os.close(self._descriptor)


def _opened(folder: Path) -> int:
    with reported(folder):
        (folder / RECORDS).mkdir(parents=True, exist_ok=True)
        return os.open(folder / RECORDS / "lock", os.O_RDWR | os.O_CREAT, 0o600)
