"""What two hosts compare of a checkpoint: hashes of its config, names and sizes of its files.

Nothing is downloaded and no weight is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipespec.engine.checkpoint.model_path import known_model
from pipespec.engine.formats.gguf import is_gguf
from pipespec.engine.formats.gguf_file import parts_of
from pipespec.engine.formats.safetensors_folder import SafetensorsFolder
from pipespec.engine.formats.safetensors_headers import CONFIG, INDEX, WEIGHTS
from pipespec.errors import ModelError
from pipespec.system.validation import (
    Missing,
    Unreadable,
    home_expanded,
    is_folder,
    read_bytes,
)

# Of a GGUF file so many bytes at its start, where its settings are, and at its end are compared.
GGUF_END = 2**16


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A checkpoint on a host.

    `problem` says in a clause why it cannot be used, or is None. `config` and `index` are SHA-256
    hashes of those files; `shards` has the sizes of the weight files by their names. `index` is
    None where a single file holds all weights.
    """

    folder: str
    problem: str | None
    config: str | None = None
    index: str | None = None
    shards: Mapping[str, int] | None = None


def fingerprint(model: str) -> Fingerprint:
    """The checkpoint in a folder, or in the hub's cache under a hub id; nothing is downloaded."""
    path = home_expanded(model)
    if not is_folder(path) and not (is_gguf(path) and path.is_file()):
        cached = known_model(model)
        if cached is None:
            return Fingerprint(model, "is missing")
        path = cached
    try:
        return _of_file(path) if is_gguf(path) else _of_folder(path)
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except Missing:
        problem = f"holds no {CONFIG}"
    except Unreadable as error:
        problem = f"cannot be read ({CONFIG}: {error})"
    except ModelError as error:
        problem = str(error)
    return Fingerprint(str(path), problem)


def _of_file(path: Path) -> Fingerprint:
    ends, size = b"", 0
    for part in parts_of(path):
        with part.open("rb") as stream:
            ends += stream.read(GGUF_END)
            stream.seek(max(part.stat().st_size - GGUF_END, 0))
            ends += stream.read(GGUF_END)
            size += part.stat().st_size
    return Fingerprint(str(path), None, _hash(ends), None, {"": size})  # any name on each host


def _of_folder(path: Path) -> Fingerprint:
    """Raises OSError, Unreadable of config.json, or ModelError with a clause."""
    config = read_bytes(path / CONFIG)
    try:
        files = SafetensorsFolder(path).weight_files() or (path / WEIGHTS,)
    except ModelError as error:
        raise ModelError(f"has no usable {INDEX}") from error
    if gone := [file.name for file in files if not file.is_file()]:
        others = f" and {len(gone) - 1} more of its files" if gone[1:] else ""
        raise ModelError(f"holds no {gone[0]}{others}")
    index = None if files == (path / WEIGHTS,) else _hash(read_bytes(path / INDEX))
    sizes = {file.name: file.stat().st_size for file in files}
    return Fingerprint(str(path), None, _hash(config), index, sizes)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
