"""Connections to a Redis whose URL holds the certificates to trust.

redis-py adds them to the authorities of the system, any of which could then vouch for a stranger
in between. Here they are all that is trusted.
"""

from __future__ import annotations

import functools
import socket
import ssl

from redis.asyncio.connection import SSLConnection as AsyncSSLConnection
from redis.connection import SSLConnection, parse_url

CERTIFICATES = "ssl_ca_data"
# With any other option of TLS a URL is the user's own, and redis-py does what it says.
OPTIONS = {CERTIFICATES, "ssl_check_hostname", "ssl_min_version"}


def is_pinned(url: str) -> bool:
    """Whether nothing but the certificates in a URL is trusted. Raises ValueError."""
    options = {name for name in parse_url(url) if name.startswith("ssl_")}
    return CERTIFICATES in options and options <= OPTIONS


class PinnedConnection(SSLConnection):
    """A connection of redis-py that trusts the certificates of its URL alone."""

    def _wrap_socket_with_ssl(self, sock: socket.socket) -> ssl.SSLSocket:
        context = _context_trusting(self.ca_data, self.check_hostname, self.ssl_min_version)
        return context.wrap_socket(sock, server_hostname=self.host)


class AsyncPinnedConnection(AsyncSSLConnection):
    """The same for an event loop."""

    async def _connect(self) -> None:
        # redis-py makes a context only where there is none.
        self.ssl_context.context = _context_trusting(
            self.ca_data, self.check_hostname, self.min_version
        )
        await super()._connect()


@functools.lru_cache(maxsize=16)
def _context_trusting(
    certificates: str, check_hostname: bool, min_version: int | None
) -> ssl.SSLContext:
    # Given certificates, this loads none of the system's.
    context = ssl.create_default_context(cadata=certificates)
    context.check_hostname = check_hostname
    if min_version is not None:
        context.minimum_version = ssl.TLSVersion(min_version)
    return context
