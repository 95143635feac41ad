"""`python -m pipespec.cluster.diagnostics.probe`: runs on a host that is examined or measured.

The launcher calls (`calls`):

    hello                                     nothing
    inventory(models, devices)                inventory.Inventory
    measure(request)                          HostFigures
    listen(name, token, address, interface)   Listening
    link(token, name, place)                  Link

The listener accepts only the other hosts' probes, which send the token; token and requests arrive
over SSH alone.

A link is tested for whether the port is open, its round trip and its rate. A listener replies with
its host's name to connections that begin with the token. After it come a number and so many bytes,
which are answered with one byte, again and again."""

from __future__ import annotations

import errno
import hmac
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pipespec.cluster.diagnostics.inventory import take_inventory
from pipespec.cluster.host_link.calls import Answers
from pipespec.system import network_interfaces
from pipespec.system.network_interfaces import Interface, interface_with, interfaces
from pipespec.system.validation import from_fields

# Loading some layers and the whole draft takes minutes where the disk is slow.
MEASURE_S = 900
MEASURING = "pipespec.cluster.diagnostics.measure_devices"  # it imports torch
CONNECT_TIMEOUT_S = 2.5  # long enough for one lost packet
PEER_TIMEOUT_S = 5.0
MAX_PEERS = 64
MAX_ANSWER = 4096
NUM_PINGS = 21
PING_TIME_S = 0.4  # no more of them after that
# How long the bytes take whose rate is measured, in seconds and round trips, as TCP needs some to
# reach its rate, and at most.
BURST_S, BURST_ROUND_TRIPS, MAX_BURST_S = 0.25, 12, 2.0
SIZE = struct.Struct("!Q")
BLOCK = 1 << 18
RECEIVED = b"r"
UNROUTABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class Endpoint:
    address: str
    port: int


class NotReached(Exception):
    """Why a peer does not answer; see `Reachability`."""

    def __init__(self, problem: str, who: str | None = None):
        super().__init__(problem)
        self.problem = problem
        self.who = who


class PeerConnection:
    """A connection to the probe of the host `name`, authenticated by the token. Raises NotReached;
    when the peer is gone later, OSError or ValueError (an answer that broke off)."""

    def __init__(self, place: Endpoint, name: str, token: str):
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
        try:
            self._socket.sendall(token.encode())
            who = self._answers.readline(MAX_ANSWER).decode(errors="replace").strip()
        except OSError:
            who = ""
        if who != name:
            self.close()
            raise NotReached("stranger", who or None)

    def close(self) -> None:
        self._answers.close()
        self._socket.close()

    def send(self, size: int) -> float:
        """Seconds until the peer has received so many bytes and has answered."""
        block = memoryview(bytes(min(size, BLOCK)))
        start = time.perf_counter()
        self._socket.sendall(SIZE.pack(size))
        for sent in range(0, size, BLOCK):
            self._socket.sendall(block[: size - sent])
        if self._answers.read(1) != RECEIVED:
            raise ConnectionResetError
        return time.perf_counter() - start

    def round_trip(self) -> float:
        times: list[float] = []
        end = time.perf_counter() + PING_TIME_S
        while len(times) < NUM_PINGS and (not times or time.perf_counter() < end):
            times.append(self.send(1))
        return statistics.median(times)

    def rate(self, round_trip: float) -> float:
        """Gbit/s of bytes that take long enough; `round_trip` is in seconds."""
        enough_s = min(max(BURST_S, BURST_ROUND_TRIPS * round_trip), MAX_BURST_S)
        size = BLOCK
        while (seconds := self.send(size) - round_trip) < enough_s:
            size *= 2
        return 8e-9 * size / seconds


