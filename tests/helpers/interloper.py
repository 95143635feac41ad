"""Somebody between two ranks, who reads what they send each other and may change it.

    with Interloper(change) as between:
        ...     # both ranks meet through RendezvousStore(between)

He rewrites the addresses that ranks leave for one another, so that gloo connects to him.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Self

from pipespec.system.network_interfaces import LOOPBACK

# gloo's: bytes with this header, what it is, slot, offset, bytes without, remote offset.
FRAME = struct.Struct("<6Q")
A_PAYLOAD = 1
# The IPv4 address and port in what gloo leaves: family, port, address.
ADDRESS = re.compile(rb"\x02\x00(..)" + re.escape(socket.inet_aton(LOOPBACK)), re.DOTALL)
GREETING = 8  # bytes with which a connection begins

Change = Callable[[list[bytes]], bytes]


def leave(payloads: list[bytes]) -> bytes:
    """Change nothing."""
    return payloads[-1]


class Interloper:
    """A table through which ranks exchange addresses (`pipespec.transport.rendezvous_store.Table`),
    and a proxy.

    `change` is given all payloads so far that were sent, and says what arrives in the place of
    the newest one.
    """

    def __init__(self, change: Change = leave):
        self.seen: list[bytes] = []
        self._change = change
        self._values: dict[str, bytes] = {}
        self._left: dict[str, bytes] = {}  # the addresses of the two ranks
        self._writing = threading.Lock()
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._sockets:
            each.close()

    def read(self, names: Sequence[str]) -> list[bytes | None]:
        return [self._values.get(name) for name in names]

    def write(self, name: str, value: bytes) -> None:
        with self._writing:
            if not name.startswith("link/"):
                self._values[name] = value
                return
            self._left[name] = value
            if len(self._left) == 2:
                (one, first), (other, second) = self._left.items()
                self._values[one] = self._redirected(first, _port(second))
                self._values[other] = self._redirected(second, _port(first))

    def _redirected(self, value: bytes, peer: int) -> bytes:
        """What a rank has left, with a port of ours. The smaller address calls the other in gloo,
        so ours is on the same side of the peer's as the rank's own."""
        there = _port(value)
        for door in _doors():
            port = door.getsockname()[1]
            if (port < peer) == (there < peer) and (_swap(port) < _swap(peer)) == (
                _swap(there) < _swap(peer)
            ):
                break
            door.close()
        self._sockets.append(door)
        where = LOOPBACK, there
        threading.Thread(target=self._serve, args=(door, where), daemon=True).start()
        start, end = ADDRESS.search(value).span(1)
        return value[:start] + port.to_bytes(2, "big") + value[end:]

    def _serve(self, door: socket.socket, there: tuple[str, int]) -> None:
        try:
            caller, _ = door.accept()
        except OSError:
            return  # the other rank was the one that called
        called = socket.create_connection(there)
        self._sockets += (caller, called)
        for one, other, greeting in ((caller, called, GREETING), (called, caller, 0)):
            pump = threading.Thread(target=self._pump, args=(one, other, greeting), daemon=True)
            pump.start()

    def _pump(self, source: socket.socket, target: socket.socket, greeting: int) -> None:
        try:
            with source.makefile("rb") as stream:
                target.sendall(stream.read(greeting))
                while len(header := stream.read(FRAME.size)) == FRAME.size:
                    size, kind, slot, offset, length, there = FRAME.unpack(header)
                    payload = stream.read(size - FRAME.size)
                    if kind == A_PAYLOAD:
                        self.seen.append(payload)
                        payload = self._change(self.seen)
                        size, length = FRAME.size + len(payload), len(payload)
                    target.sendall(FRAME.pack(size, kind, slot, offset, length, there) + payload)
            target.shutdown(socket.SHUT_WR)
        except OSError:  # one of the ranks has gone: end both connections
            for each in (source, target):
                with suppress(OSError):
                    # A close would wait for the other thread to stop reading.
                    each.shutdown(socket.SHUT_RDWR)


def _port(value: bytes) -> int:
    """The port in what gloo leaves."""
    (found,) = ADDRESS.findall(value)
    return int.from_bytes(found, "big")


def _swap(port: int) -> int:
    return int.from_bytes(port.to_bytes(2, "big"), "little")


def _doors() -> Iterator[socket.socket]:
    """Sockets that listen at one free port after another."""
    for port in range(1025, 65536, 7):
        with suppress(OSError):
            yield socket.create_server((LOOPBACK, port))
