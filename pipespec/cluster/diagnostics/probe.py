"""`python -m pipespec.cluster.diagnostics.probe`: runs on a host that is examined or measured.

One JSON object per line: requests on standard input, answers on standard output.

    {"do": "hello"}                                     PROTOCOL
    {"do": "inventory", models, devices}                inventory.Inventory
    {"do": "prepare"}                                   nothing; it imports what measures
    {"do": "measure", request}                          HostFigures
    {"do": "listen", name, token, address, interface}   Listening
    {"do": "link", token, name, places}                 Link

An answer is {"value"}, or {"error": sentence}. The listener accepts only the other hosts' probes,
which send the token; token and requests arrive over SSH alone. A probe ends with its standard
input, and LIFETIME_S seconds after its start, or after what it measures, which may take MEASURE_S,
at the latest, as its input does not end if the link is cut.

A link is tested for whether the port is open, its round trip and its rate. A listener replies with
its host's name to connections that begin with the token. Each byte after it is a request: a ping
comes back, and a burst is counted and answered with its rate."""

from __future__ import annotations

import errno
import hmac
import json
import os
import select
import signal
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from pipespec.cluster.diagnostics.inventory import take_inventory
from pipespec.errors import PipespecError
from pipespec.system import network_interfaces
from pipespec.system.network_interfaces import Interface, interface_with, interfaces
from pipespec.system.validation import from_fields

PROTOCOL = 6
# Loading some layers and the whole draft takes minutes where the disk is slow.
LIFETIME_S, MEASURE_S = 300, 900
MEASURING = "pipespec.cluster.diagnostics.measure_devices"  # it imports torch
CONNECT_TIMEOUT_S = 2.5  # long enough for one lost packet
PEER_TIMEOUT_S = 5.0
MAX_PEERS = 64
MAX_ANSWER = 4096
NUM_PINGS = 21
PING_TIME_S = 0.4  # no more of them after that
BURST_S = 0.25
# TCP needs some round trips to reach its rate; a burst lasts for MAX_BURST_S at most.
BURST_ROUND_TRIPS = 12
MAX_BURST_S = 2.0
DURATION = struct.Struct("!d")
BLOCK = 1 << 18
PING, BURST = b"p", b"b"
UNROUTABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EINVAL)
# Closing then drops what is not sent yet.
NO_LINGER = struct.pack("ii", 1, 0)


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

    def round_trip(self) -> float:
        times: list[float] = []
        end = time.perf_counter() + PING_TIME_S
        while len(times) < NUM_PINGS and (not times or time.perf_counter() < end):
            start = time.perf_counter()
            self._socket.sendall(PING)
            if self._answers.read(1) != PING:
                raise ConnectionResetError
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def burst(self, round_trip: float) -> float:
        """Send as fast as possible until the peer replies with the measured rate, in Gbit/s.
        `round_trip` is in seconds; a link with a longer one is measured for longer."""
        seconds = max(BURST_S, BURST_ROUND_TRIPS * round_trip)
        block = bytes(BLOCK)
        end = time.perf_counter() + PEER_TIMEOUT_S
        self._socket.sendall(BURST + DURATION.pack(seconds))
        self._socket.setblocking(False)
        both = [self._socket]
        while time.perf_counter() < end:
            replied, writable, _ = select.select(both, both, [], PEER_TIMEOUT_S)
            if replied:
                break
            if writable:
                self._socket.send(block)
        self._socket.settimeout(PEER_TIMEOUT_S)
        rate = float(self._answers.readline(MAX_ANSWER))
        # Bytes still in flight would delay the next measurement.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        return rate


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
        while request := connection.recv(1):
            if request == PING:
                connection.sendall(PING)
            elif request == BURST:
                (seconds,) = DURATION.unpack(_exactly(connection, DURATION.size))
                counted = rate(_arrivals(connection, min(seconds, MAX_BURST_S)))
                connection.sendall(f"{counted}\n".encode())
                while connection.recv(BLOCK):  # until the peer has read that
                    pass


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionResetError
        data += part
    return data


def _arrivals(connection: socket.socket, seconds: float) -> list[tuple[float, int]]:
    """Pairs of a time and the number of bytes received until then, for `seconds` from the first."""
    arrivals: list[tuple[float, int]] = []
    total = 0
    while not arrivals or arrivals[-1][0] - arrivals[0][0] < seconds:
        count = len(connection.recv(BLOCK))
        if not count:
            break
        total += count
        arrivals.append((time.perf_counter(), total))
    return arrivals