class ProbeListener:
    """Listens for the probes of other hosts. Connections without the token are closed."""

    def __init__(self, name: str, token: str):
        self._name = name
        self._token = token.encode()
        self._room = threading.BoundedSemaphore(MAX_PEERS)

    def open(self, address: str) -> Endpoint:
        """Listen at an address of this machine, at a port that is free."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=MAX_PEERS)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return Endpoint(address, listener.getsockname()[1])

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            if self._room.acquire(blocking=False):
                threading.Thread(target=self._accept_peer, args=(connection,), daemon=True).start()
            else:
                connection.close()

    def _accept_peer(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:  # the peer may close it at any time
            connection.settimeout(PEER_TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hmac.compare_digest(_exactly(connection, len(self._token)), self._token):
                connection.sendall(f"{self._name}\n".encode())
                self._answer(connection)
        self._room.release()

    def _answer(self, connection: socket.socket) -> None:
        while True:
            (left,) = SIZE.unpack(_exactly(connection, SIZE.size))
            while left:
                received = len(connection.recv(min(left, BLOCK)))
                if not received:
                    return
                left -= received
            connection.sendall(RECEIVED)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionResetError
        data += part
    return data


# --- requests ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Listening:
    """The endpoint at which a host accepts probes of the others, and its interfaces. `place` is at
    the address of the interface that carries its batches (`carrier`): its own (`number`), unless
    the interface is named and has another. `problem`: "unknown" (the address cannot be resolved),
    "absent" (no interface has it), "no interface" (none of that name is up with an address of the
    same family), or None."""

    number: str | None
    place: Endpoint | None
    carrier: str | None
    interfaces: tuple[Interface, ...]
    problem: str | None


@dataclass(frozen=True, slots=True)
class Reachability:
    """Whether a peer answers. `problem`: "refused", "silent", "no route", "stranger" (something
    else answers: the host `who`), or None."""

    problem: str | None = None
    place: Endpoint | None = None
    who: str | None = None


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Median round trip, and the rate at which bytes reached the peer."""

    rtt_ms: float
    gbit_per_s: float


@dataclass(frozen=True, slots=True)
class Link:
    reach: Reachability
    measured: LinkSpeed | None


def listen(name: str, token: str, address: str, interface: str | None) -> Listening:
    """Accept peers that hold the token, until this process ends."""
    here = tuple(interfaces())
    try:
        number = network_interfaces.resolve(address)
    except OSError:
        return Listening(None, None, None, here, "unknown")
    carrier = interface_with(number, here)
    if carrier is None:
        return Listening(number, None, None, here, "absent")
    at = number
    if interface is not None:
        carrier = next((known for known in here if known.name == interface and known.up), None)
        alike = [a for a in carrier.addresses if (":" in a) == (":" in number)] if carrier else []
        if carrier is None or not alike:
            return Listening(number, None, None, here, "no interface")
        if interface_with(number, [carrier]) is None:
            at = alike[0]
    place = ProbeListener(name, token).open(at)
    return Listening(number, place, carrier.name, here, None)


def link(token: str, name: str, place: dict[str, Any]) -> Link:
    """Connect to a peer, and measure round trip and rate."""
    there = Endpoint(**place)
    try:
        with closing(PeerConnection(there, name, token)) as peer:
            round_trip = peer.round_trip()
            return Link(Reachability(), LinkSpeed(1e3 * round_trip, peer.rate(round_trip)))
    except NotReached as error:
        return Link(Reachability(error.problem, there, error.who), None)
    except (OSError, ValueError):
        return Link(Reachability("silent", there), None)


def measure(request: dict[str, Any]) -> Any:
    """What `measure_devices.measure` returns. Raises PipespecError."""
    measuring = import_module(MEASURING)
    return measuring.measure(from_fields(measuring.MeasureRequest, request))


REQUESTS: dict[str, Callable[..., Any]] = {
    "hello": lambda: None,
    "inventory": take_inventory,
    "measure": measure,
    "listen": listen,
    "link": link,
}


if __name__ == "__main__":
    Answers().answer_calls(lambda do, **arguments: REQUESTS[do](**arguments))
