"""One connection to Redis on which commands are sent without waiting for their replies."""

from __future__ import annotations

import functools
import re
import secrets
import socket
import ssl
from typing import Any, Self

import redis
from redis.asyncio.connection import SSLConnection as AsyncSSLConnection
from redis.backoff import NoBackoff
from redis.connection import (
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
    parse_url,
)
from redis.retry import Retry

from pipespec.controller.lua_scripts import load_scripts, translate
from pipespec.controller.redis_keys import RedisKeys
from pipespec.errors import ConfigError, ControllerError, Unreachable, WritesRefused

MIN_VERSION = (6, 0)
# A key that tries whether writes are taken is gone after so many seconds, whatever happens.
PROBE_S = 60
# A Redis that takes longer to connect or to answer is taken for dead. Long, as it may wait for a
# processor or for a disk; a link that is cut is noticed earlier.
ANSWER_TIMEOUT_S = 10.0
# A link that is cut is noticed within about this time and one second more, also by who only
# listens: silence is probed every second, and what is not acknowledged in time ends it.
LINK_TIMEOUT_S = 3
PROBES = {
    getattr(socket, name): value
    for name, value in (
        ("TCP_KEEPIDLE", 1),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", LINK_TIMEOUT_S),
        ("TCP_USER_TIMEOUT", 1000 * LINK_TIMEOUT_S),
    )
    if hasattr(socket, name)  # as far as the system has them
}
# How often to look whether a Redis that is away has come back.
RETRY_S = 0.05
# Where a URL holds the certificates to trust. redis-py adds them to the authorities of the system,
# any of which could then vouch for a stranger in between; here they are all that is trusted. With
# any other option of TLS a URL is the user's own, and redis-py does what it says.
CERTIFICATES = "ssl_ca_data"
PINNED_OPTIONS = {CERTIFICATES, "ssl_check_hostname", "ssl_min_version"}


class RedisConnection:
    """A connection whose replies are read in order, when somebody wants them. Not for several
    threads. Raises Unreachable whenever Redis is gone."""

    def __init__(self, url: str, timeout: float = ANSWER_TIMEOUT_S):
        self._url = url
        self._timeout = timeout
        self._owed = 0  # replies that Redis still owes to `send`
        self._answered = False  # whether Redis has replied on this connection
        pool = ConnectionPool.from_url(url, retry=Retry(NoBackoff(), 0), **options_of(url, timeout))
        if is_pinned(url):
            pool.connection_class = PinnedConnection
        self._connection = pool.make_connection()
        try:
            self._connection.connect()
        except (redis.RedisError, OSError) as error:
            raise explain(url, error, timeout) from None

    def send(self, *command: Any) -> None:
        """Sends a command; `drain` or `call` will see its reply."""
        # A connection that was lost would silently be made anew, its replies gone.
        if not self._connection.is_connected:
            raise _lost(self._url)
        try:
            packed = self._connection.pack_command(*command)
            self._connection.send_packed_command(packed, check_health=False)
        except (redis.RedisError, OSError) as error:
            raise self._explained(error) from None
        self._owed += 1

    def drain(self) -> None:
        """Reads the replies that have come. Raises what the first error among them means."""
        while self._owed and self.readable():
            self.read()

    def load_scripts(self) -> None:
        for script in load_scripts().values():
            self.send("SCRIPT", "LOAD", script)
        self.flush()

    def flush(self) -> None:
        """Waits until every command is answered. Raises what the first error means."""
        while self._owed:
            self.read()

    def call(self, *command: Any, timeout: float = 0.0) -> Any:
        """Sends a command, which may block for `timeout` seconds, and returns its reply."""
        self.send(*command)
        while self._owed > 1:
            self.read()
        return self.read(timeout)

    def readable(self, timeout: float = 0.0) -> bool:
        try:
            return self._connection.can_read(timeout)
        except (redis.RedisError, OSError) as error:
            raise self._explained(error) from None

    def read(self, timeout: float = 0.0) -> Any:
        """The next reply owed, as bytes, int, list or None."""
        self._owed -= 1
        try:
            reply = self._connection.read_response(
                disable_decoding=True, timeout=timeout + self._timeout
            )
            self._answered = True
            return reply
        except redis.ResponseError as error:
            raise translate(error) from None
        except (redis.RedisError, OSError) as error:
            raise self._explained(error) from None

    def close(self) -> None:
        """Ends the connection; replies that are still owed are lost."""
        self._connection.disconnect()
        self._owed = 0

    def _explained(self, error: Exception) -> Unreachable:
        return explain(self._url, error, self._timeout, self._answered)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RedisClient:
    """What has a connection of its own and the keys of a namespace. Not for several threads."""

    def __init__(self, url: str, namespace: str, timeout: float = ANSWER_TIMEOUT_S):
        self._keys = RedisKeys(namespace)
        self._connect = functools.partial(RedisConnection, url, timeout)
        self._pipe = self._connect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._pipe.close()


