"""HTTP/1.1 by uvicorn and h11, with limits on what a client may send before its key is checked.

h11 bounds the bytes of incomplete headers and trailers, and reads a pipelined request only when the
one before it is answered. uvicorn bounds neither the time that headers, bodies and the reading of
replies take nor the number of connections. This module adds that.
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
# The part of an IPv6 address that its holder does not choose.
NETWORK_BITS = 64
# What uvicorn's protocol logs: errors alone, as any client could fill the disk with refusals.
errors = logging.Logger("uvicorn.error", logging.ERROR)
errors.parent = logging.getLogger(errors.name)  # its lines go to standard error


class ConnectionCount:
    """Admits up to `most` connections in all and `most_per_address` from one address."""

    def __init__(self, most: int, most_per_address: int):
        self._most = most
        self._most_per_address = most_per_address
        self._by_address: Counter[str] = Counter()

    def admit(self, address: str) -> bool:
        """Count a new connection; False: there is no room for it."""
        count, total = self._by_address[address], self._by_address.total()
        admitted = count < self._most_per_address and total < self._most
        if admitted:
            self._by_address[address] += 1
        return admitted

    def remove(self, address: str) -> None:
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]


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
        connections: ConnectionCount,
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
        self._address: str | None = None  # under which it is counted
        # What has a deadline, and of which request.
        self._awaited: tuple[str | None, Any] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None  # while the client reads nothing

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Transport(transport, self.conn))  # type: ignore[arg-type]
        address = network_of(self.client[0] if self.client else "")
        if self._connections.admit(address):
            self._address = address
            self._update()
            return
        message = f"Too many connections are open; try again in {RETRY_AFTER_S} s."
        unavailable = HTTPStatus.SERVICE_UNAVAILABLE
        self._refuse(ApiError(unavailable, message, code="too_many_connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._address is not None:
            self._connections.remove(self._address)
        self._set_deadline(None)
        if self._unread is not None:
            self._unread.cancel()
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
        self._unread = self.loop.call_later(self._options.body_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def _update(self) -> None:
        """Set the deadline of what is awaited."""
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
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.body).encode()
            given = {
                "content-type": "application/json",
                "content-length": str(len(body)),
                "x-request-id": new_request_id(),
                "connection": "close",
                **error.headers,
            }
            headers = [
                *self.server_state.default_headers,
                *((name.encode(), text.encode()) for name, text in given.items()),
            ]
            reason = STATUS_PHRASES[error.status]
            reply = h11.Response(status_code=error.status, headers=headers, reason=reason)
            for event in (reply, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
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
    connections = ConnectionCount(capacity, options.max_connections_per_address)
    return partial(LimitedProtocol, options, connections)
