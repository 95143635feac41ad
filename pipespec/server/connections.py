"""How many connections a server holds at a time, in all and from one address.

A connection is busy if a whole request has arrived from it and its client reads the reply. When
there is no room for a new one, the one that has not been busy for longest is closed; so connections
that are held open for nothing cannot lock other clients out.
"""

from __future__ import annotations

import ipaddress
import resource
from collections import Counter
from typing import Any

from pipespec.errors import ConfigError

# File descriptors for all else: Redis, workers, files of the page, dashboards.
RESERVED_DESCRIPTORS = 64
# A server with fewer connections is of no use; with these it needs so many open files.
MIN_CONNECTIONS = 16
MIN_FILES = 108
Evictable = Any  # has `evict`, which closes it to make room
# How many open files a process asks for at most where nothing limits it.
MAX_FILES = 2**20
# Connections that may wait to be accepted.
BACKLOG = 2048
# The part of an IPv6 address that its holder does not choose.
NETWORK_BITS = 64


class ConnectionTable:
    """Admits up to `most` connections in all and `most_per_address` from one address."""

    def __init__(self, most: int, most_per_address: int):
        self._most = most
        self._most_per_address = most_per_address
        self._address: dict[Evictable, str] = {}
        self._count: Counter[str] = Counter()
        # In the order in which they became evictable.
        self._evictable: dict[Evictable, None] = {}

    def __len__(self) -> int:
        return len(self._address)

    def admit(self, connection: Evictable, host: str) -> bool:
        """Add a new connection, which may evict another; False: there is no room for it."""
        address = network_of(host)
        if self._count[address] >= self._most_per_address and not self._evict_one(address):
            return False
        if len(self._address) >= self._most and not self._evict_one(None):
            return False
        self._address[connection] = address
        self._count[address] += 1
        self._evictable[connection] = None
        return True

    def mark_busy(self, connection: Evictable) -> None:
        self._evictable.pop(connection, None)

    def mark_evictable(self, connection: Evictable) -> None:
        if connection in self._address:
            self._evictable.setdefault(connection)

    def remove(self, connection: Evictable) -> None:
        self._evictable.pop(connection, None)
        address = self._address.pop(connection, None)
        if address is not None:
            self._count[address] -= 1
            if not self._count[address]:
                del self._count[address]

    def _evict_one(self, address: str | None) -> bool:
        for connection in self._evictable:
            if address in (None, self._address[connection]):
                self.remove(connection)
                connection.evict()
                return True
        return False


def network_of(host: str) -> str:
    """The address by which connections are counted: IPv4's own, of IPv6 the network."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:  # a path, or nothing
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, NETWORK_BITS), strict=False))
    return str(address)


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
