"""The version of pipespec and its code, and the versions of other packages."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path

from pipespec.system.folders import resource_dir

# The number of what the processes of a cluster send to one another: jobs and messages of agents,
# calls of hosts (weights and probes), batches, and what is in Redis. Raise it when a process of the
# version before would not understand this one; tests/unit/system/test_protocol.py says when that
# may be.
PROTOCOL = 5
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


@cache
def own_version() -> str:
    """The version of pipespec, its protocol and a hash of its code, in one line, as they were when
    it was first asked for: the files of a running process may be replaced. All hosts of a cluster
    start with the same."""
    version = package_version("pipespec") or "(not installed)"
    return f"{version}, protocol {PROTOCOL}, code {code_hash()[:SHORT]}"


def has_own_protocol(version: str) -> bool:
    found = re.search(r", protocol (\d+), code ", version)
    return found is not None and int(found[1]) == PROTOCOL
