"""Lets one agent of a name run on a host: a later one ends an earlier one."""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from pipespec.errors import ConfigError
from pipespec.system.files import lock_file
from pipespec.system.folders import state_folder
from pipespec.system.process_identity import find_process, is_ours, own_start_time

# Seconds until an agent that ignores SIGTERM is killed, and between two checks of it.
PATIENCE_S = 5.0
LOOK_S = 0.1


def runtime_folder() -> Path:
    """A folder for the locks of this user's processes; no other user can write to it.
    `$XDG_RUNTIME_DIR/pipespec`; without one, `run` in the folder of `state_folder`. Raises
    ConfigError if it cannot be used, or belongs to another user."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = Path(runtime, "pipespec") if os.path.isabs(runtime) else state_folder() / "run"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(
            f"The folder {str(folder)!r} cannot be used for locks ({error.strerror}); set "
            "XDG_RUNTIME_DIR to a folder of yours."
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"Others can write to {str(folder)!r}, where locks are kept; set XDG_RUNTIME_DIR to a "
            "folder of yours alone."
        )
    return folder


@contextmanager
def sole_agent(name: str | None) -> Iterator[None]:
    """End the process of that name, if there is one, and keep the name for the block. The lock's
    file names the holder; one that was killed leaves it to the next. Without a name nothing is
    locked. Raises ConfigError."""
    if name is None:
        yield
        return
    path = runtime_folder() / f"{name.replace('/', '_')}.lock"
    for other in set(path.parent.glob("*.lock")) - {path}:
        _remove_killed(other)
    deadline = time.monotonic() + PATIENCE_S
    while (descriptor := lock_file(path)) is None:
        with suppress(OSError, UnicodeError):
            holder = path.read_text().splitlines()
            if len(holder) == 2:
                kind = signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL
                _signal(holder[0], holder[1], kind)
        time.sleep(LOOK_S)
    with os.fdopen(descriptor, "r+", encoding="utf-8") as file:
        file.truncate()
        file.write(f"{os.getpid()}\n{own_start_time()}\n")
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _signal(pid: str, created: str, kind: signal.Signals) -> None:
    """Signal the process that wrote the lock, and no other that has its number by now."""
    with suppress(psutil.Error, OSError, ValueError):
        process = find_process(int(pid), float(created))
        if process is not None and is_ours(process):
            process.send_signal(kind)


def _remove_killed(lock: Path) -> None:
    """Remove the lock of an agent that was killed."""
    with suppress(OSError):
        if (descriptor := lock_file(lock)) is not None:
            lock.unlink()
            os.close(descriptor)
