"""The transitions in `lua/`: loading them, and what their errors mean. A line `--- @include "name"`
stands for the file `lua/includes/name.lua`, once per script."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import redis

from pipespec.errors import (
    ControllerError,
    GraphError,
    LogFull,
    StaleEpoch,
    UnknownRequest,
    Unreachable,
    WritesRefused,
)
from pipespec.system.folders import resource_dir

# The one table of codes: the first word of an error that a transition replies.
ERRORS: Mapping[str, type[ControllerError]] = {
    "STALE": StaleEpoch,
    "GRAPH": GraphError,
    "REQUEST": UnknownRequest,
    "FULL": LogFull,
}


class ScriptsLost(ControllerError):
    """Redis does not know a transition any more. It has not run."""


# Why a Redis that answers writes nothing, and what helps; by the word with which it says so.
WRITES_REFUSED: Mapping[str, str] = {
    "OOM": "its memory is full (maxmemory): raise maxmemory, or let it evict other keys",
    "READONLY": "it is a read-only replica: name its primary",
    "MISCONF": "it cannot save its data to disk: look at its log, then free or correct its folder",
    "NOREPLICAS": "too few of its replicas are connected: start them",
}
# Errors that pass: a read waits at a server that becomes a replica; a user's script runs for long.
# (A replica without its primary has an exception of its own.)
_PASSING = ("UNBLOCKED", "BUSY")
_REFUSED = re.compile(rf"\b({'|'.join(WRITES_REFUSED)})\b")

_INCLUDE = re.compile(r'^--- @include "(\w+)"\n', re.MULTILINE)


@cache
def load_scripts() -> Mapping[str, str]:
    """The text of every transition by its name, includes resolved: one per file in `lua/`."""
    return {path.stem: resolve(path) for path in sorted(resource_dir("lua").glob("*.lua"))}


@cache
def _sha(script: str) -> str:
    """The name under which Redis runs a transition."""
    return hashlib.sha1(load_scripts()[script].encode()).hexdigest()


def resolve(path: Path) -> str:
    included: set[str] = set()

    def text(file: Path) -> str:
        return _INCLUDE.sub(include, file.read_text())

    def include(match: re.Match[str]) -> str:
        name = match[1]
        if name in included:
            return ""
        included.add(name)
        return text(path.parent / "includes" / f"{name}.lua")

    return text(path)


def evalsha(script: str, keys: Sequence[str], *arguments: Any) -> tuple[Any, ...]:
    return ("EVALSHA", _sha(script), len(keys), *keys, *arguments)


def translate(error: redis.ResponseError) -> ControllerError:
    if isinstance(error, redis.exceptions.NoScriptError):
        return ScriptsLost(
            "Redis has lost the scripts of this epoch (it was restarted, or its scripts were "
            "flushed); the next epoch loads them again."
        )
    code, _, detail = str(error).partition(" ")
    if code in _PASSING or isinstance(error, redis.exceptions.MasterDownError):
        return Unreachable(f"Redis does not answer now: {str(error).rstrip('.')}.")
    # A script's error has the word somewhere inside; the client takes the first two off.
    kinds = {redis.exceptions.OutOfMemoryError: "OOM", redis.exceptions.ReadOnlyError: "READONLY"}
    refused = _REFUSED.search(f"{kinds.get(type(error), '')} {error}")
    if refused:
        return WritesRefused(f"Redis refuses writes: {WRITES_REFUSED[refused[1]]}.")
    if code in ERRORS:
        return ERRORS[code](f"Redis refused: {detail}.")
    return ControllerError(f"Redis failed: {error}")
