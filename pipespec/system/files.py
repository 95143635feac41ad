"""Files that other processes may read or write at the same time, locks that end with the process
that holds them, and a private temporary folder that is removed when all its users have ended, even
if killed. A killed process removes nothing. So a small helper process, `rm` behind a pipe, waits
until all processes that hold the pipe have ended: the creator, and the children that inherit it.
Where it was killed with them, as all processes of a host may be, the next such folder's creator
removes theirs, as the lock in it is free."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

# The longest path of a Unix socket is 103 bytes on macOS and 107 on Linux.
MAX_SOCKET = 103
_PREFIX, _LOCK = "pipespec-", "in-use.lock"
# `read` returns at the end of the pipe, as no process writes to it.
_REMOVER = 'read -r _; exec rm -rf -- "$0"'


def write_atomically(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write a file that only this user can read. A concurrent reader sees the old or the new
    content, never a part; with `durable`, which is slower, also after a loss of power. Raises
    OSError; then, and when it is interrupted, the file is unchanged."""
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".partial")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def lock_file(path: Path, *, wait: bool = False) -> int | None:
    """The descriptor of a file, made if need be, that is locked as long as it is open; None:
    another process holds it, and this must not `wait`. Raises OSError."""
    kind = fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, kind)
            if _is_at(path, descriptor):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder removed the file between our two calls


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _unused_path(longest_name: str) -> Path:
    name = f"{_PREFIX}{secrets.token_urlsafe(6)}"
    path = Path(tempfile.gettempdir(), name)
    return path if len(str(path / longest_name)) < MAX_SOCKET else Path("/tmp", name)


def _remove_abandoned() -> None:
    """Remove this user's folders whose creators and helpers were killed."""
    for parent in {tempfile.gettempdir(), "/tmp"}:
        for lock in Path(parent).glob(f"{_PREFIX}*/{_LOCK}"):
            with suppress(OSError):  # it is in use, or gone
                if lock.parent.lstat().st_uid == os.getuid():
                    descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                    try:
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(lock.parent, ignore_errors=True)
                    finally:
                        os.close(descriptor)


def _new_lock(path: Path) -> int:
    """The descriptor of a new file, which is locked from the moment it has its name."""
    descriptor, partial = tempfile.mkstemp(dir=path.parent)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.replace(partial, path)
    return descriptor


class TemporaryFolder:
    """A new folder of this user alone, with a path short enough for a socket of this name. `hold`
    is the descriptor for children to inherit; those that are forked do."""

    def __init__(self, longest_name: str = "") -> None:
        _remove_abandoned()
        self.folder = _unused_path(longest_name)
        read, self.hold = os.pipe()
        try:
            self._remover = subprocess.Popen(
                ["/bin/sh", "-c", _REMOVER, str(self.folder)],
                env={"PATH": os.defpath},
                stdin=read,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Signals to our group are not for it.
                start_new_session=True,
                cwd="/",
            )
            self.folder.mkdir(mode=0o700)  # never without what removes it
            self._lock = _new_lock(self.folder / _LOCK)
        except BaseException:
            os.close(self.hold)
            raise
        finally:
            os.close(read)

    def close(self, patience_s: float) -> None:
        """Release the folder, and remove it; children that hold it must have ended. Harmless when
        called again."""
        if self._remover.returncode is not None:
            return
        os.close(self.hold)
        with suppress(subprocess.TimeoutExpired):
            self._remover.wait(patience_s)
        self._remover.kill()
        self._remover.wait()
        # The helper may have been killed before its time.
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)