def rate(arrivals: Sequence[tuple[float, int]]) -> float:
    """Gbit/s of a burst of (seconds, bytes until then). Its first third does not count, as TCP is
    still increasing its rate, and a shaped link has saved-up credit."""
    if len(arrivals) < 2:
        return 0.0
    (first, _), (last, total) = arrivals[0], arrivals[-1]
    settled = first + (last - first) / 3
    place = next(i for i, arrival in enumerate(arrivals) if arrival[0] >= settled)
    # Of a receiver that stood still meanwhile, the last bytes may be all that came since.
    start, before = arrivals[min(place, len(arrivals) - 2)]
    return 8e-9 * (total - before) / (last - start) if last > start else 0.0


# --- requests ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Listening:
    """The endpoints at which a host accepts probes of the others, and its interfaces. `places` are
    at its address (`number`) and, last, at that of the interface that carries its batches
    (`carrier`) if it is another. `problem`: "unknown" (the address cannot be resolved), "absent"
    (no interface has it), "no interface" (none of that name is up with an address of the same
    family), or None."""

    number: str | None
    places: tuple[Endpoint, ...]
    carrier: str | None
    interfaces: tuple[Interface, ...]
    problem: str | None


@dataclass(frozen=True, slots=True)
class Reachability:
    """Whether a peer answers; `interface` leads to the address that carries its batches. `problem`:
    "refused", "silent", "no route", "stranger" (something else answers: the host `who`), or None.
    """

    interface: str | None
    problem: str | None = None
    place: Endpoint | None = None
    who: str | None = None


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Median round trip, and the rate at which a burst of bytes reached the peer."""

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
        return Listening(None, (), None, here, "unknown")
    carrier = interface_with(number, here)
    if carrier is None:
        return Listening(number, (), None, here, "absent")
    numbers = [number]
    if interface is not None:
        carrier = next((known for known in here if known.name == interface and known.up), None)
        alike = [a for a in carrier.addresses if (":" in a) == (":" in number)] if carrier else []
        if carrier is None or not alike:
            return Listening(number, (), None, here, "no interface")
        if interface_with(number, [carrier]) is None:
            numbers.append(alike[0])
    door = ProbeListener(name, token)
    places = tuple(door.open(number) for number in numbers)
    return Listening(number, places, carrier.name, here, None)


def link(token: str, name: str, places: list[dict[str, Any]]) -> Link:
    """Connect to every endpoint of a peer, and measure round trip and rate to the last."""
    *others, last = [Endpoint(**place) for place in places]
    leads = None
    with suppress(OSError):  # there is no route
        leads = interface_with(network_interfaces.source_address(last.address), interfaces())
    interface = None if leads is None else leads.name
    for place in (*others, last):
        try:
            with closing(PeerConnection(place, name, token)) as peer:
                if place is last:
                    round_trip = peer.round_trip()
                    speed = LinkSpeed(1e3 * round_trip, peer.burst(round_trip))
        except NotReached as error:
            return Link(Reachability(interface, error.problem, place, error.who), None)
        except (OSError, ValueError):
            return Link(Reachability(interface, "silent", place), None)
    return Link(Reachability(interface), speed)


def measure(request: dict[str, Any]) -> Any:
    """What `measure_devices.measure` returns. Raises PipespecError."""
    signal.alarm(MEASURE_S)
    measuring = import_module(MEASURING)
    found = measuring.measure(from_fields(measuring.MeasureRequest, request))
    signal.alarm(LIFETIME_S)
    return found


REQUESTS: dict[str, Callable[..., Any]] = {
    "hello": lambda: PROTOCOL,
    "inventory": take_inventory,
    "measure": measure,
    "listen": listen,
    "link": link,
}


def main() -> None:
    """Answer on standard output; anything else that is printed goes to standard error."""
    signal.alarm(LIFETIME_S)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if (do := request.pop("do")) == "prepare":
            signal.alarm(0)  # a host that has joined ends its programs when its connection breaks
            import_module(MEASURING)
            continue
        try:
            answer = {"value": REQUESTS[do](**request)}
        except PipespecError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer, default=asdict), file=answers, flush=True)
    os._exit(0)  # skips a second of dismantling torch


if __name__ == "__main__":
    main()
