"""The file by which `pipespec upgrade` asks the launcher of a cluster to replace its hosts'
processes, and by which the launcher reports what it has done.

It is beside the entry of the cluster. The command writes it once; from then on the launcher does,
until the upgrade is over.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pipespec.client.registry import UPGRADE, folder, kept_folder
from pipespec.errors import ConfigError
from pipespec.system.atomic_write import write_atomically
from pipespec.system.validation import Missing, Unreadable, from_fields, read_json


class UpgradePhase(StrEnum):
    """How far an upgrade is."""

    ASKED = "asked"
    RUNNING = "running"
    OVER = "over"


@dataclass(frozen=True)
class HostUpgrade:
    """A host that was replaced, its version, and the seconds that this took."""

    host: str
    version: str
    seconds: float


@dataclass(frozen=True)
class UpgradeStatus:
    """An upgrade. `problem` says why it has ended early."""

    phase: str = UpgradePhase.ASKED
    done: tuple[HostUpgrade, ...] = ()
    problem: str | None = None


def write(name: str, status: UpgradeStatus) -> None:
    """Write the status of the upgrade of a cluster. Raises ConfigError."""
    with kept_folder():
        write_atomically(file_of(name), json.dumps(asdict(status)).encode())


def read(name: str) -> UpgradeStatus | None:
    """The status; None: there is no upgrade. Raises ConfigError."""
    file = file_of(name)
    found = _parsed(file)
    try:
        return None if found is None else from_fields(UpgradeStatus, found)
    except Unreadable as error:
        raise _damaged(file, error) from error


def is_asked(name: str) -> bool:
    """Whether a command waits for an upgrade to begin. It may be of a newer version, so what else
    the file says is not read. Raises ConfigError."""
    found = _parsed(file_of(name))
    return isinstance(found, dict) and found.get("phase") == UpgradePhase.ASKED


def remove(name: str) -> None:
    """Remove the file, if there is one."""
    file_of(name).unlink(missing_ok=True)


def file_of(name: str) -> Path:
    """The file of a cluster's upgrade."""
    return folder() / (name + UPGRADE)


def _parsed(file: Path) -> Any:
    """The JSON value of a file; None: there is none. Raises ConfigError."""
    try:
        return read_json(file)
    except Missing:
        return None
    except Unreadable as error:
        raise _damaged(file, error) from error


def _damaged(file: Path, why: Unreadable) -> ConfigError:
    return ConfigError(f"The file {str(file)!r} cannot be read ({why}); remove it.")
