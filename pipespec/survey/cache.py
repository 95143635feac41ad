"""What was measured on this machine once: small JSON files in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipespec.errors import tell
from pipespec.system.reading import Unreadable, read_json, typed
from pipespec.system.resources import home


def cache_file(key: Mapping[str, Any]) -> Path:
    """Where the figures of a key are kept: below XDG_CACHE_HOME, or `~/.cache`."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache")
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache / "pipespec" / "measured" / f"{name}.json"


def recall(key: Mapping[str, Any]) -> dict[str, float] | None:
    """The figures of a key; None if there are none, or nothing that `keep` wrote."""
    try:
        kept: dict[str, float] = typed("it", read_json(cache_file(key)), Mapping[str, int | float])
    except Unreadable:
        return None
    return kept


def keep(key: Mapping[str, Any], figures: Mapping[str, float]) -> None:
    """Keep figures, whole or not at all. A folder that cannot be written costs time alone."""
    file = cache_file(key)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as stream:
            json.dump(figures, stream)
        os.replace(stream.name, file)
    except OSError as error:
        tell(f"pipespec: {file} cannot be written: {error.strerror}.")