def check_server(url: str, timeout: float = ANSWER_TIMEOUT_S, namespace: str | None = None) -> str:
    """Makes sure that a usable Redis answers at `url`; returns its version. With a `namespace` it
    must also take a key in it, which is removed. Raises ConfigError (not a URL of Redis) or
    Unreachable (with the reason), within about `timeout` seconds. No message holds the password."""
    try:
        with RedisConnection(url, timeout) as pipe:
            info = pipe.call("INFO", "server").decode()
            if namespace is not None:
                key = f"{namespace}:probe:{secrets.token_hex(8)}"
                pipe.call("SET", key, "", "EX", PROBE_S)
                pipe.call("DEL", key)
    except WritesRefused as error:
        raise Unreachable(f"Redis at {place(url)}{str(error).removeprefix('Redis')}") from None
    except Unreachable:
        raise
    except ControllerError as error:
        raise Unreachable(f"Redis at {place(url)} refuses this user: {error}") from None
    found = re.search(r"^redis_version:((\d+)\.(\d+)\S*)", info, re.MULTILINE)
    if not found:
        raise Unreachable(f"What answers at {place(url)} does not say that it is Redis.")
    if (int(found[2]), int(found[3])) < MIN_VERSION:
        raise Unreachable(
            f"Redis at {place(url)} has version {found[1]}: use {'.'.join(map(str, MIN_VERSION))} "
            "or later."
        )
    return found[1]


def place(url: str) -> str:
    """Where a URL points to, without user, password and options."""
    options = _parse(url)
    return options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"


def password(url: str) -> str | None:
    """The password in a URL: of a private server, its identity."""
    found: str | None = _parse(url).get("password")
    return found


def _lost(url: str) -> Unreachable:
    return Unreachable(f"The connection to Redis at {place(url)} was lost.")


def explain(url: str, error: Exception, timeout: float, answered: bool = False) -> Unreachable:
    """One sentence for a connection that failed or, if Redis has `answered` on it, was lost."""
    if answered and not isinstance(error, (redis.TimeoutError, TimeoutError)):
        return _lost(url)
    where = f"Redis at {place(url)}"
    secure = url.startswith("rediss:")
    cause = error.__context__
    if isinstance(error, redis.AuthenticationError):
        return Unreachable(f"{where} refused the user name or password: check controller.url.")
    if isinstance(error, redis.ResponseError):
        return Unreachable(f"{where} refused the connection: {error}")
    if isinstance(error, (redis.TimeoutError, TimeoutError)):
        hint = "" if not secure else "; if it does not speak TLS, use redis://"
        return Unreachable(f"{where} did not answer within {timeout:g} seconds{hint}.")
    wrong = next((e for e in (error, cause) if isinstance(e, ssl.SSLCertVerificationError)), None)
    if wrong is not None and is_pinned(url):
        return Unreachable(
            f"{where} shows a certificate that is not of this cluster ({wrong.verify_message}): "
            "something else answers there, or reads along; check the network between the hosts."
        )
    if isinstance(cause, ssl.SSLError) or isinstance(error, ssl.SSLError):
        return Unreachable(
            f"{where} does not complete a TLS handshake: use redis:// if it does not speak TLS, "
            f"or check the certificate ({cause or error})."
        )
    if isinstance(cause, (ConnectionRefusedError, FileNotFoundError)):
        return Unreachable(f"{where} refused the connection: start it, or check controller.url.")
    hint = "" if secure else "; if it speaks TLS, use rediss://"
    reason = str(cause or error).rstrip(".")
    return Unreachable(f"{where} cannot be reached: {reason}{hint}.")


def is_pinned(url: str) -> bool:
    """Whether nothing but the certificates in a URL is trusted. Raises ValueError."""
    options = {name for name in parse_url(url) if name.startswith("ssl_")}
    return CERTIFICATES in options and options <= PINNED_OPTIONS


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


def _parse(url: str) -> dict[str, Any]:
    try:
        return parse_url(url)
    except ValueError:
        scheme = url.partition(":")[0] if "://" in url else "none"
        raise ConfigError(
            f"controller.url has the scheme {scheme!r} or a bad option: use "
            "redis://[user:password@]host:port/db, rediss://... (TLS) or unix:///path."
        ) from None


def options_of(url: str, timeout: float) -> dict[str, Any]:
    local = _parse(url).get("connection_class") is UnixDomainSocketConnection
    return {
        "protocol": 2,
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        # Nothing here retries in silence: a lost reply would be a lost task.
        "retry_on_error": [],
        **({} if local else {"socket_keepalive": True, "socket_keepalive_options": PROBES}),
    }
