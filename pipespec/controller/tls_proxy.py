"""The addresses of a private Redis, and TLS in front of one that was built without it.

    hosts ── TLS ── the proxy, a process of its own ── Unix socket ── Redis

Redis itself then listens on no TCP port. A trip takes some 0.1 ms longer than with the TLS of
the server, which is used where there is one (`pipespec.controller.embedded_redis`).
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

from pipespec.controller.certificate import CERT, KEY
from pipespec.errors import ConfigError, ControllerError
from pipespec.system import network_interfaces
from pipespec.system.process_identity import die_with_parent

HANDSHAKE_S = 5.0
START_TIMEOUT_S = 120.0
LOG = "tls.log"
READY = b"."  # what the process writes when it serves
CHUNK_BYTES = 2**16
# Connections that wait to be accepted; as many as Redis allows.
BACKLOG = 511
# A host that is gone without a word, as when it loses power, is noticed within half a minute.
KEEP_ALIVE = {
    socket.TCP_KEEPIDLE: 10,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 30_000,
}


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
    """`port` if it is free on all of these IP addresses of this machine; for 0, one that is free on
    the first. Raises ConfigError (not an address of this machine) or PortInUse."""
    for address in addresses:
        with listener_at(address, port) as listener:
            port = int(listener.getsockname()[1])
    return port


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


def start(listeners: Sequence[socket.socket], target: Path, hold: int) -> subprocess.Popen[bytes]:
    """A process that accepts TLS connections at `listeners` and passes them on to the Unix socket
    `target`, with the certificate and key beside it; it ends with the thread that makes it. The
    sockets stay open here, so no other process takes the port when it is started again. `hold` is a
    descriptor for it to inherit. Raises ControllerError if it does not start."""
    descriptors = [listener.fileno() for listener in listeners]
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    arguments = (target, target.parent / CERT, target.parent / KEY, *descriptors)
    with open(target.parent / LOG, "w+b") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd="/",
            pass_fds=(hold, *descriptors),
            # Ctrl-C on the terminal is for us; we end the process last.
            start_new_session=True,
            preexec_fn=die_with_parent(os.getpid()),
        )
        assert process.stdout is not None
        with process.stdout as output:
            in_time = bool(wait([output.fileno()], START_TIMEOUT_S))
            if in_time and output.read(len(READY)) == READY:
                return process
        if not in_time:
            process.kill()
        process.wait()
        log.seek(0)
        lines = log.read().decode(errors="replace").splitlines()
    reason = lines[-1] if lines else f"exit code {process.returncode}"
    if not in_time:
        reason = f"it was not ready within {START_TIMEOUT_S:g} seconds"
    raise ControllerError(f"The TLS process in front of Redis did not start: {reason}.")


async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while chunk := await source.read(CHUNK_BYTES):
            target.write(chunk)
            await target.drain()
    target.close()


async def _serve(target: str, cert: str, key: str, descriptors: Sequence[int]) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(cert, key)

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A host, whose handshake is done."""
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEP_ALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        try:
            answers, asked = await asyncio.open_unix_connection(target)
        except OSError:  # Redis is being started again; the host tries again, too
            writer.close()
            return
        await asyncio.gather(_pass_on(reader, asked), _pass_on(answers, writer))

    for descriptor in descriptors:
        await asyncio.start_server(
            meet,
            sock=socket.socket(fileno=descriptor),
            ssl=context,
            ssl_handshake_timeout=HANDSHAKE_S,
        )
    os.write(sys.stdout.fileno(), READY)
    await asyncio.Event().wait()


def main() -> None:
    target, cert, key, *descriptors = sys.argv[1:]
    asyncio.run(_serve(target, cert, key, [int(text) for text in descriptors]))


if __name__ == "__main__":
    main()
