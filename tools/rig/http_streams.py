"""A client of streamed HTTP answers that does little work while they arrive.

    stream = await read_stream(connect, "/v1/completions", {"prompt": "Once", "stream": True})
    for event in stream.events():
        print(event.at_ns, event.data)

Each request has a connection of its own. What arrives is stored with its time and parsed after the
end, because a process with many requests would otherwise measure its own parsing.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

# Makes a socket that is connected to the server.
Connect = Callable[[], socket.socket]
DATA, DONE = b"data: ", b"data: [DONE]"
# The receive buffer of a client that reads slowly, bytes.
SMALL_BUFFER = 2048


@dataclass(frozen=True)
class Behaviour:
    """How a client behaves.

    Attributes:
        leave_after: it closes the connection after so many events; None: it does not.
        leave_s: it closes it after so many seconds; None: it does not.
        pause_s: how long it pauses after each read, seconds.
    """

    leave_after: int | None = None
    leave_s: float | None = None
    pause_s: float = 0.0


STAY = Behaviour()
NO_HEADERS: Mapping[str, str] = {}


@dataclass(frozen=True)
class Event:
    """One event of a stream, and when it arrived, on the machine's monotonic clock."""

    at_ns: int
    data: dict[str, Any]


class Stream(asyncio.Protocol):
    """A request and its answer."""

    def __init__(self, request: bytes, behaviour: Behaviour):
        self.sent_ns = 0
        self.left = False  # whether this side closed the connection
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._behaviour = behaviour
        self._num_events = 0
        self._pieces: list[tuple[int, bytes]] = []
        self._transport: asyncio.Transport

    @property
    def body(self) -> bytes:
        """All that arrived after the headers, a stream's chunks unparsed."""
        return b"".join(data for _, data in self._pieces).partition(b"\r\n\r\n")[2]

    @property
    def status(self) -> int:
        """The HTTP status; 0: no reply has arrived."""
        line = self._pieces[0][1].split(b" ", 2) if self._pieces else []
        return int(line[1]) if len(line) > 1 else 0

    @property
    def complete(self) -> bool:
        """Whether a stream has ended properly."""
        return self.status == HTTPStatus.OK and DONE in self.body

    @property
    def num_events(self) -> int:
        """Events that have arrived."""
        return self._num_events

    @property
    def text(self) -> str:
        """The text of a stream of one completion."""
        choices = [choice for event in self.events() for choice in event.data.get("choices", ())]
        return "".join(choice["text"] for choice in choices)

    def events(self) -> Iterator[Event]:
        """The events of a stream."""
        rest = b""
        for at_ns, data in self._pieces:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(DATA) and not line.startswith(DONE):
                    yield Event(at_ns, json.loads(line[len(DATA) :]))

    def leave(self) -> None:
        """Close the connection at once."""
        if not self.ended.done():
            self.left = True
            self._transport.abort()

    # --- for asyncio --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.sent_ns = time.monotonic_ns()
        transport.write(self._request)
        if self._behaviour.leave_s is not None:
            asyncio.get_running_loop().call_later(self._behaviour.leave_s, self.leave)

    def data_received(self, data: bytes) -> None:
        self._pieces.append((time.monotonic_ns(), data))
        self._num_events += data.count(DATA)
        behaviour = self._behaviour
        if behaviour.leave_after is not None and self._num_events >= behaviour.leave_after:
            self.leave()
        elif behaviour.pause_s:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(behaviour.pause_s, self._read_on)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def _read_on(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()


async def open_stream(
    connect: Connect,
    path: str,
    body: dict[str, Any],
    behaviour: Behaviour = STAY,
    headers: Mapping[str, str] = NO_HEADERS,
) -> Stream:
    """Send a request; its `ended` is done at the end. Raises OSError if no server listens."""
    text = json.dumps(body).encode()
    given = {
        "Host": "localhost",
        "Connection": "close",
        "Content-Type": "application/json",
        "Content-Length": len(text),
        **headers,
    }
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
    request = "\r\n".join([*lines, "", ""]).encode() + text
    connection = connect()
    if behaviour.pause_s:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
    loop = asyncio.get_running_loop()
    _, stream = await loop.create_connection(lambda: Stream(request, behaviour), sock=connection)
    return stream


async def read_stream(
    connect: Connect, path: str, body: dict[str, Any], behaviour: Behaviour = STAY
) -> Stream:
    """Send a request and read its answer, as far as the behaviour allows. Raises OSError."""
    stream = await open_stream(connect, path, body, behaviour)
    await stream.ended
    return stream
