"""Starts our modules on the hosts of a cluster, and talks to them through pipes. On this machine a
program is a child process; on another host it runs over a connection to it (`remote_program`), and
is used as a child process is.

A command line is public on both machines, so no secret may be an argument or an environment
variable of a host: secrets go through standard input. A program that is started here should end
when its standard input ends, which is how it notices that the launcher has ended. If the link is
cut instead, the program counts as ended after NOTICED_AFTER seconds, and on the other host it must
notice that by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, suppress
from typing import IO, TYPE_CHECKING, Any, Self, TypeAlias

from pipespec.cluster.host_link.calls import ALIVE_S, lines_of
from pipespec.cluster.host_link.loop import NO_CONNECTION
from pipespec.config.hosts import PYTHON, Host
from pipespec.errors import HostFailed, PipespecError
from pipespec.system.versions import has_own_protocol, own_version

if TYPE_CHECKING:
    from pipespec.cluster.host_link.remote_program import RemoteProgram

    Program: TypeAlias = subprocess.Popen[bytes] | RemoteProgram

ALIVE_COUNT = 3  # that many unanswered questions, one a second, end a connection
NOTICED_AFTER = ALIVE_COUNT + 1  # seconds
NOT_EXECUTABLE = 126
NOT_FOUND = 127


def start_module(
    host: Host,
    *words: str,
    stderr: IO[bytes],
    alive_count: int = ALIVE_COUNT,
    **options: Any,
) -> Program:
    """Start `python -m` and the words on the host, with pipes as standard input and output, and a
    file as standard error; when it has ended, `failure` turns its exit code and that file into an
    error for users. `alive_count`: so many questions over a silent connection, one a second, may go
    unanswered. `options`: those of `subprocess.Popen`, for a program of this machine. Raises
    HostFailed if a local host has no such python."""
    if not host.local:
        # asyncssh takes a third of a second to import, for which a cluster of one host need not
        # wait.
        from pipespec.cluster.host_link.remote_program import RemoteProgram

        return RemoteProgram(host, words, stderr, alive_count)
    # A `python` that is not given is the one that runs us.
    program = sys.executable if host.python == PYTHON else os.path.expanduser(host.python)
    env = (f"{key}={os.path.expanduser(host.env[key])}" for key in host.env)
    line = [*(["env", *env] if host.env else []), program, "-m", *words]
    pipe = subprocess.PIPE
    options.setdefault("start_new_session", True)  # Ctrl-C on the terminal is for us
    try:
        return subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=stderr, **options)
    except FileNotFoundError as error:
        raise HostFailed(
            f"{host.name}: there is no {line[0]} here; set `python` of the host"
        ) from error
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise HostFailed(
            f"{host.name}: {line[0]} cannot be run ({why}); correct the hosts file"
        ) from error


class Conversation:
    """A module that runs on a host and answers calls (`calls`), until the block ends; it may take
    `ending_s` seconds to end. Raises HostFailed if it cannot even be started."""

    def __init__(self, host: Host, module: str, ending_s: float) -> None:
        self.host, self._module, self._ending_s = host, module, ending_s
        self._writing, self._calling = threading.Lock(), threading.Lock()
        self._over = threading.Event()
        self._understood = False  # it has told its version, whose calls are known
        with ExitStack() as opened:
            self._errors = opened.enter_context(tempfile.TemporaryFile())
            self._process = start_module(host, module, stderr=self._errors)
            assert self._process.stdin is not None and self._process.stdout is not None
            self._input = self._process.stdin
            self._lines = lines_of(opened.enter_context(self._process.stdout))
            self._opened = opened.pop_all()
        threading.Thread(target=self._show_life, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_input()
        if self.failure(self._ending_s) is None:
            self.end()
            self._process.wait()
        self._opened.close()

    def call(self, do: str, /, **arguments: Any) -> Any:
        """What a function of the host returns. Raises what `refusal` makes of its sentence, or
        HostFailed if it answers no more, or is of another version."""
        with self._calling:
            self._write(json.dumps({"do": do, **arguments}))
            for line in self._lines:
                if not (found := message_in(line)):
                    continue
                if not self._understood:
                    self._require(found.get("version", "of another version"))
                elif "result" in found:
                    return found["result"]
                elif "error" in found:
                    raise self.refusal(found["error"])
                else:
                    self.noted(**found)
        raise self.failure(self._ending_s) or self._silent()

    def refusal(self, sentence: str) -> PipespecError:
        """The error for a call that the host refuses."""
        return HostFailed(f"{self.host.name}: {sentence}")

    def noted(self, **said: Any) -> None:
        """The host tells something before it answers."""

    def close_input(self) -> None:
        self._over.set()
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

    def _require(self, version: str) -> None:
        if not has_own_protocol(version):
            raise HostFailed(
                f"{self.host.name}: pipespec there is {version}, but that of the launcher is "
                f"{own_version()}; install the same on all hosts"
            )
        self._understood = True

    def _silent(self) -> HostFailed:
        self.end()
        return HostFailed(f"{self.host.name}: {self._module} answers no more")

    def _write(self, line: str) -> None:
        with self._writing, suppress(OSError, ValueError):  # its end is read from its output
            self._input.write(line.encode() + b"\n")
            self._input.flush()

    def _show_life(self) -> None:
        while not self._over.wait(ALIVE_S):
            self._write("")


def message_in(line: bytes) -> dict[str, Any] | None:
    """What a program says in a line; None: a login script, or a module that it imports, may have
    printed it."""
    with suppress(ValueError):
        if isinstance(found := json.loads(line), dict):
            return found
    return None


def failure(host: Host, module: str, returncode: int, stderr: bytes) -> HostFailed:
    """The error for `module`, which has ended with `returncode` on the host."""
    lines = [line.strip() for line in stderr.decode(errors="replace").splitlines()]
    line = next((line.rstrip(".") for line in reversed(lines) if line), "")
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
