"""The IP addresses and the TCP port at which a private Redis listens."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Sequence

from pipespec.errors import ConfigError, ControllerError
from pipespec.system import network_interfaces

# Another process may take a port between the check that it is free and the server's bind.
PORT_ATTEMPTS = 5
# Connections that wait to be accepted; as many as Redis allows.
BACKLOG = 511


class PortInUse(ControllerError):
    """Something else listens on a port already."""


def resolve(address: str) -> str:
    """The IP address of a name. Raises ConfigError if Redis should not, or cannot, listen there."""
    try:
        ip = network_interfaces.resolve(address)
    except OSError:
        raise ConfigError(
            f"{address!r} is not an address on which Redis could listen: name one of this machine."
        ) from None
    if ipaddress.ip_address(ip).is_unspecified:
        raise ConfigError(
            f"Redis does not listen on {address}, which is every network of this machine: name "
            "the address that the other hosts use."
        )
    return ip


def free_port(addresses: Sequence[str], port: int = 0) -> int:
    """`port` if it is free on all of these IP addresses of this machine; for 0, one that is. Raises
    ConfigError (not an address of this machine) or PortInUse."""
    for _ in range(PORT_ATTEMPTS):
        chosen = port
        try:
            for address in addresses:
                with listener_at(address, chosen) as listener:
                    chosen = int(listener.getsockname()[1])
            return chosen
        except PortInUse:
            if port:
                raise
    raise PortInUse(f"No TCP port is free on all of {', '.join(addresses)}.")


def listener_at(address: str, port: int) -> socket.socket:
    """Listens on an IP address of this machine. Raises ConfigError (another's) or PortInUse."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"Redis cannot listen on {address}:{port}, which is in use: end what uses it, or "
                "set controller.port to another port."
            ) from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"Redis cannot listen on {address}, which is not an address of this machine."
            ) from None
        reason = os.strerror(error.errno or 0)
        raise ConfigError(f"Redis cannot listen on {address}:{port}: {reason}.") from None
