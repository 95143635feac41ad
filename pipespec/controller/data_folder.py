"""The folder in which a private Redis keeps its data from one start to the next."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from pipespec.errors import ConfigError
from pipespec.system.reading import Missing, Unreadable, build, read_json
from pipespec.system.writing import write_whole

IDENTITY = "server.json"
LOCK = "server.lock"
# A server whose starter was killed needs this long to end.
LOCK_TIMEOUT_S = 5.0
LOCK_POLL_S = 0.02


@dataclass(frozen=True)
class Identity:
    """What clients know a server by: its password, and its TCP port if it has one."""

    password: str
    port: int | None


def read_identity(data: Path) -> Identity | None:
    """The identity of the server that used the folder before. Raises ConfigError."""
    file = data / IDENTITY
    try:
        return build(Identity, read_json(file))
    except Missing:
        return None
    except Unreadable:  # no message repeats what the file holds
        raise ConfigError(
            f"{file} cannot be read as the password and port of a server: remove it to have new "
            "ones."
        ) from None


def write_identity(data: Path, identity: Identity) -> None:
    """Keeps the identity where only this user can read it."""
    write_whole(data / IDENTITY, json.dumps(asdict(identity)).encode())


@contextmanager
def locked(data: Path) -> Iterator[int]:
    """Makes the folder if it is missing and holds it for one server; yields the lock's descriptor.

    A server that inherits the descriptor holds the folder for as long as it lives, so nobody
    else writes to its file after its starter was killed. Raises ConfigError if another server
    has the folder.
    """
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(data / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(
            f"controller.data is {str(data)!r}, where nothing can be kept ({error.strerror}): "
            "name a folder that you can write to."
        ) from None
    try:
        _take(lock, data)
        yield lock
    finally:
        os.close(lock)


def _take(lock: int, data: Path) -> None:
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"controller.data is {str(data)!r}, which another running cluster uses: end "
                    "that one, or name another folder."
                ) from None
            time.sleep(LOCK_POLL_S)
