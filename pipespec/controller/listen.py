"""Where a private Redis listens: IP addresses, one TCP port, and the certificate it shows."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pipespec.errors import ConfigError, ControllerError
from pipespec.system import interfaces

# Somebody else may take a port between our finding it free and the server's binding it.
PORT_ATTEMPTS = 5


@dataclass(frozen=True)
class TlsFiles:
    """A server's certificate and key, and the authority that vouches for it, as PEM files."""

    cert: Path
    key: Path
    ca: Path

    @classmethod
    def of(cls, folder: Path) -> Self:
        """The files cert.pem, key.pem and ca.pem of a folder.

        Raises ConfigError if one cannot be read.
        """
        files = cls(*(folder.resolve() / name for name in ("cert.pem", "key.pem", "ca.pem")))
        for file in (files.cert, files.key, files.ca):
            if not os.access(file, os.R_OK):
                raise ConfigError(
                    f"controller.tls is {str(folder)!r}, but {file.name} cannot be read there: "
                    "the folder must hold cert.pem, key.pem and ca.pem."
                )
        return files


def resolve(address: str) -> str:
    """The IP address of a name. Raises ConfigError if Redis should not, or cannot, listen there."""
    try:
        ip = interfaces.resolve(address)
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
    """`port` if it is free on all of these IP addresses of this machine; for 0, one that is.

    Raises ConfigError (not an address of this machine) or ControllerError (the port is in use).
    """
    for _ in range(PORT_ATTEMPTS):
        chosen = port
        try:
            for address in addresses:
                chosen = _bound(address, chosen)
            return chosen
        except ControllerError:
            if port:
                raise
    raise ControllerError(f"No TCP port is free on all of {', '.join(addresses)}.")


def _bound(address: str, port: int) -> int:
    """The port (for 0: some port), once it was seen that a server can have it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.create_server((address, port), family=family) as listener:
            return int(listener.getsockname()[1])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ControllerError(
                f"Redis cannot listen on {address}:{port}, which is in use: end what uses it, or "
                "set controller.port to another port."
            ) from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"Redis cannot listen on {address}, which is not an address of this machine."
            ) from None
        reason = os.strerror(error.errno or 0)
        raise ConfigError(f"Redis cannot listen on {address}:{port}: {reason}.") from None
