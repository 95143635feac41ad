"""Starts our modules on the hosts of a cluster, through the system's own ssh.

On a host that has joined they are started through the connection that it has made (`join_server`).

`ssh` handles keys, agents, jump hosts and `~/.ssh/config`. A command line is public on both
machines, so no secret may be an argument or an environment variable of a host: secrets go through
standard input.

A program that is started here should end when its standard input ends, which is how it notices
that the launcher has ended. If the link is cut instead, the launcher's ssh ends within
`NOTICED_AFTER` seconds, and the program on the other host must notice that by itself.

`PIPESPEC_SSH_CONFIG` names a file to be used in place of `~/.ssh/config`.
"""

import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, Protocol, TypeVar

from pipespec.config.hosts import PYTHON, Host
from pipespec.errors import HostFailed

T = TypeVar("T")

CONFIG_VARIABLE = "PIPESPEC_SSH_CONFIG"
CONNECT_TIMEOUT = 5  # seconds until a host that does not answer counts as unreachable
ALIVE_INTERVAL = 1  # seconds between questions over a silent connection
ALIVE_COUNT = 3  # that many unanswered questions end it
NOTICED_AFTER = ALIVE_INTERVAL * (ALIVE_COUNT + 1)  # seconds

OPTIONS = (
    "BatchMode=yes",  # never ask for a password
    f"ConnectTimeout={CONNECT_TIMEOUT}",
    f"ServerAliveInterval={ALIVE_INTERVAL}",
    "ControlPath=none",  # a shared connection would have its master's idea of a dead link
    "ClearAllForwardings=yes",  # several connections to one host cannot forward one port
    "RemoteCommand=none",
)

SSH_FAILED = 255  # ssh's own exit code; any other is the remote program's
# What starts programs on a host that has joined: it has a connection of its own.
RELAY = "pipespec.cluster.join_relay"
NOT_EXECUTABLE = 126
NOT_FOUND = 127

# Parts of ssh's messages, and the remedies.
REMEDIES = (
    ("permission denied", "let this user's key in with `ssh-copy-id {to}`, or set `identity`"),
    ("too many authentication failures", "set `identity` of the host"),
    ("host key verification failed", "connect once by hand with `ssh {to}` to accept its key"),
    ("could not resolve", "correct `address` or `ssh` of the host"),
    ("connection refused", "start sshd there, or set `port` of the host"),
    ("no route to host", "check `address` and that the host is on this network"),
    ("network is unreachable", "check `address` and that the host is on this network"),
    ("timed out", "check that the host is up and that no firewall stops the port"),
    ("not responding", "check the host and the link to it"),
    ("identification exchange", "check that sshd listens on that port"),
)


def destination(host: Host) -> str:
    """What ssh connects to: the `ssh` entry of the host, or else its address."""
    return host.ssh or host.address


def command(host: Host, module: str, *args: str, alive_count: int = ALIVE_COUNT) -> list[str]:
    """The command line that runs `python -m module args` on the host.

    So many questions over a silent connection, one a second, may go unanswered.

    On this machine, without SSH, a `python` that is not given is the one that runs us.

    The host's environment comes with it. `~/` at the start of `python` or of a variable is
    the home folder of the user on that host. Port 22 is not spelled out, so that a port of
    `~/.ssh/config` stays in force.
    """
    if host.local:
        given = host.python != PYTHON
        python = os.path.expanduser(host.python) if given else sys.executable
        program = [python, "-m", module, *args]
        if not host.env:
            return program
        return [
            "env",
            *(f"{key}={os.path.expanduser(host.env[key])}" for key in host.env),
            *program,
        ]
    if (path := host.joined_through) is not None:
        return [sys.executable, "-m", RELAY, path, host.name, module, *args]
    line = ["ssh", "-T", "-a", "-x"]
    if config := os.environ.get(CONFIG_VARIABLE):
        line += ["-F", config]
    for option in (*OPTIONS, f"ServerAliveCountMax={alive_count}"):
        line += ["-o", option]
    if host.port != 22:
        line += ["-p", str(host.port)]
    if host.user is not None:
        line += ["-l", host.user]
    if host.identity is not None:
        line += ["-i", os.path.expanduser(host.identity), "-o", "IdentitiesOnly=yes"]
    return [*line, "--", destination(host), remote_line(host, [module, *args])]


def remote_line(host: Host, words: Sequence[str]) -> str:
    """The command for the shell of the host: `exec env K=V python -m` and the words, quoted."""
    variables = [f"{shlex.quote(key)}={_expanding(host.env[key])}" for key in host.env]
    env = ["env", *variables] if variables else []
    return " ".join(["exec", *env, _expanding(host.python), "-m", *map(shlex.quote, words)])


def _expanding(text: str) -> str:
    """The text quoted for a shell, but for `~/` at its start."""
    if text.startswith("~/"):
        return '"$HOME"/' + shlex.quote(text[2:])
    return shlex.quote(text)


