"""Locks of folders of the parts cache: one process at a time fetches into a folder."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipespec.engine.checkpoint_parts.parts_file import RECORDS, reported
from pipespec.errors import ModelError
from pipespec.system.atomic_write import write_atomically
from pipespec.system.file_lock import lock_file
from pipespec.system.validation import Unreadable, read_json

log = logging.getLogger(__name__)


class FolderLock:
    """The lock of a folder for all hosts of one run, as several may share a file system. It is held
    until `release`, or the end of the process. Raises ModelError.

    Attributes:
        owner: the host that holds it: this one, or the first of the run that asked; None: a process
            of another run does.
        holder: that process, as a clause.
    """

    def __init__(self, folder: Path, run: str = "", host: str = "", *, wait: bool = False) -> None:
        self.owner: str | None = host
        self.holder, path = "", folder / RECORDS / "lock"
        with reported(folder):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = lock_file(path, wait=wait)
            if self._descriptor is None:
                noted = _noted(folder)
                self.owner = noted.get("host") if run and noted.get("run") == run else None
                self.holder = f"{noted.get('process') or 'another process'} fetches into {folder}"
                return
            process = f"process {os.getpid()} of {socket.gethostname()}"
            data = json.dumps({"run": run, "host": host, "process": process}).encode()
            try:
                write_atomically(_record(folder), data)
            except BaseException:
                self.release()
                raise

    def release(self) -> None:
        """Let others fetch into the folder."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@contextmanager
def sole_fetcher(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Be the only process that fetches into a folder; the lock ends with the process. Raises
    ModelError if another one is and this must not `wait`."""
    lock = FolderLock(folder)
    if lock.owner is None and wait:
        log.warning("%s; waiting until it has ended", lock.holder)
        lock = FolderLock(folder, wait=True)
    if lock.owner is None:
        raise ModelError(f"{lock.holder}; wait until it has ended")
    try:
        yield
    finally:
        lock.release()


def _noted(folder: Path) -> dict[str, Any]:
    """What the process that holds the lock has noted, or one before it."""
    try:
        found = read_json(_record(folder))
    except Unreadable:
        return {}
    return found if isinstance(found, dict) else {}


def _record(folder: Path) -> Path:
    return folder / RECORDS / "owner"
