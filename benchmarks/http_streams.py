"""HTTP requests, each on a connection of its own, that cost the process that makes them little.

    stream = await ask(door, "/v1/completions", {"prompt": "Once", "stream": True})
    for event in stream.events():
        print(event.at_ns, event.told)

What comes is kept with its moment and read when it is over: whoever asks many times at once would
otherwise measure itself.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from itertools import pairwise
from typing import Any

# Makes a socket that is connected to the server.
Door = Callable[[], socket.socket]
DATA, DONE = b"data: ", b"data: [DONE]"
# Of who reads slowly: what its system takes for it.
SMALL_BUFFER = 2048


@dataclass(frozen=True)
class Manner:
    """How a client behaves.

    Attributes:
        leave_after: it closes the connection once it has heard so many events; None: it stays.
        leave_s: it closes it after so many seconds.
        pause_s: how long it reads nothing after whatever it has read.
    """

    leave_after: int | None = None
    leave_s: float | None = None
    pause_s: float = 0.0


STAYING = Manner()
NONE: Mapping[str, str] = {}


@dataclass(frozen=True)
class Event:
    """One event of a stream, and when it came, on the machine's monotonic clock."""

    at_ns: int
    told: dict[str, Any]


class Stream(asyncio.Protocol):
    """A request, and what came of it."""

    def __init__(self, asked: bytes, manner: Manner):
        self.sent_ns = 0
        self.left = False  # whether this side closed the connection
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked = asked
        self._manner = manner
        self._heard = 0
        self._pieces: list[tuple[int, bytes]] = []
        self._transport: asyncio.Transport

    @property
    def body(self) -> bytes:
        """All that came, but for the headers; of a stream as it lay on the line."""
        return b"".join(data for _, data in self._pieces).partition(b"\r\n\r\n")[2]

    @property
    def status(self) -> int:
        """Of the reply; 0: there is none."""
        line = self._pieces[0][1].split(b" ", 2) if self._pieces else []
        return int(line[1]) if len(line) > 1 else 0

    @property
    def whole(self) -> bool:
        """Whether a stream came to its end."""
        return self.status == HTTPStatus.OK and DONE in self.body

    @property
    def num_heard(self) -> int:
        """Events so far."""
        return self._heard

    @property
    def text(self) -> str:
        """What a stream of one completion has said."""
        choices = [choice for event in self.events() for choice in event.told.get("choices", ())]
        return "".join(choice["text"] for choice in choices)

    @property
    def longest_pause_s(self) -> float:
        """The longest time between two events of a stream."""
        moments = [event.at_ns for event in self.events()]
        return max((b - a for a, b in pairwise(moments)), default=0) / 1e9

    def events(self) -> Iterator[Event]:
        """The events of a stream."""
        rest = b""
        for at_ns, data in self._pieces:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(DATA) and not line.startswith(DONE):
                    yield Event(at_ns, json.loads(line[len(DATA) :]))

    def leave(self) -> None:
        """Close the connection, whatever is under way."""
        if not self.ended.done():
            self.left = True
            self._transport.abort()

    # --- for asyncio --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.sent_ns = time.monotonic_ns()
        transport.write(self._asked)
        if self._manner.leave_s is not None:
            asyncio.get_running_loop().call_later(self._manner.leave_s, self.leave)

    def data_received(self, data: bytes) -> None:
        self._pieces.append((time.monotonic_ns(), data))
        self._heard += data.count(DATA)
        manner = self._manner
        if manner.leave_after is not None and self._heard >= manner.leave_after:
            self.leave()
        elif manner.pause_s:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(manner.pause_s, self._read_on)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def _read_on(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()


async def begin(
    door: Door,
    path: str,
    body: dict[str, Any],
    manner: Manner = STAYING,
    headers: Mapping[str, str] = NONE,
) -> Stream:
    """Ask; the stream has ended once its `ended` is done. Raises OSError if nobody listens."""
    text = json.dumps(body).encode()
    given = {
        "Host": "server",
        "Connection": "close",
        "Content-Type": "application/json",
        "Content-Length": len(text),
        **headers,
    }
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
    asked = "\r\n".join([*lines, "", ""]).encode() + text
    connection = door()
    if manner.pause_s:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
    loop = asyncio.get_running_loop()
    _, stream = await loop.create_connection(lambda: Stream(asked, manner), sock=connection)
    return stream


async def ask(door: Door, path: str, body: dict[str, Any], manner: Manner = STAYING) -> Stream:
    """Ask and hear the answer out, as far as the manner goes. Raises OSError."""
    stream = await begin(door, path, body, manner)
    await stream.ended
    return stream
