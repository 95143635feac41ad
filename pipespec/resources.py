"""Where the files that are not Python lie: `lua/` and `conf/`."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from pipespec.errors import ConfigError


def resource_dir(name: str) -> Path:
    """The folder `name` ("lua" or "conf").

    A wheel carries it as `pipespec/_<name>`; a source checkout has it at the top level.
    Raises ConfigError.
    """
    package = Path(str(files("pipespec")))
    for folder in (package / f"_{name}", package.parent / name):
        if folder.is_dir():
            return folder
    raise ConfigError(
        f"The folder {name!r} that belongs to pipespec is missing beside {package}: "
        "install pipespec again."
    )
