"""When a host that does not answer is given up, and what the end of a program says."""

from __future__ import annotations

from pipespec.config.hosts import Host
from pipespec.errors import HostFailed

ALIVE_COUNT = 3  # that many unanswered questions, one a second, end a connection
NOTICED_AFTER = ALIVE_COUNT + 1  # seconds

NO_CONNECTION = 255  # as ssh says it; any other exit code is the remote program's
NOT_EXECUTABLE = 126
NOT_FOUND = 127


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


def late(host: Host, module: str, timeout: float) -> HostFailed:
    """The error for `module`, which has not ended in time."""
    return HostFailed(
        f"{host.name}: {module} did not answer within {timeout:g} s; check the load of the host "
        "and the link to it"
    )
