"""The socket of a server and how many connections it can hold, which a command checks first."""

from __future__ import annotations

import resource
import socket
from contextlib import ExitStack

from pipespec.errors import ConfigError
from pipespec.system.network_interfaces import address_infos

# File descriptors for all else: Redis, workers, files of the page, dashboards.
RESERVED_DESCRIPTORS = 64
# A server with fewer connections is of no use; with these it needs so many open files.
MIN_CONNECTIONS = 16
MIN_FILES = 108
# How many open files a process asks for at most where nothing limits it.
MAX_FILES = 2**20
# Connections that may wait to be accepted.
BACKLOG = 2048


def bind_listener(host: str, port: int) -> socket.socket:
    """A socket for requests, which does not listen yet. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = address_infos(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with ExitStack() as unless_bound:
            listener = unless_bound.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            unless_bound.pop_all()
    except OSError as error:
        raise ConfigError(
            f"Nothing can listen at {host!r}, port {port} ({error.strerror}); choose another "
            "--host or --port."
        ) from None
    return listener


def connection_capacity(wanted: int) -> tuple[int, int]:
    """How many of `wanted` connections this process can hold, and how many more may wait to be
    accepted. Raises its limit of open files for them as far as possible; ConfigError if that is too
    low for a server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else hard
    needed = min(wanted + BACKLOG + RESERVED_DESCRIPTORS, most)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        soft = needed
    if soft == resource.RLIM_INFINITY:
        return wanted, BACKLOG
    backlog = min(BACKLOG, soft // 4)
    capacity = min(wanted, soft - backlog - RESERVED_DESCRIPTORS)
    if capacity < min(wanted, MIN_CONNECTIONS):
        raise ConfigError(
            f"This process may open {soft} files, but a server needs {MIN_FILES} at least; raise "
            "the limit (ulimit -n)."
        )
    return capacity, backlog
