"""HTTP/1.1 by uvicorn, with limits on what a client may send before its key is checked.

uvicorn's protocol for httptools limits neither the bytes of headers and trailers nor the time that
they take, and its `limit_concurrency` does not close the connections that it refuses. This module
adds both.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from pipespec.server.api_errors import RETRY_AFTER_S, ApiError
from pipespec.server.connections import ConnectionTable
from pipespec.server.middleware import new_request_id
from pipespec.server.options import ServerOptions

# Requests that a client may send on one connection before the reply to the first.
MAX_PIPELINED = 8
# How long a client may take to read the last bytes of a connection that ends.
LINGER_S = 30.0
# How often the log reports refused connections.
REPORT_EVERY_S = 60.0
logger = logging.getLogger("uvicorn.error")  # its lines go to standard error


class RefusalLog:
    """Counts refused connections, and writes one line for those of `every` seconds.

    With a line for each of them any client could fill the disk.
    """

    def __init__(self, every: float = REPORT_EVERY_S):
        self._every = every
        self._counts: Counter[int] = Counter()

    def count(self, status: int) -> None:
        """Count a connection that was ended with this status."""
        if not self._counts:
            asyncio.get_running_loop().call_later(self._every, self._report)
        self._counts[status] += 1

    def _report(self) -> None:
        counts = ", ".join(
            f"{count} with {status} ({HTTPStatus(status).phrase})"
            for status, count in sorted(self._counts.items())
        )
        logger.warning("Connections that were refused within %g s: %s.", self._every, counts)
        self._counts.clear()


class _RequestRefused(Exception):
    """Raised in the parser's callbacks: the connection ends with this reply."""

    def __init__(self, error: ApiError):
        super().__init__(error.message)
        self.error = error


