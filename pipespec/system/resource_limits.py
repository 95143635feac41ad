"""Checks that this machine lets the processes of a cluster write files and map memory."""

from __future__ import annotations

import os
import resource
import tempfile

from pipespec.errors import ConfigError

MIB = 2**20
# Logs, sockets and a private Redis' file of requests begin in the temporary folder.
ROOM_BYTES = 4 * MIB
# The size that this file and the largest log may reach.
FILE_BYTES = 16 * MIB
# Address space of a rank of the smallest model: what was measured is 1.25 GiB, torch and its
# threads for the most part, which no rank can do without.
ADDRESS_BYTES = 1200 * MIB
# The variables that Python reads to find the temporary folder, in this order.
VARIABLES = ("TMPDIR", "TEMP", "TMP")


def require_resources() -> None:
    """Raise ConfigError unless ulimits and the temporary folder let ranks start here."""
    _require_limit(resource.RLIMIT_AS, ADDRESS_BYTES, "map {} of memory", "a rank needs", "v")
    _require_limit(resource.RLIMIT_FSIZE, FILE_BYTES, "write files of {}", "a cluster needs", "f")
    require_temporary_folder()


def require_temporary_folder() -> None:
    """Raise ConfigError unless there is a temporary folder, and room in it. Python takes another
    folder where it cannot write to the one that is named; here that is an error."""
    for variable in VARIABLES:
        if folder := os.environ.get(variable):
            _require_folder(folder, f"{variable} is {folder!r}, where nothing can be written", True)
            return
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:
        raise ConfigError(
            "There is no temporary folder that can be written to (/tmp, /var/tmp, /usr/tmp and the "
            "current one were tried); set TMPDIR to a folder of yours that has room."
        ) from None
    _require_folder(folder, f"The temporary folder {folder!r} cannot be written to", False)


def _require_limit(kind: int, least: int, action: str, subject: str, option: str) -> None:
    limit = resource.getrlimit(kind)[0]
    if limit != resource.RLIM_INFINITY and limit < least:
        amount = f"{limit / MIB:.3g} MiB"
        raise ConfigError(
            f"This process may {action.format(amount)} at most, but {subject} {least / MIB:g} MiB "
            f"or more; raise the limit with `ulimit -{option}`."
        )


def _require_folder(folder: str, problem: str, named: bool) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            data = memoryview(bytes(ROOM_BYTES))
            while data:
                data = data[file.write(data) :]
    except OSError as error:
        remedy = "set it to" if named else "make room there, or set TMPDIR to"
        raise ConfigError(
            f"{problem} ({error.strerror}; {ROOM_BYTES // MIB} MiB are needed); {remedy} a folder "
            "of yours that has room."
        ) from None
