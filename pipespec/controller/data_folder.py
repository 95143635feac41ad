"""The folder in which a private Redis keeps its data from one start to the next. Besides the
append-only file it holds the identity of the server and the model of the requests."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pipespec.controller.certificate import Certificate
from pipespec.errors import ConfigError
from pipespec.system.files import lock_file, write_atomically
from pipespec.system.validation import Missing, Unreadable, from_fields, read_json

IDENTITY, MODEL = "server.json", "model.json"
LOCK = "server.lock"
# Files that a killed Redis leaves of what it had begun to write, there and in its subfolder.
PARTIAL = "temp-*", "*/temp-*"
# A server whose starter was killed needs this long to end.
LOCK_TIMEOUT_S = 5.0
LOCK_POLL_S = 0.02


@dataclass(frozen=True)
class Identity:
    """What clients know of a server: its password, its TCP port and its certificate, if any."""

    password: str = field(repr=False)
    port: int | None
    certificate: Certificate | None = None


def read_identity(data: Path) -> Identity | None:
    file = data / IDENTITY
    try:
        return from_fields(Identity, read_json(file))
    except Missing:
        return None
    except Unreadable:  # no message repeats what the file holds
        raise ConfigError(
            f"{file} cannot be read as the password, port and certificate of a server: remove it "
            "to have new ones."
        ) from None


def write_identity(data: Path, identity: Identity) -> None:
    write_atomically(data / IDENTITY, json.dumps(asdict(identity)).encode(), durable=True)


@dataclass(frozen=True)
class KeptModel:
    """The model of the requests in a folder, which only a cluster of the same model can finish.
    `target` describes its checkpoint and dtype; `context` counts tokens."""

    target: str
    context: int


def check_model(data: Path, model: KeptModel, remedy: str) -> None:
    """Raise ConfigError, with `remedy`, if a folder's requests are not for this model."""
    file = data / MODEL
    try:
        kept = from_fields(KeptModel, read_json(file))
    except Missing:
        return
    except Unreadable as error:
        raise ConfigError(
            f"{str(file)!r}, which names the model of the requests there, cannot be read "
            f"({error}); {remedy}."
        ) from None
    if kept.target != model.target:
        raise ConfigError(
            f"{str(data)!r} keeps requests to {kept.target}, but this cluster is of "
            f"{model.target}; {remedy}."
        )
    if kept.context > model.context:
        raise ConfigError(
            f"{str(data)!r} keeps requests to a cluster with a context of {kept.context} tokens, "
            f"but model.context is {model.context}; raise it, or {remedy}."
        )


def write_model(data: Path, model: KeptModel) -> None:
    write_atomically(data / MODEL, json.dumps(asdict(model)).encode(), durable=True)


def remove_partial(data: Path) -> None:
    """Removes the partial files of a killed server. The caller must hold the folder's lock."""
    for file in (each for pattern in PARTIAL for each in data.glob(pattern)):
        file.unlink(missing_ok=True)


@contextmanager
def locked(data: Path) -> Iterator[int]:
    """Makes the folder if it is missing and holds it for one server; yields the lock's descriptor.
    A server that inherits the descriptor holds the folder for as long as it lives, so no other
    server writes to its file after its starter was killed. Raises ConfigError if another server has
    the folder."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        while (lock := lock_file(data / LOCK)) is None:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"controller.data is {str(data)!r}, which another running cluster uses: end "
                    "that one, or name another folder."
                )
            time.sleep(LOCK_POLL_S)
    except OSError as error:
        raise ConfigError(
            f"controller.data is {str(data)!r}, where nothing can be kept ({error.strerror}): "
            "name a folder that you can write to."
        ) from None
    try:
        yield lock
    finally:
        os.close(lock)
