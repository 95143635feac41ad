"""HTTP/1.1 by uvicorn and h11, with limits on what a client may send before its key is checked.

h11 bounds the bytes of incomplete headers and trailers, and reads a pipelined request only when the
one before it is answered. uvicorn bounds neither the time that headers and bodies take nor, in a
way that lets further clients in, the number of connections. This module adds that.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from pipespec.server.api_errors import RETRY_AFTER_S, ApiError
from pipespec.server.middleware import new_request_id
from pipespec.server.options import ServerOptions

# Chunks that a body may have, beside one for so many bytes: each takes some microseconds to parse.
MAX_CHUNKS, CHUNK_BYTES = 1024, 64
# How long a client may take to read the last bytes of a connection that ends.
LINGER_S = 30.0
# How often the log reports refused connections.
REPORT_EVERY_S = 60.0
# The part of an IPv6 address that its holder does not choose.
NETWORK_BITS = 64
logger = logging.getLogger("uvicorn.error")  # its lines go to standard error
# What uvicorn's protocol logs: errors, and no line for each refused connection.
errors = logging.Logger(logger.name, logging.ERROR)
errors.parent = logger


class ConnectionTable:
    """Admits up to `most` connections in all and `most_per_address` from one address.

    A connection is busy if a whole request has arrived from it and its client reads the reply. When
    there is no room for a new one, `evict` closes the one that has not been busy for longest, so
    that connections which are held open for nothing lock no client out.
    """

    def __init__(self, most: int, most_per_address: int):
        self._most = most
        self._most_per_address = most_per_address
        self._address: dict[Any, str] = {}
        self._count: Counter[str] = Counter()
        # In the order in which they became evictable.
        self._evictable: dict[Any, None] = {}

    def admit(self, connection: Any, host: str) -> bool:
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

    def mark_busy(self, connection: Any) -> None:
        self._evictable.pop(connection, None)

    def mark_evictable(self, connection: Any) -> None:
        if connection in self._address:
            self._evictable.setdefault(connection)

    def remove(self, connection: Any) -> None:
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


class RefusalLog(Counter[int]):
    """Counts refused connections by status, and writes one line for those of a minute: with a line
    for each any client could fill the disk."""

    def add(self, status: int) -> None:
        if not self:
            asyncio.get_running_loop().call_later(REPORT_EVERY_S, self._report)
        self[status] += 1

    def _report(self) -> None:
        counts = ", ".join(f"{count} with {status}" for status, count in self.items())
        logger.warning("Connections that were refused within %g s: %s.", REPORT_EVERY_S, counts)
        self.clear()


class _Parser(h11.Connection):
    """h11's parser, with limits also on what arrives at once; `status` is that of its error."""

    def __init__(self, max_header_bytes: int):
        super().__init__(h11.SERVER, max_header_bytes)
        self._max_header_bytes = max_header_bytes
        self._num_chunks = 0.0  # less those that long ones make up for
        self.status = HTTPStatus.BAD_REQUEST

    def next_event(self) -> Any:
        try:
            return self._checked(super().next_event())
        except h11.RemoteProtocolError as error:
            self.status = HTTPStatus(error.error_status_hint)
            raise

    def _checked(self, event: Any) -> Any:
        if isinstance(event, h11.Request):
            size = len(event.target) + sum(
                len(name) + len(text) + 4 for name, text in event.headers
            )
            if size > self._max_header_bytes:
                too_large = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
                raise h11.RemoteProtocolError("too large", too_large)
            self._num_chunks = 0.0
        while isinstance(event, h11.Data):
            self._num_chunks += 1 - len(event.data) / CHUNK_BYTES
            if self._num_chunks > MAX_CHUNKS:
                raise h11.RemoteProtocolError("too many chunks")
            if self.our_state is not h11.CLOSED:
                break
            event = super().next_event()  # nothing reads this body
        return event


class _Transport:
    """A transport that `close` leaves open while a request's body arrives: a client that still
    sends would not see the reply otherwise."""

    def __init__(self, transport: asyncio.Transport, parser: _Parser):
        self._transport = transport
        self._parser = parser

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        if self._parser.their_state is not h11.SEND_BODY:
            self.end()

    def end(self) -> None:
        self._transport.close()


