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
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING, Any, TypeAlias

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
