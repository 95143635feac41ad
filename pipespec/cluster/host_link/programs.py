"""Starts our modules on the hosts of a cluster, and talks to them through pipes.

On this machine a program is a child process. On a host of a hosts file it runs over an SSH
connection of its own (`connection`), and on one that has joined over the connection that the host
has made (`host_session`); both are asyncssh's, and used as a child process is.

A command line is public on both machines, so no secret may be an argument or an environment
variable of a host: secrets go through standard input.

A program that is started here should end when its standard input ends, which is how it notices
that the launcher has ended. If the link is cut instead, the program counts as ended after
`NOTICED_AFTER` seconds, and on the other host it must notice that by itself.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, suppress
from typing import IO, TYPE_CHECKING, Any

from pipespec.cluster.host_link import loop
from pipespec.config.hosts import PYTHON, Host
from pipespec.errors import HostFailed

if TYPE_CHECKING:
    from asyncssh import SSHReader, SSHWriter

    from pipespec.cluster.host_link.connection import Connection

ALIVE_COUNT = 3  # that many unanswered questions, one a second, end a connection
NOTICED_AFTER = ALIVE_COUNT + 1  # seconds

NO_CONNECTION = 255  # as ssh says it; any other exit code is the remote program's
CHUNK_BYTES = 2**16
NOT_EXECUTABLE = 126
NOT_FOUND = 127


def _connected(host: Host, alive_count: int) -> AbstractAsyncContextManager[Connection]:
    # asyncssh takes a third of a second to import, which a cluster of one host need not wait for.
    from pipespec.cluster.host_link import connection, host_session

    if host.has_joined:
        return host_session.connected(host)
    return connection.connected(host, alive_count)


def _command(host: Host, words: Sequence[str]) -> str:
    """What asks another host to run a module; a host that has joined knows how by itself."""
    return shlex.join(words) if host.has_joined else remote_line(host, words)


def local_command(host: Host, words: Sequence[str]) -> list[str]:
    """The command line that runs `python -m` and the words here, with the host's environment.

    A `python` that is not given is the one that runs us.
    """
    given = host.python != PYTHON
    program = [os.path.expanduser(host.python) if given else sys.executable, "-m", *words]
    if not host.env:
        return program
    env = (f"{key}={os.path.expanduser(host.env[key])}" for key in host.env)
    return ["env", *env, *program]


def remote_line(host: Host, words: Sequence[str]) -> str:
    """The command for the shell of the host: `exec env K=V python -m` and the words, quoted.

    `~/` at the start of `python` or of a variable is the home folder of the user on that host.
    """
    variables = [f"{shlex.quote(key)}={_expanding(host.env[key])}" for key in host.env]
    env = ["env", *variables] if variables else []
    return " ".join(["exec", *env, _expanding(host.python), "-m", *map(shlex.quote, words)])


def _expanding(text: str) -> str:
    """The text quoted for a shell, but for `~/` at its start."""
    if text.startswith("~/"):
        return '"$HOME"/' + shlex.quote(text[2:])
    return shlex.quote(text)


class RemoteProgram:
    """A program on another host, with what callers use of `subprocess.Popen`.

    Args:
        connected: enters a connection to the host.
        stderr: a file for its standard error.

    Attributes:
        returncode: its exit code, minus the number of the signal that ended it, or NO_CONNECTION,
            and then the last line of its standard error says why; None: it runs.
    """

    def __init__(
        self,
        connected: AbstractAsyncContextManager[Connection],
        command: str,
        stderr: IO[bytes],
    ) -> None:
        self.returncode: int | None = None
        self._ended = threading.Event()
        (near_stdin, stdin), (near_stdout, stdout) = socket.socketpair(), socket.socketpair()
        self.stdin, self.stdout = near_stdin.makefile("wb"), near_stdout.makefile("rb")
        for near in (near_stdin, near_stdout):
            near.close()  # once its file is closed
        self._run = loop.start(_run(connected, command, stdin, stdout, stderr))
        self._run.add_done_callback(self._end)

    def poll(self) -> int | None:
        """`returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """`returncode`, once it has ended. Raises TimeoutExpired."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("a program on another host", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """Hang up, upon which the host ends it."""
        self._run.cancel()

    def _end(self, run: Future[int]) -> None:
        self.returncode = -signal.SIGKILL if run.cancelled() else run.result()
        self._ended.set()


Program = subprocess.Popen[bytes] | RemoteProgram


async def _run(
    connected: AbstractAsyncContextManager[Connection],
    command: str,
    stdin: socket.socket,
    stdout: socket.socket,
    stderr: IO[bytes],
) -> int:
    """Run a program between two sockets of this process; its `returncode`."""
    from pipespec.cluster.host_link.connection import FAILURES, clause_of, pump, require_end

    given, stdin_writer = await asyncio.open_connection(sock=stdin)
    _, taken = await asyncio.open_connection(sock=stdout)
    try:
        async with connected as (connection, peer):
            process = await connection.create_process(command, encoding=None, request_pty=False)
            feeding = asyncio.create_task(_feed(given, process.stdin))
            try:
                await asyncio.gather(pump(process.stdout, taken), _keep(process.stderr, stderr))
                await process.wait_closed()
            finally:
                feeding.cancel()
                process.close()
            return require_end(process.returncode, peer)
    except FAILURES as error:
        stderr.write(f"\n{clause_of(error)}\n".encode())
        return NO_CONNECTION
    finally:
        stderr.flush()
        stdin_writer.close()
        taken.close()


async def _feed(given: asyncio.StreamReader, stdin: SSHWriter[bytes]) -> None:
    from pipespec.cluster.host_link.connection import FAILURES, pump

    await pump(given, stdin)
    with suppress(*FAILURES):
        stdin.write_eof()


async def _keep(source: SSHReader[bytes], file: IO[bytes]) -> None:
    from pipespec.cluster.host_link.connection import FAILURES

    with suppress(*FAILURES):
        while chunk := await source.read(CHUNK_BYTES):
            file.write(chunk)


def start_module(
    host: Host,
    module: str,
    *args: str,
    stderr: IO[bytes],
    alive_count: int = ALIVE_COUNT,
    **options: Any,
) -> Program:
    """Starts `python -m module args` on the host, with pipes as standard input and output, and a
    file as standard error.

    When it has ended, `failure` turns its exit code and its standard error into an error for users.

    Args:
        alive_count: so many questions over a silent connection, one a second, may go unanswered.
        options: those of `subprocess.Popen`, for a program of this machine.

    Raises HostFailed if a local host has no such python.
    """
    words = [module, *args]
    if not host.local:
        return RemoteProgram(_connected(host, alive_count), _command(host, words), stderr)
    line, pipe = local_command(host, words), subprocess.PIPE
    try:
        return subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=stderr, **options)
    except (OSError, ValueError) as error:
        raise _cannot_run(host, line[0], error) from error


def run_module(host: Host, module: str, *args: str, input: bytes = b"", timeout: float) -> bytes:  # noqa: A002
    """Runs `python -m module args` on the host to its end; returns its standard output.

    `input` becomes its standard input; `timeout` is in seconds.

    Raises HostFailed if the host cannot be reached, the program fails or the time is over.
    """
    words = [module, *args]
    if not host.local:
        return loop.call(_answer(host, words, input, timeout))
    line = local_command(host, words)
    try:
        done = subprocess.run(line, input=input, capture_output=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise _late(host, module, timeout) from None  # the original holds the output
    except (OSError, ValueError) as error:
        raise _cannot_run(host, line[0], error) from error
    if done.returncode != 0:
        raise failure(host, module, done.returncode, done.stderr)
    return done.stdout


def ask_hosts(
    asked: Sequence[tuple[Host, bytes]],
    module: str,
    timeout: float,
    on_answer: Callable[[], None],
) -> list[bytes]:
    """As `run_module` on several other hosts at the same time, each with its input, `on_answer`
    whenever one has ended. If one fails, or a signal comes, the programs on the others end."""

    async def together() -> list[bytes]:
        tasks = [
            asyncio.create_task(_answer(host, [module], given, timeout)) for host, given in asked
        ]
        for task in tasks:
            task.add_done_callback(lambda _: on_answer())
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    return loop.call(together())


async def _answer(host: Host, words: Sequence[str], given: bytes, timeout: float) -> bytes:
    from pipespec.cluster.host_link.connection import FAILURES, clause_of, require_end

    try:
        async with (
            asyncio.timeout(timeout),
            _connected(host, ALIVE_COUNT) as (connection, peer),
        ):
            done = await connection.run(
                _command(host, words), input=given, encoding=None, request_pty=False
            )
            code = require_end(done.returncode, peer)
    except TimeoutError:
        raise _late(host, words[0], timeout) from None
    except FAILURES as error:
        raise failure(host, words[0], NO_CONNECTION, clause_of(error).encode()) from error
    if code != 0:
        raise failure(host, words[0], code, done.stderr)
    return done.stdout


def failure(host: Host, module: str, returncode: int, stderr: bytes) -> HostFailed:
    """The error for `module`, which has ended with `returncode` on the host."""
    line = _last_line(stderr)
    if returncode == NO_CONNECTION and host.has_joined:
        line += "; run `pipespec join` there again, with a new token"
    if returncode == NO_CONNECTION and not host.local:
        return HostFailed(f"{host.name}: {line}")
    if returncode in (NOT_EXECUTABLE, NOT_FOUND):
        return HostFailed(
            f"{host.name}: {line or 'python not found'}; set `python` of the host, "
            f"now {host.python}"
        )
    if "No module named" in line:
        return HostFailed(
            f"{host.name}: {line}; install pipespec there, or set `python` of the host to the "
            "environment that has it"
        )
    ended = f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
    return HostFailed(f"{host.name}: {module} ended with {ended}: {line or 'without a message'}")


def _late(host: Host, module: str, timeout: float) -> HostFailed:
    return HostFailed(
        f"{host.name}: {module} did not answer within {timeout:g} s; check the load of the host "
        "and the link to it"
    )


def _last_line(stderr: bytes) -> str:
    lines = [line.strip() for line in stderr.decode(errors="replace").splitlines()]
    return next((line.rstrip(".") for line in reversed(lines) if line), "")


def _cannot_run(host: Host, program: str, error: OSError | ValueError) -> HostFailed:
    if isinstance(error, FileNotFoundError):
        return HostFailed(f"{host.name}: there is no {program} here; set `python` of the host")
    why = error.strerror if isinstance(error, OSError) else error
    return HostFailed(f"{host.name}: {program} cannot be run ({why}); correct the hosts file")
