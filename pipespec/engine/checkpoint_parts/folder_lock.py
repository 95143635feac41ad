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


@contextmanager
def sole_fetcher(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Be the only process that fetches into a folder; the lock ends with the process. Raises
    ModelError if another one is and this must not `wait`."""
    with reported(folder):
        descriptor = _locked(folder, wait=False)
        if descriptor is None and wait:
            log.warning("%s fetches into %s; waiting until it has ended", _holder(folder), folder)
            descriptor = _locked(folder, wait=True)
    if descriptor is None:
        raise ModelError(f"{_holder(folder)} fetches into {folder}; wait until it has ended")
    try:
        with reported(folder):
            _note(folder, {})
        yield
    finally:
        os.close(descriptor)


class RunLock:
    """The lock of a folder for all hosts of one run, as several may share a file system. It is held
    until `release`, or the end of the process. Nothing is waited for. Raises ModelError.

    Attributes:
        owner: the host that holds it: this one, or the first of the run that asked; None: a process
            of another run does.
        holder: that process, as a clause.
    """

    def __init__(self, folder: Path, run: str, host: str) -> None:
        self.owner: str | None = host
        self.holder = ""
        with reported(folder):
            self._descriptor = _locked(folder, wait=False)
            if self._descriptor is None:
                known = _noted(folder)
                self.owner = known.get("host") if known.get("run") == run else None
                self.holder = _holder(folder)
                return
            try:
                _note(folder, {"run": run, "host": host})
            except BaseException:
                self.release()
                raise

    def release(self) -> None:
        """Let others fetch into the folder."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _locked(folder: Path, *, wait: bool) -> int | None:
    """A descriptor that holds the lock; None: another process does. Raises OSError."""
    path = folder / RECORDS / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    return lock_file(path, wait=wait)


def _holder(folder: Path) -> str:
    return str(_noted(folder).get("process") or "another process")


def _note(folder: Path, whose: dict[str, str]) -> None:
    process = f"process {os.getpid()} of {socket.gethostname()}"
    data = json.dumps({**whose, "process": process}).encode()
    write_atomically(_record(folder), data)


def _noted(folder: Path) -> dict[str, Any]:
    """What the process that holds the lock has noted, or one before it."""
    try:
        found = read_json(_record(folder))
    except Unreadable:
        return {}
    return found if isinstance(found, dict) else {}


def _record(folder: Path) -> Path:
    return folder / RECORDS / "owner"