class LimitedProtocol(H11Protocol):
    transport: _Transport  # type: ignore[assignment]
    conn: _Parser

    def __init__(
        self,
        options: ServerOptions,
        connections: ConnectionTable,
        refusals: RefusalLog,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ):
        super().__init__(config, server_state, app_state, _loop)
        self.conn = _Parser(options.max_header_bytes)
        self.logger = errors
        self._options = options
        self._connections = connections
        self._refusals = refusals
        # What has a deadline, and of which request.
        self._awaited: tuple[str | None, Any] | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Transport(transport, self.conn))  # type: ignore[arg-type]
        if self._connections.admit(self, self.client[0] if self.client else ""):
            self._update()
        else:
            self.evict()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        self._set_deadline(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # After a last request nothing is read.
        if not self.transport.is_closing() and self.conn.their_state is not h11.MUST_CLOSE:
            if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
                data = data.lstrip(b"\r\n")  # some clients send a line more than they should
            if data:  # none would mean the end
                super().data_received(data)
                self._update()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._close()
        self._update()

    def shutdown(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._close()
        else:
            self.cycle.keep_alive = False

    def pause_writing(self) -> None:
        super().pause_writing()
        self._update()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._update()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def evict(self) -> None:
        if self.transport.get_write_buffer_size():  # the client does not read it
            self.transport.abort()
            return
        message = f"Too many connections are open; try again in {RETRY_AFTER_S} s."
        status = HTTPStatus.SERVICE_UNAVAILABLE
        self._refuse(ApiError(status, message, code="too_many_connections"))

    def _update(self) -> None:
        """Set the deadline of what is awaited, and protect this connection from eviction while the
        client reads a reply."""
        if self.transport.is_closing():
            return
        theirs = self.conn.their_state
        awaited = None
        if theirs is h11.SEND_BODY:
            awaited = "body"
        elif self.conn.our_state is h11.CLOSED:  # the body of the last request has arrived
            self._close()
            return
        elif theirs is h11.IDLE and self.timeout_keep_alive_task is None:
            awaited = "headers"
        if self._awaited != (awaited, self.cycle):
            self._awaited = awaited, self.cycle
            self._set_deadline(awaited)
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and awaited != "body" and not self.flow.write_paused:
            self._connections.mark_busy(self)
        else:
            self._connections.mark_evictable(self)

    def _set_deadline(self, awaited: str | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if awaited is None:
            return
        seconds, message = self._options.header_timeout, "No complete request has come within {} s."
        if awaited == "body":
            seconds = self._options.body_timeout
            message = (
                "The body has not come within {} s; send it faster, or start the server with "
                "--limit body_timeout."
            )
        error = ApiError(HTTPStatus.REQUEST_TIMEOUT, message.format(f"{seconds:g}"))
        self._deadline = self.loop.call_later(seconds, self._refuse, error)

    def _should_upgrade(self) -> bool:
        return self._get_upgrade() == b"websocket"  # offers of HTTP/2 are ignored

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        message = (
            "This server does not speak WebSocket; send a request of HTTP, with stream: true for "
            "an answer as it comes."
        )
        self._refuse(ApiError(HTTPStatus.BAD_REQUEST, message, code="no_websocket"))

    def send_400_response(self, msg: str) -> None:
        message = "This is no request of HTTP/1.1."
        if self.conn.status is HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            message = (
                f"The URL and the headers have more than {self._options.max_header_bytes} bytes; "
                "send less, or start the server with --limit max_header_bytes."
            )
        self._refuse(ApiError(self.conn.status, message))

    def _refuse(self, error: ApiError) -> None:
        """End the connection, with a reply unless another one has begun."""
        if self.transport.is_closing():
            return
        self._refusals.add(error.status)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_reply_bytes(error, self.server_state.default_headers))
        self._close()

    def _close(self) -> None:
        """End the connection once the client has read what was written, or after `LINGER_S`."""
        self._set_deadline(None)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.end()
        self._deadline = self.loop.call_later(LINGER_S, self.transport.abort)


def protocol_factory(options: ServerOptions, capacity: int) -> Callable[..., LimitedProtocol]:
    """A callable that makes the protocol of each connection to a server for `capacity` of them."""
    connections = ConnectionTable(capacity, options.max_connections_per_address)
    return partial(LimitedProtocol, options, connections, RefusalLog())


def _reply_bytes(error: ApiError, default_headers: list[tuple[bytes, bytes]]) -> bytes:
    body = json.dumps(error.body).encode()
    headers = [
        *default_headers,
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", new_request_id().encode()),
        (b"connection", b"close"),
        *((name.lower().encode(), value.encode()) for name, value in error.headers.items()),
    ]
    lines = [name + b": " + value + b"\r\n" for name, value in headers]
    status = b"HTTP/1.1 %d %b\r\n" % (error.status, STATUS_PHRASES[error.status])
    return b"".join([status, *lines, b"\r\n", body])
