"""Finds clusters on a local network by mDNS, where both sides ask for it.

What is announced is the cluster's name, an address and a port, and it proves nothing: the host that
finds it must know the secret of an invitation, and so must the launcher.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pipespec.cluster.join_client import Launcher
from pipespec.errors import ConfigError

SERVICE = "_pipespec._tcp.local."
# Characters of a name; the label of a service may have 63 with the port.
MOST_NAME = 50
# Seconds for the network to answer.
ANSWER_S = 5.0


@contextmanager
def announced(name: str, address: str, port: int) -> Iterator[None]:
    """Say within the block that hosts can join a cluster of that name there. Raises ConfigError."""
    zeroconf = _package()
    service = zeroconf.ServiceInfo(
        SERVICE,
        f"{name.replace('.', '-')[:MOST_NAME]} {port}.{SERVICE}",
        port=port,
        parsed_addresses=[address],
        properties={"cluster": name},
        server=f"pipespec-{socket.gethostname().partition('.')[0]}.local.",
    )
    with _Responder(zeroconf, [address]) as responder:
        responder.register_service(service)
        try:
            yield
        finally:
            responder.unregister_service(service)


def discover(addresses: Sequence[str] | None = None) -> list[Launcher]:
    """The launchers that are announced; the fingerprints of their certificates are not known.

    `addresses`: of this machine's interfaces that are asked; None: all. Raises ConfigError.
    """
    zeroconf = _package()
    found: dict[str, None] = {}

    class Listener(zeroconf.ServiceListener):  # type: ignore[name-defined]
        def add_service(self, _: Any, kind: str, name: str) -> None:
            found[name] = None

        update_service = add_service

        def remove_service(self, _: Any, kind: str, name: str) -> None:
            found.pop(name, None)

    launchers: dict[Launcher, None] = {}
    with _Responder(zeroconf, addresses) as responder:
        zeroconf.ServiceBrowser(responder, SERVICE, Listener())
        time.sleep(ANSWER_S)
        for name in list(found):
            service = responder.get_service_info(SERVICE, name, timeout=round(ANSWER_S * 1e3))
            for address in service.parsed_addresses() if service is not None else ():
                launchers[Launcher(address, service.port)] = None
    return list(launchers)


class _Responder:
    """A responder of mDNS at some addresses of this machine, or at all."""

    def __init__(self, zeroconf: Any, addresses: Sequence[str] | None) -> None:
        try:
            self._responder = (
                zeroconf.Zeroconf()
                if addresses is None
                else zeroconf.Zeroconf(interfaces=list(addresses))
            )
        except OSError as error:
            raise ConfigError(
                f"mDNS cannot be used here ({error.strerror or error}); leave --announce and "
                "--discover out, and use the token."
            ) from error

    def __enter__(self) -> Any:
        return self._responder

    def __exit__(self, *_: object) -> None:
        self._responder.close()


def _package() -> Any:
    try:
        import zeroconf
    except ImportError:
        raise ConfigError(
            "mDNS needs the package zeroconf; install it with `pip install 'pipespec[discover]'`, "
            "or use the token."
        ) from None
    return zeroconf
