"""One connection to Redis on which commands are sent without waiting for their replies."""

from __future__ import annotations

import re
import ssl
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.connection import ConnectionInterface, ConnectionPool, parse_url
from redis.retry import Retry

from pipespec.control.scripts import translate
from pipespec.errors import ConfigError, ControllerError, Unreachable

MIN_VERSION = (6, 0)
# A Redis that takes longer to connect or to answer is taken for dead.
ANSWER_TIMEOUT_S = 3.0


class Pipe:
    """A connection whose replies are read in order, when somebody wants them.

    Not for several threads. Raises Unreachable whenever Redis is gone.
    """

    def __init__(self, url: str, timeout: float = ANSWER_TIMEOUT_S):
        self._url = url
        self._timeout = timeout
        self._owed = 0  # replies that Redis still owes to `send`
        self._connection = _connection(url, timeout)
        try:
            self._connection.connect()
        except (redis.RedisError, OSError) as error:
            raise explain(url, error, timeout) from None

    def send(self, *command: Any) -> None:
        """Sends a command; `drain` or `call` will see its reply."""
        # A connection that was lost would silently be made anew, its replies gone.
        if not self._connection.is_connected:
            raise Unreachable(f"The connection to Redis at {place(self._url)} was lost.")
        try:
            packed = self._connection.pack_command(*command)
            self._connection.send_packed_command(packed, check_health=False)
        except redis.ConnectionError as error:
            raise explain(self._url, error, self._timeout) from None
        self._owed += 1

    def drain(self) -> None:
        """Reads the replies that have come. Raises what the first error among them means."""
        while self._owed and self.readable():
            self.read()

    def flush(self) -> None:
        """Waits until every command is answered. Raises what the first error means."""
        while self._owed:
            self.read()

    def call(self, *command: Any, timeout: float = 0.0) -> Any:
        """Sends a command and returns its reply, having read those before it.

        `timeout` is for how long the command itself may block, in seconds.
        """
        self.send(*command)
        while self._owed > 1:
            self.read()
        return self.read(timeout)

    def readable(self, timeout: float = 0.0) -> bool:
        """Whether a reply begins to arrive within `timeout` seconds."""
        try:
            return self._connection.can_read(timeout)
        except (redis.RedisError, OSError) as error:
            raise explain(self._url, error, self._timeout) from None

    def read(self, timeout: float = 0.0) -> Any:
        """The next reply owed, as bytes, int, list or None."""
        self._owed -= 1
        try:
            return self._connection.read_response(
                disable_decoding=True, timeout=timeout + self._timeout
            )
        except redis.ResponseError as error:
            raise translate(error) from None
        except (redis.RedisError, OSError) as error:
            raise explain(self._url, error, self._timeout) from None

    def close(self) -> None:
        self._connection.disconnect()


def check_server(url: str, timeout: float = ANSWER_TIMEOUT_S) -> str:
    """Makes sure that a usable Redis answers at `url`; returns its version.

    Raises ConfigError (not a URL of Redis) or Unreachable (with the reason), within about
    `timeout` seconds. No message holds the password.
    """
    pipe = Pipe(url, timeout)
    try:
        info = pipe.call("INFO", "server").decode()
    except Unreachable:
        raise
    except ControllerError as error:
        raise Unreachable(f"Redis at {place(url)} refuses this user: {error}") from None
    finally:
        pipe.close()
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


def explain(url: str, error: Exception, timeout: float) -> Unreachable:
    """One sentence for a failed connection."""
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
    if isinstance(cause, ssl.SSLError) or isinstance(error, ssl.SSLError):
        return Unreachable(
            f"{where} does not complete a TLS handshake: use redis:// if it does not speak TLS, "
            f"or check the certificate ({cause or error})."
        )
    if isinstance(cause, (ConnectionRefusedError, FileNotFoundError)):
        return Unreachable(f"{where} refused the connection: start it, or check controller.url.")
    hint = "" if secure else "; if it speaks TLS, use rediss://"
    return Unreachable(f"{where} cannot be reached: {cause or error}{hint}.")


def _parse(url: str) -> dict[str, Any]:
    try:
        return parse_url(url)
    except ValueError:
        scheme = url.partition(":")[0] if "://" in url else "none"
        raise ConfigError(
            f"controller.url has the scheme {scheme!r} or a bad option: use "
            "redis://[user:password@]host:port/db, rediss://... (TLS) or unix:///path."
        ) from None


def _connection(url: str, timeout: float) -> ConnectionInterface:
    _parse(url)
    pool = ConnectionPool.from_url(
        url,
        protocol=2,
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        retry=Retry(NoBackoff(), 0),
        # Nothing here retries in silence: a lost reply would be a lost task.
        retry_on_error=[],
    )
    return pool.make_connection()
