"""A client of streamed HTTP answers that does little work while they arrive.

    stream = await open_stream(connect, "/v1/completions", {"prompt": "Once", "stream": True})
    await stream.ended
    print(stream.text)

Each request has a connection of its own. What arrives is parsed after the end.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

# Makes a socket that is connected to the server.
Connect = Callable[[], socket.socket]
DATA, DONE = b"data: ", b"data: [DONE]"
NO_HEADERS: Mapping[str, str] = {}


class Stream(asyncio.Protocol):
    """A request and its answer.

    Attributes:
        num_events: events that have arrived.
    """

    def __init__(self, request: bytes):
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self.num_events = 0
        self._received = bytearray()

    @property
    def body(self) -> bytes:
        """All that arrived after the headers, a stream's chunks unparsed."""
        return bytes(self._received).partition(b"\r\n\r\n")[2]

    @property
    def status(self) -> int:
        """The HTTP status; 0: no reply has arrived."""
        line = bytes(self._received[:64]).split(b" ", 2)
        return int(line[1]) if len(line) > 1 else 0

    @property
    def complete(self) -> bool:
        """Whether a stream has ended properly."""
        return self.status == HTTPStatus.OK and DONE in self.body

    @property
    def text(self) -> str:
        """The text of a stream of one completion."""
        lines = [line for line in self.body.splitlines() if line.startswith(DATA)]
        events = [json.loads(line[len(DATA) :]) for line in lines if not line.startswith(DONE)]
        return "".join(choice["text"] for event in events for choice in event.get("choices", ()))

    # --- for asyncio --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        self.num_events += data.count(DATA)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def open_stream(
    connect: Connect,
    path: str,
    body: dict[str, Any],
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
    loop = asyncio.get_running_loop()
    _, stream = await loop.create_connection(lambda: Stream(request), sock=connection)
    return stream