class LimitedProtocol(HttpToolsProtocol):
    """One connection."""

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
        self._options = options
        self._connections = connections
        self._refusals = refusals
        self._num_unparsed = 0  # bytes since the parser completed headers or gave part of a body
        self._in_body = False  # whether a request's headers are complete, and its body is not
        self._answered = False  # whether the last reply was sent before its body had arrived
        self._upgraded = False  # whether what arrives is meant for another protocol
        self._cycles: list[RequestResponseCycle] = []  # requests without a complete reply
        self._refusal: _RequestRefused | None = None
        self._deadline: asyncio.TimerHandle | None = None

    # --- the connection -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._connections.admit(self, self.client[0] if self.client else ""):
            self._refuse(_too_many_connections())
            return
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        self._clear_deadline()
        self._disconnect_requests()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._update_evictable()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._update_evictable()

    def evict(self) -> None:
        """End this connection, to make room for another."""
        if self.transport.get_write_buffer_size():  # the client does not read it
            self.transport.abort()
        else:
            self._refuse(_too_many_connections())

    # --- input --------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._upgraded:
            return
        if self.timeout_keep_alive_task is not None:  # the next request begins
            self._unset_keepalive_if_required()
            self._await_headers()
        step = self._options.max_header_bytes
        for at in range(0, len(data), step):
            if not self._parse(data[at : at + step]):
                return

    def _parse(self, data: bytes) -> bool:
        """Parse some bytes; False: the connection ends."""
        self._num_unparsed += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # The server speaks HTTP/1.1 alone, and answers the request without an upgrade.
            self.cycle.keep_alive = False
            self._upgraded = True
            return False
        except httptools.HttpParserError:
            self._refuse(self._refusal.error if self._refusal else _malformed())
            return False
        if self._num_unparsed > self._options.max_header_bytes:
            self._refuse(_headers_too_large(self._options.max_header_bytes))
            return False
        return not self.transport.is_closing()

    def on_headers_complete(self) -> None:
        self._num_unparsed = 0
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._options.max_header_bytes:
            self._refuse_from_parser(_headers_too_large(self._options.max_header_bytes))
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refuse_from_parser(
                ApiError(
                    HTTPStatus.BAD_REQUEST,
                    f"More than {MAX_PIPELINED} requests wait on one connection for the reply to "
                    "the first.",
                )
            )
        if self.parser.should_upgrade() and self._get_upgrade() == b"websocket":
            self._refuse_from_parser(
                ApiError(
                    HTTPStatus.BAD_REQUEST,
                    "This server does not speak WebSocket; send a request of HTTP, with stream: "
                    "true for an answer as it comes.",
                    code="no_websocket",
                )
            )
        self._in_body = True
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles.append(self.cycle)
        self._announce_close(self.cycle)
        self._await_body()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # after the headers these are trailers, which are ignored
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._num_unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_unparsed = 0
        self._in_body = False
        self._clear_deadline()
        super().on_message_complete()
        if self._answered:
            self._close()
        self._update_evictable()

    def on_response_complete(self) -> None:
        if self._in_body:
            # A client that still sends would not see the reply if the connection ended now. So
            # the rest of the body is read, up to the body's deadline; then the connection ends.
            self.server_state.total_requests += 1
            self._answered = True
            self.flow.resume_reading()
            self._update_evictable()
            return
        super().on_response_complete()
        if self.transport.is_closing():
            self._close()
        self._update_evictable()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    # --- limits -------------------------------------------------------------------------------

    def _update_evictable(self) -> None:
        """Protect this connection from eviction while the client reads a reply."""
        writing = self.cycle is not None and not self.cycle.response_complete
        if writing and not self._in_body and not self.flow.write_paused:
            self._connections.mark_busy(self)
        else:
            self._connections.mark_evictable(self)

    def _await_headers(self) -> None:
        seconds = self._options.header_timeout
        self._set_deadline(seconds, f"No complete request has come within {seconds:g} s.")

    def _await_body(self) -> None:
        seconds = self._options.body_timeout
        self._set_deadline(
            seconds,
            f"The body has not come within {seconds:g} s; send it faster, or start the server with "
            "--body-timeout.",
        )

    def _set_deadline(self, seconds: float, message: str) -> None:
        """Refuse the request with `message` after so many seconds."""
        self._clear_deadline()
        error = ApiError(HTTPStatus.REQUEST_TIMEOUT, message)
        self._deadline = self.loop.call_later(seconds, self._refuse, error)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse_from_parser(self, error: ApiError) -> None:
        """Stop the parser from within one of its callbacks, and refuse the request."""
        self._refusal = _RequestRefused(error)
        raise self._refusal

    def _refuse(self, error: ApiError) -> None:
        """End the connection, with a reply unless another is being sent."""
        if self.transport.is_closing():
            return
        self._refusals.count(error.status)
        if self._may_reply:
            self.transport.write(_reply_bytes(error, self.server_state.default_headers))
        self._close()

    @property
    def _may_reply(self) -> bool:
        """Whether a reply would not be mixed up with another one."""
        if not self.cycle:
            return True
        if self._answered or self.pipeline:
            return False
        return self.cycle.response_complete or not self.cycle.response_started

    def _close(self) -> None:
        """End the connection once the client has read what was written, or after `LINGER_S`."""
        self._clear_deadline()
        self._disconnect_requests()
        self.transport.close()
        self._deadline = self.loop.call_later(LINGER_S, self.transport.abort)

    def _announce_close(self, cycle: RequestResponseCycle) -> None:
        """Announce the end of the connection in a reply that begins before the body has arrived.

        Otherwise a client would send its next request into the connection that is about to end.
        """
        send = cycle.send

        async def send_with_notice(message: Any) -> None:
            if self._body_incomplete(cycle):
                cycle.keep_alive = False
            await send(message)

        cycle.send = send_with_notice  # type: ignore[method-assign]
        cycle.transport = cast("asyncio.Transport", _UnclosableTransport(self, cycle))

    def _body_incomplete(self, cycle: RequestResponseCycle) -> bool:
        """Whether a part of this request's body has not arrived."""
        return self._in_body and cycle is self.cycle

    def _disconnect_requests(self) -> None:
        """Let requests without a complete reply write nothing more.

        uvicorn reports a lost client only to the newest of several pipelined requests.
        """
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._cycles.clear()


class _UnclosableTransport:
    """The transport of a connection as one request uses it: `close` is ignored while the request's
    body is being read."""

    def __init__(self, protocol: LimitedProtocol, cycle: RequestResponseCycle):
        self._protocol = protocol
        self._cycle = cycle

    def write(self, data: bytes) -> None:
        self._protocol.transport.write(data)

    def is_closing(self) -> bool:
        return self._protocol.transport.is_closing()

    def close(self) -> None:
        if not self._protocol._body_incomplete(self._cycle):
            self._protocol.transport.close()


def protocol_factory(options: ServerOptions, capacity: int) -> Callable[..., LimitedProtocol]:
    """A callable that makes the protocol of each connection to a server for `capacity` of them."""
    connections = ConnectionTable(capacity, options.max_connections_per_address)
    return partial(LimitedProtocol, options, connections, RefusalLog())


def _reply_bytes(error: ApiError, default_headers: list[tuple[bytes, bytes]]) -> bytes:
    """A complete response, after which the connection ends."""
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
    return b"".join([STATUS_LINE[error.status], *lines, b"\r\n", body])


def _malformed() -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, "This is no request of HTTP/1.1.")


def _headers_too_large(max_bytes: int) -> ApiError:
    return ApiError(
        HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
        f"The URL and the headers have more than {max_bytes} bytes; send less, or start the server "
        "with --max-header-bytes.",
    )


def _too_many_connections() -> ApiError:
    return ApiError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        f"Too many connections are open; try again in {RETRY_AFTER_S} s.",
        code="too_many_connections",
    )
