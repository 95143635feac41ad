"""Results of slow computations with known inputs, cached in files of the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from pipespec.errors import ConfigError
from pipespec.system.files import write_atomically
from pipespec.system.folders import cache_folder
from pipespec.system.validation import (
    Missing,
    Unreadable,
    from_fields,
    parse_json,
    read_bytes,
    read_text,
)

# How many of the most recently used results of each kind are kept.
MAX_RESULTS = 64
T = TypeVar("T")
log = logging.getLogger(__name__)


def cache_compiled_code() -> None:
    """Have torch store compiled code in the user's cache folder, if that can be written.
    By default torch makes a folder in the temporary one wherever its compiler is imported."""
    with suppress(OSError, ConfigError):
        folder = cache_folder() / "compiled"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def load_cached(name: str, depends: object) -> Any:
    """The value that `store_cached` has stored; None: there is none that can be read."""
    try:
        file = _file(name, depends)
        found = parse_json(read_text(file))
        with suppress(OSError):
            os.utime(file)
    except (ConfigError, Missing):
        return None
    except Unreadable as error:
        log.warning("%s is ignored, as it cannot be read: %s.", file, error)
        return None
    return found


def store_cached(name: str, depends: object, value: Any) -> None:
    """Store a value of the kind `name`, unless the folder cannot be written. `depends`: everything
    that the value depends on, in types that JSON can represent."""
    with suppress(OSError, ConfigError):
        file = _file(name, depends)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(file, json.dumps(value).encode())
        by_use = sorted(file.parent.glob("*.json"), key=lambda other: other.stat().st_mtime)
        for old in by_use[:-MAX_RESULTS]:
            old.unlink(missing_ok=True)


def cached_call(
    name: str, kind: type[T], depends: object, function: Callable[..., T], *args: Any
) -> T:
    try:
        return from_fields(kind, load_cached(name, depends))
    except Unreadable:
        found = function(*args)
        store_cached(name, depends, asdict(found))  # type: ignore[call-overload]
        return found


def digest(files: Iterable[Path]) -> dict[str, str]:
    """The names and SHA-256 hashes of these files, for `depends`. Raises Unreadable."""
    return {file.name: hashlib.sha256(read_bytes(file)).hexdigest() for file in sorted(files)}


def _file(name: str, depends: object) -> Path:
    key = json.dumps([name, depends], sort_keys=True).encode()
    return cache_folder() / name / f"{hashlib.sha256(key).hexdigest()}.json"
