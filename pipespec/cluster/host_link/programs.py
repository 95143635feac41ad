"""Starts our modules on the hosts of a cluster, and talks to them through pipes.

On this machine a program is a child process; on another host it runs over a connection to it
(`remote_program`), and is used as a child process is.

A command line is public on both machines, so no secret may be an argument or an environment
variable of a host: secrets go through standard input.

A program that is started here should end when its standard input ends, which is how it notices
that the launcher has ended. If the link is cut instead, the program counts as ended after
`failures.NOTICED_AFTER` seconds, and on the other host it must notice that by itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import IO, TYPE_CHECKING, Any, Self, TypeAlias

from pipespec.cluster.host_link import loop
from pipespec.cluster.host_link.failures import ALIVE_COUNT, failure, late
from pipespec.config.hosts import PYTHON, Host
from pipespec.errors import HostFailed

if TYPE_CHECKING:
    from pipespec.cluster.host_link.remote_program import RemoteProgram

    Program: TypeAlias = subprocess.Popen[bytes] | RemoteProgram


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
        # asyncssh takes a third of a second to import, for which a cluster of one host need not
        # wait.
        from pipespec.cluster.host_link.remote_program import RemoteProgram

        return RemoteProgram(host, words, stderr, alive_count)
    line, pipe = local_command(host, words), subprocess.PIPE
    try:
        return subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=stderr, **options)
    except (OSError, ValueError) as error:
        raise _cannot_run(host, line[0], error) from error


class Conversation:
    """A module that runs on a host and is asked in lines, until the block ends; it may take
    `ending_s` seconds to end. Raises HostFailed if it cannot even be started."""

    def __init__(self, host: Host, module: str, ending_s: float) -> None:
        self.host, self._module, self._ending_s = host, module, ending_s
        self._writing = threading.Lock()
        with ExitStack() as opened:
            self._errors = opened.enter_context(tempfile.TemporaryFile())
            self._process = start_module(host, module, stderr=self._errors)
            assert self._process.stdin is not None and self._process.stdout is not None
            self._input = self._process.stdin
            self._output = opened.enter_context(self._process.stdout)
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_input()
        if self.failure(self._ending_s) is None:
            self.end()
            self._process.wait()
        self._opened.close()

    def write(self, line: str) -> None:
        with self._writing, suppress(OSError, ValueError):  # its end is read from its output
            self._input.write(line.encode() + b"\n")
            self._input.flush()

    def close_input(self) -> None:
        with suppress(OSError):  # it has ended already
            self._input.close()

    def end(self) -> None:
        """End it at once; who waits for it gets an error."""
        self._process.kill()

    def failure(self, within_s: float) -> HostFailed | None:
        """Why it ends within so many seconds; None: it does not."""
        try:
            code = self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None
        self._errors.seek(0)
        return failure(self.host, self._module, code, self._errors.read())

    def silence(self) -> HostFailed:
        """Why its output has ended; so has it then."""
        found = self.failure(self._ending_s)
        self.end()
        return found or HostFailed(f"{self.host.name}: {self._module} answers no more")


def run_module(host: Host, module: str, *args: str, input: bytes = b"", timeout: float) -> bytes:  # noqa: A002
    """Runs `python -m module args` on the host to its end; returns its standard output.

    `input` becomes its standard input; `timeout` is in seconds.

    Raises HostFailed if the host cannot be reached, the program fails or the time is over.
    """
    words = [module, *args]
    if not host.local:
        return ask_hosts([(host, input)], words, timeout)[0]
    line = local_command(host, words)
    try:
        done = subprocess.run(line, input=input, capture_output=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise late(host, module, timeout) from None  # the original holds the output
    except (OSError, ValueError) as error:
        raise _cannot_run(host, line[0], error) from error
    if done.returncode != 0:
        raise failure(host, module, done.returncode, done.stderr)
    return done.stdout


def ask_hosts(
    asked: Sequence[tuple[Host, bytes]],
    words: Sequence[str],
    timeout: float,
    on_answer: Callable[[], object] = lambda: None,
) -> list[bytes]:
    """As `run_module` on several other hosts at the same time, each with its input, `on_answer`
    whenever one has ended. If one fails, or a signal comes, the programs on the others end."""
    if not asked:
        return []
    from pipespec.cluster.host_link.remote_program import answers

    return loop.call(answers(asked, words, timeout, on_answer))


def _cannot_run(host: Host, program: str, error: OSError | ValueError) -> HostFailed:
    if isinstance(error, FileNotFoundError):
        return HostFailed(f"{host.name}: there is no {program} here; set `python` of the host")
    why = error.strerror if isinstance(error, OSError) else error
    return HostFailed(f"{host.name}: {program} cannot be run ({why}); correct the hosts file")
