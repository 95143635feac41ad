"""A program on another host: over an SSH connection of its own on one of a hosts file
(`connection`), and on one that has joined over the connection that the host has made
(`host_session`)."""

from __future__ import annotations

import asyncio
import shlex
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import IO

import asyncssh

from pipespec.cluster.host_link import host_session, loop
from pipespec.cluster.host_link.connection import (
    CHUNK_BYTES,
    FAILURES,
    connected,
    pump,
    reason_of,
    run_command,
)
from pipespec.cluster.host_link.loop import NO_CONNECTION
from pipespec.config.hosts import Host


class RemoteProgram:
    """A program on another host, with what callers use of `subprocess.Popen`. `words`: what follows
    `python -m` there. `stderr`: a file for its standard error. `alive_count`: see `start_module`.
    `returncode`: its exit code, minus the number of the signal that ended it, or NO_CONNECTION, and
    then the last line of its standard error says why; None: it runs."""

    def __init__(
        self, host: Host, words: Sequence[str], stderr: IO[bytes], alive_count: int
    ) -> None:
        self.returncode: int | None = None
        self._ended = threading.Event()
        (near_stdin, stdin), (near_stdout, stdout) = socket.socketpair(), socket.socketpair()
        self.stdin, self.stdout = near_stdin.makefile("wb"), near_stdout.makefile("rb")
        for near in (near_stdin, near_stdout):
            near.close()  # once its file is closed
        self._run = loop.start(_run(host, words, alive_count, stdin, stdout, stderr))
        self._run.add_done_callback(self._end)

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("a program on another host", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """Hang up, upon which the host ends it."""
        self._run.cancel()

    def _end(self, run: Future[int]) -> None:
        if run.cancelled():
            self.returncode = -signal.SIGKILL
        else:
            self.returncode = NO_CONNECTION if run.exception() else run.result()
        self._ended.set()


async def _run(
    host: Host,
    words: Sequence[str],
    alive_count: int,
    stdin: socket.socket,
    stdout: socket.socket,
    stderr: IO[bytes],
) -> int:
    """Run a program between two sockets of this process; its `returncode`."""
    given, stdin_writer = await asyncio.open_connection(sock=stdin)
    _, taken = await asyncio.open_connection(sock=stdout)
    # A host that has joined knows by itself how a module is run.
    command = shlex.join(words) if host.has_joined else remote_line(host, words)
    link = host_session.connected(host) if host.has_joined else connected(host, alive_count)
    try:
        async with link as (connection, peer):
            process = await run_command(connection, command)
            feeding = asyncio.create_task(_feed(given, process.stdin))
            try:
                await asyncio.gather(pump(process.stdout, taken), _keep(process.stderr, stderr))
                await process.wait_closed()
            finally:
                feeding.cancel()
                process.close()
            return peer.require(process.returncode)
    except FAILURES as error:
        stderr.write(f"\n{reason_of(error)}\n".encode())
        return NO_CONNECTION
    finally:
        stdin_writer.close()
        taken.close()
        with suppress(ValueError):  # it is closed, as it is not waited for
            stderr.flush()


async def _feed(given: asyncio.StreamReader, stdin: asyncssh.SSHWriter[bytes]) -> None:
    await pump(given, stdin)
    with suppress(*FAILURES):
        stdin.write_eof()


async def _keep(source: asyncssh.SSHReader[bytes], file: IO[bytes]) -> None:
    with suppress(*FAILURES):
        while chunk := await source.read(CHUNK_BYTES):
            file.write(chunk)


def remote_line(host: Host, words: Sequence[str]) -> str:
    """The command for the shell of the host: `exec env K=V python -m` and the words, quoted. `~/`
    at the start of `python` or of a variable is the home folder of the user on that host."""
    variables = [f"{shlex.quote(key)}={_expanding(host.env[key])}" for key in host.env]
    env = ["env", *variables] if variables else []
    return " ".join(["exec", *env, _expanding(host.python), "-m", *map(shlex.quote, words)])


def _expanding(text: str) -> str:
    if text.startswith("~/"):
        return '"$HOME"/' + shlex.quote(text[2:])
    return shlex.quote(text)
