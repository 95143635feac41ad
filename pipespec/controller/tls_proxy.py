"""The addresses of a private Redis, and TLS in front of one that was built without it.

    hosts ── TLS ── the proxy, a process of its own ── Unix socket ── Redis

Redis itself then listens on no TCP port. A trip takes some 0.1 ms longer than with the TLS of
the server, which is used where there is one (`pipespec.controller.embedded_redis`).
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import select
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from pipespec.controller.certificate import TlsFiles
from pipespec.errors import ConfigError, ControllerError
from pipespec.system import network_interfaces
from pipespec.system.process_identity import die_with_parent, is_stopped

START_TIMEOUT_S = 120.0
# A process that writes nothing for SILENCE_S hangs; it writes a sign of life this often. One that a
# signal has stopped hangs after STOPPED_S.
SILENCE_S, STOPPED_S, SIGN_OF_LIFE_S = 15.0, 3.0, 1.0
# Before a process that has ended is replaced.
PAUSE_S = 0.1
HANDSHAKE_S = 5.0
LOG = "tls.log"
# Another process may take a port between the check that it is free and the server's bind.
PORT_ATTEMPTS = 5
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

log = logging.getLogger(__name__)


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


class TlsProxy:
    """A process that accepts TLS connections and passes them on to Redis; replaced if it ends or
    hangs, with the same addresses and certificate. Its listening sockets are made here and stay
    open meanwhile, so no other process takes the port."""

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        target: Path,
        files: TlsFiles,
        *,
        hold: int,
    ):
        """Listens on `addresses`, IP addresses with a port, for the Unix socket `target`. `hold` is
        a descriptor for the process to inherit. Raises ConfigError (not an address of this machine)
        or PortInUse."""
        self._target, self._files, self._hold = target, files, hold
        self._changing = threading.Lock()
        self._closed = threading.Event()
        self._settled = threading.Event()  # it serves, or has ended before it did
        self._serves = False
        self._failure = ""  # why it does not serve
        self._process: subprocess.Popen[bytes] | None = None
        # Linux ends the process with the thread that made it.
        self._thread = threading.Thread(target=self._keep_running, daemon=True)
        self._log = target.parent / LOG
        with ExitStack() as opened:
            self._listeners = [
                opened.enter_context(listener_at(address, port)) for address, port in addresses
            ]
            self._opened = opened.pop_all()

    @property
    def pid(self) -> int:
        assert self._process, "the proxy is not started"
        return self._process.pid

    def start(self) -> None:
        """Returns when it serves. Raises ControllerError if it does not."""
        self._thread.start()
        self._settled.wait(START_TIMEOUT_S)
        if not self._serves:
            self.close()
            reason = self._failure or f"it did not answer within {START_TIMEOUT_S:g} seconds"
            raise ControllerError(f"The TLS proxy in front of Redis did not start: {reason}.")

    def close(self) -> None:
        """End the process; harmless when called again."""
        with self._changing:
            self._closed.set()
            if self._process is not None:
                self._process.kill()
        if self._thread.is_alive():
            self._thread.join()
        self._opened.close()

    def _keep_running(self) -> None:
        while True:
            try:
                with open(self._log, "w+b") as output:
                    process = self._spawn(output.fileno())
                    if process is None:
                        return
                    reason = self._watch(process)
                    output.seek(0)
                    lines = output.read().decode(errors="replace").splitlines()
                    self._failure = f"{reason} ({lines[-1]})" if lines else reason
            except OSError as error:
                self._failure = str(error)
            self._settled.set()
            if self._closed.is_set() or not self._serves:
                return
            log.warning("The TLS proxy in front of Redis: %s; it is started again.", self._failure)
            self._closed.wait(PAUSE_S)

    def _spawn(self, output: int) -> subprocess.Popen[bytes] | None:
        """The process; None: the proxy is closed."""
        descriptors = [listener.fileno() for listener in self._listeners]
        files = map(str, (self._target, self._files.cert, self._files.key))
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with self._changing:
            if self._closed.is_set():
                return None
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, *files, *map(str, descriptors)],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                cwd="/",
                pass_fds=(self._hold, *descriptors),
                # Ctrl-C on the terminal is for us; we end the process last.
                start_new_session=True,
                preexec_fn=die_with_parent(os.getpid()),
            )
            return self._process

    def _watch(self, process: subprocess.Popen[bytes]) -> str:
        """Wait for the end of the process, and kill it if it hangs; returns how it ended."""
        assert process.stdout is not None
        reason, silent_s = "it ended", 0.0
        with process.stdout as output:
            while True:
                if not select.select([output], [], [], SIGN_OF_LIFE_S)[0]:
                    silent_s += SIGN_OF_LIFE_S
                    # Its first sign of life may take long, as it imports modules.
                    patience_s = SILENCE_S if self._settled.is_set() else START_TIMEOUT_S
                    if silent_s >= (STOPPED_S if is_stopped(process.pid) else patience_s):
                        reason = "it hung"
                        process.kill()
                        break
                    continue
                silent_s = 0.0
                if not os.read(output.fileno(), 4096):
                    break
                self._serves = True
                self._settled.set()
        process.wait()
        return reason


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
    while True:
        os.write(sys.stdout.fileno(), b".")
        await asyncio.sleep(SIGN_OF_LIFE_S)


def main() -> None:
    target, cert, key, *descriptors = sys.argv[1:]
    asyncio.run(_serve(target, cert, key, [int(text) for text in descriptors]))


if __name__ == "__main__":
    main()
