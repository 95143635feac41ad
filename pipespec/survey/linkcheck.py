"""One link between two hosts: is the port open, how long is the round trip, how fast does it go.

A `Door` accepts connections that begin with the token and answers with its host's name. Then each
byte is a wish: a ping is sent back, and a burst is counted for a while and its rate told.
"""

from __future__ import annotations

import errno
import hmac
import select
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

CONNECT_TIMEOUT_S = 2.5  # long enough for one lost packet
PEER_TIMEOUT_S = 5.0
MAX_PEERS = 64
MAX_ANSWER = 4096
NUM_PINGS = 21
PING_TIME_S = 0.4  # no more of them after that
BURST_S = 0.25
# TCP needs some round trips to find its speed; but nobody wants to wait longer than that.
BURST_ROUND_TRIPS = 12
MAX_BURST_S = 2.0
DURATION = struct.Struct("!d")
BLOCK = 1 << 18
PING, BURST = b"p", b"b"
UNROUTABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EINVAL)
# Closing then drops what is not sent yet.
NO_LINGER = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Place:
    """An address, as a number, and a port."""

    address: str
    port: int


# --- the side that connects -------------------------------------------------------------------


class NotReached(Exception):
    """Why a peer cannot be talked to; see `pipespec.survey.probe.Reach`."""

    def __init__(self, problem: str, who: str | None = None):
        super().__init__(problem)
        self.problem = problem
        self.who = who


class Peer:
    """A connection to the probe of the host `name`, let in by the token.

    Every method raises NotReached when the peer is gone.
    """

    def __init__(self, place: Place, name: str, token: str):
        try:
            self._socket = socket.create_connection((place.address, place.port), CONNECT_TIMEOUT_S)
        except ConnectionRefusedError as error:
            raise NotReached("refused") from error
        except OSError as error:
            unroutable = error.errno in UNROUTABLE
            raise NotReached("no route" if unroutable else "silent") from error
        self._socket.settimeout(PEER_TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answers = self._socket.makefile("rb")
        who = self._introduced(token)
        if who != name:
            self.close()
            raise NotReached("stranger", who or None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._answers.close()
        self._socket.close()

    def _introduced(self, token: str) -> str:
        """Who answers to the token; "" if nobody does."""
        try:
            self._socket.sendall(token.encode())
            return self._answers.readline(MAX_ANSWER).decode(errors="replace").strip()
        except OSError:
            return ""

    def round_trip(self) -> float:
        """The median of some round trips, in seconds."""
        times: list[float] = []
        end = time.perf_counter() + PING_TIME_S
        with _noticing():
            while len(times) < NUM_PINGS and (not times or time.perf_counter() < end):
                start = time.perf_counter()
                self._socket.sendall(PING)
                if self._answers.read(1) != PING:
                    raise ConnectionResetError
                times.append(time.perf_counter() - start)
        return statistics.median(times)

    def burst(self, round_trip: float) -> float:
        """Send as fast as it goes until the peer says how fast that was, in Gbit/s.

        `round_trip` is in seconds: a long way is measured for longer.
        """
        seconds = max(BURST_S, BURST_ROUND_TRIPS * round_trip)
        block = bytes(BLOCK)
        end = time.perf_counter() + PEER_TIMEOUT_S
        with _noticing():
            self._socket.sendall(BURST + DURATION.pack(seconds))
            self._socket.setblocking(False)
            while time.perf_counter() < end:
                told, free, _ = select.select([self._socket], [self._socket], [], PEER_TIMEOUT_S)
                if told:
                    break
                if free:
                    self._socket.send(block)
            self._socket.settimeout(PEER_TIMEOUT_S)
            rate = float(self._answers.readline(MAX_ANSWER))
            # What is still on its way would hold up the next measurement.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        return rate


@contextmanager
def _noticing() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: an answer that broke off
        raise NotReached("silent") from error


# --- the side that accepts --------------------------------------------------------------------


class Door:
    """Listens for the probes of other hosts. What does not know the token is shut out."""

    def __init__(self, name: str, token: str):
        self._name = name
        self._token = token.encode()
        self._room = threading.BoundedSemaphore(MAX_PEERS)

    def open(self, number: str) -> Place:
        """Listen at an address of this machine, at a port that is free."""
        family = socket.AF_INET6 if ":" in number else socket.AF_INET
        listener = socket.create_server((number, 0), family=family, backlog=MAX_PEERS)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return Place(number, listener.getsockname()[1])

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            if self._room.acquire(blocking=False):
                threading.Thread(target=self._welcome, args=(connection,), daemon=True).start()
            else:
                connection.close()

    def _welcome(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(PEER_TIMEOUT_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._let_in(connection):
                    connection.sendall(f"{self._name}\n".encode())
                    self._serve(connection)
        except OSError:
            return  # the peer left, which is its own matter
        finally:
            self._room.release()

    def _let_in(self, connection: socket.socket) -> bool:
        return hmac.compare_digest(_exactly(connection, len(self._token)), self._token)

    def _serve(self, connection: socket.socket) -> None:
        while wish := connection.recv(1):
            if wish == PING:
                connection.sendall(PING)
            elif wish == BURST:
                (seconds,) = DURATION.unpack(_exactly(connection, DURATION.size))
                counted = rate(_arrivals(connection, min(seconds, MAX_BURST_S)))
                connection.sendall(f"{counted}\n".encode())
                while connection.recv(BLOCK):  # until the peer has read that
                    pass


def _exactly(connection: socket.socket, count: int) -> bytes:
    """So many bytes. Raises ConnectionError if there are fewer."""
    said = b""
    while len(said) < count:
        part = connection.recv(count - len(said))
        if not part:
            raise ConnectionResetError
        said += part
    return said


def _arrivals(connection: socket.socket, seconds: float) -> list[tuple[float, int]]:
    """When bytes came and how many there were by then, for so long from the first on."""
    seen: list[tuple[float, int]] = []
    total = 0
    while not seen or seen[-1][0] - seen[0][0] < seconds:
        count = len(connection.recv(BLOCK))
        if not count:
            break
        total += count
        seen.append((time.perf_counter(), total))
    return seen


def rate(arrivals: Sequence[tuple[float, int]]) -> float:
    """Gbit/s of a burst of (seconds, bytes until then).

    Its first third does not count: there TCP is still finding its speed, and a shaped link
    spends what it had saved.
    """
    if len(arrivals) < 2:
        return 0.0
    (first, _), (last, total) = arrivals[0], arrivals[-1]
    settled = first + (last - first) / 3
    start, before = next(arrival for arrival in arrivals if arrival[0] >= settled)
    return 8e-9 * (total - before) / (last - start) if last > start else 0.0
