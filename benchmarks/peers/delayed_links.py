"""Hosts on one machine whose links have a real delay and a real bandwidth.

    with delayed_links(hosts=5, delay_ms=10.0, gbit=1.0) as bed:
        print(check(bed))

Each host is a network namespace of `tools.rig.testbed`. A relay carries every IP packet from one
to another and holds it back for the delay; each host sends at most so many Gbit/s (`tc`'s token
bucket). So engines run through ordinary sockets, and nothing of them is emulated. `check` measures
the links by ping and by ping-pong over TCP.

For every engine alike TCP's windows are larger than what such a link holds, TCP does not begin
slowly again after a pause, and congestion control is Reno: BBR takes a connection whose messages
come one by one for a slow one, and CUBIC is not allowed in a namespace everywhere.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.python_engines import PeerFailed
from tools.rig.sshd import call
from tools.rig.testbed import Testbed

# Bytes: the link with the most in transit, 1 Gbit/s and 80 ms there and back, holds 10 MB.
WINDOW = 64 << 20
TCP_SETTINGS = {
    "tcp_rmem": f"4096 131072 {WINDOW}",
    "tcp_wmem": f"4096 131072 {WINDOW}",
    "tcp_slow_start_after_idle": "0",
    "tcp_congestion_control": "reno",
}
# Bytes of a message: of a few tokens, and of the hidden states of 64 rows of 1,024 in float32.
SMALL, LARGE = 64, 256 << 10
ROUNDS = 21
# Round trips that come this much later than the links say, in milliseconds, are an error: the
# machine is too busy for figures.
TOLERATED_MS = 3.0


@dataclass(frozen=True)
class LinkCheck:
    """What the link between two hosts does.

    Attributes:
        delay_ms, gbit: what it should do: one way, and Gbit/s of each host.
        ping_ms: median round trip of a bare packet.
        small_ms, large_ms: median round trip over TCP of messages of SMALL and LARGE bytes.
        measured_gbit: Gbit/s of one TCP connection over some megabytes, its start included.
    """

    delay_ms: float
    gbit: float
    ping_ms: float
    small_ms: float
    large_ms: float
    measured_gbit: float


@contextmanager
def delayed_links(hosts: int, delay_ms: float, gbit: float, **uneven: Any) -> Iterator[Testbed]:
    """So many hosts without SSH, each linked to each; `delay_ms` is one way, `uneven` what
    `Testbed` takes for links and hosts that are slower than others."""
    with Testbed(hosts, delay_ms, gbit, with_ssh=False, **uneven) as bed:
        for host in bed.hosts:
            for name, value in TCP_SETTINGS.items():
                line = f"echo {value} > /proc/sys/net/ipv4/{name}"
                call(*bed.prefix(host), "sh", "-c", line)
        yield bed


def check(bed: Testbed, megabytes: int = 32) -> LinkCheck:
    """Measure a link that `uneven` leaves as it is, between the second host and the third, if there
    are so many. Raises PeerFailed if it is too slow."""
    a, b = bed.hosts[1:3] if len(bed.hosts) > 2 else bed.hosts
    ping_ms = bed.measured_rtt_ms(a, b)
    small_ms, large_ms = (round_trip_ms(bed, a, b, size) for size in (SMALL, LARGE))
    if ping_ms > 2 * bed.delay_ms + TOLERATED_MS:
        raise PeerFailed(
            f"A round trip over links of {bed.delay_ms:g} ms took {ping_ms:.1f} ms; end what else "
            "runs on this machine, and run the benchmark again."
        )
    measured = bed.measured_gbit(a, b, megabytes)
    return LinkCheck(bed.delay_ms, bed.gbit, ping_ms, small_ms, large_ms, measured)


def round_trip_ms(bed: Testbed, a: str, b: str, size: int) -> float:
    """Median time of a message of `size` bytes from a to b and back over one TCP connection, in
    milliseconds. A first one, while TCP's window grows, does not count."""
    message = bytes(size)
    with bed.socket(b) as listener, bed.socket(a) as sender:
        listener.bind((bed.address(b), 0))
        listener.listen()
        sender.connect(listener.getsockname())
        receiver, _ = listener.accept()
        for end in (sender, receiver):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with receiver, ThreadPoolExecutor(1) as thread:
            echo = thread.submit(_echo, receiver, size, ROUNDS + 1)
            times = []
            for _ in range(ROUNDS + 1):
                began = time.monotonic()
                sender.sendall(message)
                _read(sender, size)
                times.append(time.monotonic() - began)
            echo.result()
    return statistics.median(times[1:]) * 1e3


def _echo(end: socket.socket, size: int, times: int) -> None:
    for _ in range(times):
        _read(end, size)
        end.sendall(bytes(size))


def _read(end: socket.socket, size: int) -> None:
    while size:
        got = len(end.recv(size))
        if not got:
            raise PeerFailed("A connection over the links was closed.")
        size -= got
