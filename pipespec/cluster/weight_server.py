"""Lets other hosts read parts of this host's weight files: `GET /KIND/FILE` with a range, over TLS.

The launcher makes a certificate for each distribution and hands it, with its key, to the hosts
over SSH. Both ends of a connection must hold that key; it is in no file.
"""

from __future__ import annotations

import re
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from pipespec.controller.certificate import Certificate
from pipespec.errors import ModelError
from pipespec.system.network_interfaces import interfaces, resolve

# Seconds to prove the key, and for a client that neither asks nor reads.
HANDSHAKE_S, IDLE_S = 5.0, 60.0
CHUNK_BYTES = 2**18


def tls_context(certificate: Certificate, protocol: int) -> ssl.SSLContext:
    """For an end that trusts this certificate alone, and has its key."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate.cert)
    certificate.load_into(context)
    return context


def own_address(address: str, interface: str | None) -> str:
    """The IP address of this host at which others reach it: `address`, or that of an interface,
    if it is named and has another. Raises OSError."""
    ip = resolve(address)
    named = next((each for each in interfaces() if each.name == interface), None)
    if named is None or ip in named.addresses or not named.addresses:
        return ip
    return named.addresses[0]


class WeightServer(ThreadingHTTPServer):
    """Answers at one address of this host, in threads, until it is closed. Raises OSError if it
    cannot listen there.

    Args:
        find: the path of a file of a model; raises ModelError.
    """

    block_on_close, request_queue_size = False, 64

    def __init__(self, ip: str, certificate: Certificate, find: Callable[[str, str], Path]) -> None:
        self.find, self._connections = find, set[socket.socket]()
        self._context = tls_context(certificate, ssl.PROTOCOL_TLS_SERVER)
        self.address_family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        super().__init__((ip, 0), _Handler)
        self.address = ip, int(self.server_address[1])
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def get_request(self) -> tuple[socket.socket, Any]:
        """A connection, whose handshake its own thread makes."""
        plain, client = super().get_request()
        plain.settimeout(HANDSHAKE_S)
        secured = self._context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        self._connections.add(secured)
        return secured, client

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client without the key, or one that has ended, is no error of this host."""

    def close(self) -> None:
        """Listen no more, and end all connections."""
        self.shutdown()
        self._thread.join()
        self.server_close()
        for each in list(self._connections):
            shut_down(each)


def shut_down(connection: socket.socket) -> None:
    """End a connection that another thread uses. The method of an `SSLSocket` would first take the
    encryption away, under which that thread may be sending."""
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: WeightServer
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        self.request.do_handshake()
        self.request.settimeout(IDLE_S)
        super().setup()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        """Be silent: the reader says what is wrong."""

    def do_GET(self) -> None:
        found = re.fullmatch(r"/([^/]+)/([^/]+)", self.path)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if found is None or wanted is None:
            self.send_error(400)
            return
        start, stop = int(wanted[1]), int(wanted[2]) + 1
        try:
            path = self.server.find(found[1], unquote(found[2]))
            size = path.stat().st_size
        except (ModelError, OSError):
            self.send_error(404)
            return
        if not start < stop <= size:
            self.send_error(416)
            return
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        with path.open("rb") as stream:
            stream.seek(start)
            while chunk := stream.read(min(stop - stream.tell(), CHUNK_BYTES)):
                self.wfile.write(chunk)
