"""The network interfaces of this machine: their names, addresses and routes."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psutil

LOOPBACK = "127.0.0.1"
# Connecting a UDP socket finds the route to an address and sends nothing; any port will do.
ANY_PORT = 9


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface. `mbit_per_s` is what its driver states, 0 if it states nothing."""

    name: str
    addresses: tuple[str, ...]
    up: bool
    mbit_per_s: int
    mtu: int


def interfaces() -> list[Interface]:
    states = psutil.net_if_stats()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        addresses = tuple(
            entry.address.partition("%")[0]
            for entry in entries
            if entry.family in (socket.AF_INET, socket.AF_INET6)
        )
        state = states.get(name)
        up, speed, mtu = (state.isup, state.speed, state.mtu) if state else (False, 0, 0)
        found.append(Interface(name, addresses, up, speed, mtu))
    return found


def resolve(address: str) -> str:
    return str(address_infos(address, None, type=socket.SOCK_STREAM)[0][4][0])


def address_infos(host: str, port: int | None, **how: Any) -> list[Any]:
    """`socket.getaddrinfo`, which raises OSError also for what no name can be, such as "a..b"."""
    try:
        return socket.getaddrinfo(host, port, **how)
    except UnicodeError:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known") from None


def interface_with(address: str, among: Iterable[Interface]) -> Interface | None:
    """The interface with this IP address; the loopback interface has all of 127.0.0.0/8."""
    if address.startswith("127."):
        address = LOOPBACK
    return next((interface for interface in among if address in interface.addresses), None)


def source_address(address: str, family: socket.AddressFamily = socket.AF_UNSPEC) -> str:
    """The IP address of this machine from which packets to `address` leave. `family` limits the
    addresses of the host to one family. Raises OSError if there is no route."""
    family, kind, protocol, _, sockaddr = address_infos(
        address, ANY_PORT, family=family, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(sockaddr)
        return str(probe.getsockname()[0])
