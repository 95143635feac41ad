"""What is slow to find out and depends on known things alone, kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from pipespec.errors import ConfigError
from pipespec.system.reading import Unreadable, build, parse_json, read_bytes, read_text
from pipespec.system.resources import cache_folder
from pipespec.system.writing import write_whole

# So many answers of a name are kept, those used last.
KEPT = 64
T = TypeVar("T")


def recall(name: str, depends: object) -> Any:
    """What `keep` was told before, None if nothing can be read."""
    try:
        file = _file(name, depends)
        found = parse_json(read_text(file))
        with suppress(OSError):
            os.utime(file)
    except (ConfigError, Unreadable):
        return None
    return found


def keep(name: str, depends: object, value: Any) -> None:
    """Keep a value, whole or not at all; a folder that cannot be written costs time alone.

    Args:
        name: the folder, of values of one kind.
        depends: all that the value depends on, as JSON can hold it.
    """
    with suppress(OSError, ConfigError):
        file = _file(name, depends)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(file, json.dumps(value).encode())
        by_use = sorted(file.parent.glob("*.json"), key=lambda other: other.stat().st_mtime)
        for old in by_use[:-KEPT]:
            old.unlink(missing_ok=True)


def remembered(name: str, kind: type[T], depends: object, make: Callable[[], T]) -> T:
    """What `make` returns, or returned before for the same `depends`: a dataclass `kind`, whose
    fields JSON can hold. What it raises is not kept."""
    try:
        return build(kind, recall(name, depends))
    except Unreadable:
        found = make()
        keep(name, depends, asdict(found))  # type: ignore[call-overload]
        return found


def digest(files: Iterable[Path]) -> dict[str, str]:
    """The names of these files and what is in them, for `depends`. Raises Unreadable."""
    return {file.name: hashlib.sha256(read_bytes(file)).hexdigest() for file in sorted(files)}


def _file(name: str, depends: object) -> Path:
    key = json.dumps([name, depends], sort_keys=True).encode()
    return cache_folder() / name / f"{hashlib.sha256(key).hexdigest()}.json"