def start_module(
    host: Host, module: str, *args: str, alive_count: int = ALIVE_COUNT, **options: Any
) -> subprocess.Popen[bytes]:
    """Starts `python -m module args` on the host; the options are those of `subprocess.Popen`.

    With `stdin=PIPE` the program's standard input ends with ours. When the process has
    ended, `failure` turns its exit code and its standard error into an error for users.

    Raises HostFailed if this machine has no ssh, or a local host no such python.
    """
    line = command(host, module, *args, alive_count=alive_count)
    try:
        return subprocess.Popen(line, **options)
    except (OSError, ValueError) as error:
        raise _cannot_run(host, line[0], error) from error


class RunModule(Protocol):
    """`run_module`, or that of several programs which end together."""

    def __call__(
        self,
        host: Host,
        module: str,
        *args: str,
        input: bytes = b"",  # noqa: A002
        timeout: float,
    ) -> bytes: ...


def run_module(host: Host, module: str, *args: str, input: bytes = b"", timeout: float) -> bytes:  # noqa: A002
    """Runs `python -m module args` on the host to its end; returns its standard output.

    `input` becomes its standard input; `timeout` is in seconds.

    Raises HostFailed if the host cannot be reached, the program fails or the time is over.
    """
    return _Programs().run(host, module, *args, input=input, timeout=timeout)


class _Programs:
    """Programs that several threads run on hosts, and that end together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._ended = False

    def run(self, host: Host, module: str, *args: str, input: bytes = b"", timeout: float) -> bytes:  # noqa: A002
        """As `run_module`. Raises HostFailed also once all were ended."""
        pipe = subprocess.PIPE
        with self._lock:
            if self._ended:
                raise HostFailed(f"{host.name}: {module} was not started")
            process = start_module(host, module, *args, stdin=pipe, stdout=pipe, stderr=pipe)
            self._running.add(process)
        try:
            with process:
                try:
                    output, errors = process.communicate(input, timeout)
                except BaseException:
                    process.kill()
                    raise
        except subprocess.TimeoutExpired:
            raise HostFailed(
                f"{host.name}: {module} did not answer within {timeout:g} s; "
                "check the load of the host and the link to it"
            ) from None  # the original holds the output
        finally:
            with self._lock:
                self._running.discard(process)
        if process.returncode != 0:
            raise failure(host, module, process.returncode, errors)
        return output

    def end(self) -> None:
        """End those that run, and start no more."""
        with self._lock:
            self._ended = True
            for process in self._running:
                process.kill()


def ask_hosts(hosts: Sequence[Host], ask: Callable[[RunModule, Host], T]) -> list[T]:
    """What `ask` returns for each host, all at the same time, with what it has to run programs by.
    If it raises for one, or a signal comes, the programs on the others end, and this raises the
    same."""
    programs = _Programs()
    with ThreadPoolExecutor(max(len(hosts), 1)) as pool:
        try:
            answers = [pool.submit(ask, programs.run, host) for host in hosts]
            for answer in wait(answers, return_when=FIRST_EXCEPTION).done:
                answer.result()
            return [answer.result() for answer in answers]
        except BaseException:
            programs.end()
            raise


def failure(host: Host, module: str, returncode: int, stderr: bytes) -> HostFailed:
    """The error for `module`, which has ended with `returncode` on the host."""
    line = _last_line(stderr)
    if returncode == SSH_FAILED and host.joined_through is not None:
        return HostFailed(
            f"{host.name}: {line or 'the connection was lost'}; run `pipespec join` there again, "
            "with a new token"
        )
    if returncode == SSH_FAILED and not host.local:
        message = line or "ssh ended without a message"
        return HostFailed(f"{host.name}: {message}; {_remedy(host, message)}")
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


def _last_line(stderr: bytes) -> str:
    lines = [line.strip() for line in stderr.decode(errors="replace").splitlines()]
    return next((line.rstrip(".") for line in reversed(lines) if line), "")


def _remedy(host: Host, message: str) -> str:
    to = destination(host) if host.user is None else f"{host.user}@{destination(host)}"
    lowered = message.lower()
    for sign, remedy in REMEDIES:
        if sign in lowered:
            return remedy.format(to=to)
    return f"try `ssh {to}` by hand"


def _cannot_run(host: Host, program: str, error: OSError | ValueError) -> HostFailed:
    if not isinstance(error, FileNotFoundError):
        why = error.strerror if isinstance(error, OSError) else error
        return HostFailed(f"{host.name}: {program} cannot be run ({why}); correct the hosts file")
    if program == "ssh":
        return HostFailed(f"{host.name}: this machine has no ssh; install OpenSSH's client")
    return HostFailed(f"{host.name}: there is no {program} here; set `python` of the host")
