"""Lets other hosts read parts of this host's files: `GET /FILE` with a range, over TLS.

The launcher makes a certificate for each distribution and hands it, with its key, to the hosts
over SSH. Both ends of a connection must hold that key; it is in no file.
"""

from __future__ import annotations

import re
import socket
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import quote, unquote

from pipespec.controller.certificate import Certificate
from pipespec.engine.checkpoint.parts.parts_file import PartsFile, blocks_of

# Seconds to prove the key, and for a client that neither asks nor reads.
HANDSHAKE_S, IDLE_S = 5.0, 60.0
MOST_UNPROVEN = 64  # connections at once that have not proven the key; others are closed


def tls_context(certificate: Certificate, *, server: bool) -> ssl.SSLContext:
    """For an end that trusts this certificate alone, and has its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate.cert)
    certificate.load_into(context)
    return context


def url_of(url: str, file: str) -> str:
    """Where a server has a file."""
    return f"{url}/{quote(file, safe='')}"


class WeightServer(ThreadingTCPServer):
    """Answers at one address of this host, in threads, until the process ends. Raises OSError if
    it cannot listen there. `find` gives the file of a name, None if there is none."""

    request_queue_size = MOST_UNPROVEN
    allow_reuse_address = daemon_threads = True

    def __init__(
        self, ip: str, certificate: Certificate, find: Callable[[str], PartsFile | None]
    ) -> None:
        self.find = find
        self._unproven = threading.BoundedSemaphore(MOST_UNPROVEN)
        self._context = tls_context(certificate, server=True)
        self.address_family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        super().__init__((ip, 0), _Handler)
        self.url = f"https://{f'[{ip}]' if ':' in ip else ip}:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True).start()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection, in its own thread, once it has proven the key."""
        if not self._unproven.acquire(blocking=False):
            return
        try:
            request.settimeout(HANDSHAKE_S)
            proven = self._context.wrap_socket(request, True)
        finally:
            self._unproven.release()
        with proven:
            proven.settimeout(IDLE_S)
            super().finish_request(proven, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client without the key, or one that has ended, is no error of this host."""


class _Handler(BaseHTTPRequestHandler):
    server: WeightServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        """Be silent: the reader says what is wrong."""

    def do_GET(self) -> None:
        """Send a block of a file that is here as it was recorded."""
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if (file := self.server.find(unquote(self.path.removeprefix("/")))) is None:
            self.send_error(404)
            return
        start, stop = (int(wanted[1]), int(wanted[2]) + 1) if wanted else (0, 0)
        (block,) = blocks_of([(start, start + 1)])
        if not start < stop or (start, stop) != file.place(block):
            self.send_error(416)
        elif (data := file.read(block)) is None:
            self.send_error(404)
        else:
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{file.size}")
            self.send_header("Content-Length", str(stop - start))
            self.end_headers()
            self.wfile.write(data)
