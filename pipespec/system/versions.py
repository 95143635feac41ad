"""The version of pipespec and its code, and the versions of other packages."""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path

from pipespec.system.folders import resource_dir

# How many characters of a hash are shown.
SHORT = 8


def package_version(name: str) -> str | None:
    """The installed version, None if the package is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def code_hash() -> str:
    """SHA-256 of the package's own code: two checkouts of one version may differ."""
    digest = hashlib.sha256()
    package = Path(str(files("pipespec")))
    for folder, pattern in ((package, "**/*.py"), (resource_dir("lua"), "**/*.lua")):
        for file in sorted(folder.glob(pattern)):
            digest.update(f"{file.relative_to(folder)}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def own_version() -> str:
    """The version of pipespec and a hash of its code, in one line, which must be equal in all
    processes of a cluster."""
    return f"{package_version('pipespec') or '(not installed)'}, code {code_hash()[:SHORT]}"
