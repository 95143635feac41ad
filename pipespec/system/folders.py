"""The folders of files that are not Python: those that belong to pipespec, and the user's own."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

from pipespec.errors import ConfigError

# Where a source checkout has the folders that it does not have at its top level.
IN_CHECKOUT = {"prompts": Path("benchmarks", "data")}


def resource_dir(name: str) -> Path:
    """The folder `name` ("conf", "demo", "lua" or "prompts"). A wheel carries it as
    `pipespec/_<name>`; a source checkout has it at the top level, but for those of `IN_CHECKOUT`.
    Raises ConfigError."""
    package = Path(str(files("pipespec")))
    for folder in (package / f"_{name}", package.parent / IN_CHECKOUT.get(name, name)):
        if folder.is_dir():
            return folder
    raise ConfigError(
        f"The folder {name!r} that belongs to pipespec is missing beside {package}: "
        "install pipespec again."
    )


def home() -> Path:
    found = os.path.expanduser("~")
    if os.environ.get("HOME") == "" or not os.path.isabs(found):
        raise ConfigError(
            "The user has no home folder: set HOME, or XDG_STATE_HOME and XDG_CACHE_HOME."
        )
    return Path(found)


def state_folder() -> Path:
    """Files to keep: `$XDG_STATE_HOME/pipespec`, `~/.local/state/pipespec`. Raises ConfigError."""
    return _base("XDG_STATE_HOME", Path(".local", "state")) / "pipespec"


def cache_folder() -> Path:
    """Cached files: `$XDG_CACHE_HOME/pipespec`, `~/.cache/pipespec`. Raises ConfigError."""
    return _base("XDG_CACHE_HOME", Path(".cache")) / "pipespec"


def _base(variable: str, usual: Path) -> Path:
    chosen = os.environ.get(variable, "")
    return Path(chosen) if os.path.isabs(chosen) else home() / usual
