"""Connections by which hosts fetch weights from one another: TLS 1.3, proven at both ends.

    request   a line of JSON: the arguments of the function that reads
    answer    frames [ kind, uint8 | length, uint32 | payload ], of as many bytes as were asked for

A frame is DATA, WAIT (the host itself does not have the next bytes yet) or FAILED (a sentence). A
connection answers one request at a time, and then the next one.

The launcher makes a certificate for each distribution and hands it, with its key, to the hosts
over SSH. Both ends of a connection must hold that key; it is in no file.
"""

from __future__ import annotations

import json
import socket
import socketserver
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, BinaryIO

from pipespec.controller.certificate import Certificate
from pipespec.errors import ModelError, PipespecError
from pipespec.system.keep_alive import keep_alive
from pipespec.system.network_interfaces import interfaces, resolve

DATA, WAIT, FAILED = range(3)
_HEAD = struct.Struct("!BI")
# Of a frame, and of a request.
MOST_BYTES, MOST_REQUEST_BYTES = 2**20, 2**16
# Seconds to connect, to prove the key, and until the next frame.
CONNECT_S, HANDSHAKE_S, SILENCE_S = 5.0, 5.0, 30.0
# Connections that a host has at once, of clients that have proven the key and of those that have
# not; it closes others.
MOST_PROVEN, MOST_UNPROVEN = 256, 64

# Where a host listens: IP address and port.
Address = tuple[str, int]
# Reads bytes, and an empty chunk where it waits for the next ones.
Read = Callable[..., Iterator[bytes]]


class LinkFailed(Exception):
    """A host cannot be reached, or a connection to it that was `reached` broke; the message is a
    clause."""

    def __init__(self, why: str, *, reached: bool) -> None:
        super().__init__(why)
        self.reached = reached


def _context(certificate: Certificate, protocol: int) -> ssl.SSLContext:
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


class WeightServer(socketserver.ThreadingTCPServer):
    """Answers other hosts at one address of this host, in threads, until it is closed.

    Raises OSError if it cannot listen there.
    """

    daemon_threads, block_on_close = True, False
    request_queue_size = 64

    def __init__(self, ip: str, certificate: Certificate, read: Read) -> None:
        self.read = read
        self.context = _context(certificate, ssl.PROTOCOL_TLS_SERVER)
        self.address_family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        self._counting = threading.Lock()
        # By the socket that was accepted: the one to end, which TLS replaces.
        self._unproven = dict[socket.socket, socket.socket]()
        self._proven = dict[socket.socket, socket.socket]()
        self._closed = False
        super().__init__((ip, 0), _Handler)
        self.address: Address = (ip, int(self.server_address[1]))
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is room for one more connection."""
        with self._counting:
            if len(self._unproven) >= MOST_UNPROVEN:
                return False
            self._unproven[request] = request
            return True

    def shutdown_request(self, request: Any) -> None:
        """End a connection that was accepted."""
        with self._counting:
            self._unproven.pop(request, None)
            self._proven.pop(request, None)
        super().shutdown_request(request)

    def secured(self, request: socket.socket) -> ssl.SSLSocket:
        """The connection, once its client has proven the key. Raises OSError."""
        request.settimeout(HANDSHAKE_S)
        secured = self.context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        try:
            with self._counting:
                self._unproven[request] = secured
            if self._closed:
                raise ConnectionAbortedError
            secured.do_handshake()
            with self._counting:
                if len(self._proven) >= MOST_PROVEN:
                    raise ConnectionAbortedError
                self._proven[request] = self._unproven.pop(request)
            secured.settimeout(None)
        except BaseException:
            secured.close()
            raise
        return secured

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client without the key, or one that has ended, is no error of this host."""

    def close(self) -> None:
        """Listen no more, and end all connections."""
        self.shutdown()
        self._thread.join()
        self.server_close()
        self._closed = True
        with self._counting:
            connections = [*self._unproven.values(), *self._proven.values()]
        for each in connections:
            shut_down(each)


class _Handler(socketserver.BaseRequestHandler):
    """One connection."""

    server: WeightServer

    def handle(self) -> None:
        with self.server.secured(self.request) as secured:
            keep_alive(secured)
            with secured.makefile("rb") as requests:
                while line := requests.readline(MOST_REQUEST_BYTES):
                    self._answer(secured, json.loads(line))

    def _answer(self, secured: ssl.SSLSocket, request: dict[str, Any]) -> None:
        try:
            for chunk in self.server.read(**request):
                secured.sendall(_HEAD.pack(DATA if chunk else WAIT, len(chunk)) + chunk)
        except PipespecError as error:
            sentence = str(error).encode()
            secured.sendall(_HEAD.pack(FAILED, len(sentence)) + sentence)


class WeightLink:
    """Reads from one host over connections that are kept. Several threads may use it at once."""

    def __init__(self, address: Address, certificate: Certificate) -> None:
        self._address = address
        self._context = _context(certificate, ssl.PROTOCOL_TLS_CLIENT)
        self._lock = threading.Lock()
        self._idle: list[ssl.SSLSocket] = []
        self._open = set[ssl.SSLSocket]()
        self._closed = False

    def read(self, num_bytes: int, **request: Any) -> Iterator[bytes]:
        """The bytes that the host sends for a request, as they come. Raises LinkFailed; ModelError
        with the sentence of the host."""
        try:
            secured = self._take()
            try:
                secured.sendall(json.dumps(request).encode() + b"\n")
                yield from _answer(secured, num_bytes)
            except BaseException:
                self._drop(secured)
                raise
            with self._lock:
                self._idle.append(secured)
        except OSError as error:
            raise LinkFailed(_reason(error), reached=True) from error

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            self._closed = True
            for each in self._open:
                shut_down(each)
            for each in self._idle:
                each.close()

    def _take(self) -> ssl.SSLSocket:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        try:
            plain = socket.create_connection(self._address, CONNECT_S)
        except OSError as error:
            raise LinkFailed(_reason(error), reached=False) from error
        try:
            secured = self._context.wrap_socket(plain, do_handshake_on_connect=False)
        except BaseException:
            plain.close()
            raise
        try:
            with self._lock:
                self._open.add(secured)
                if self._closed:
                    raise ConnectionAbortedError("it was closed")
            secured.do_handshake()
            secured.settimeout(SILENCE_S)
        except BaseException:
            self._drop(secured)
            raise
        return secured

    def _drop(self, secured: ssl.SSLSocket) -> None:
        """End a connection that broke, and those that are not in use, which may have broken too."""
        with self._lock:
            gone = [secured, *self._idle]
            self._idle.clear()
            self._open.difference_update(gone)
        for each in gone:
            each.close()


def _answer(secured: ssl.SSLSocket, num_bytes: int) -> Iterator[bytes]:
    # Nothing follows an answer before the next request, so no byte of another one is buffered.
    with secured.makefile("rb") as frames:
        while num_bytes > 0:
            kind, length = _HEAD.unpack(_read(frames, _HEAD.size))
            if length > {DATA: num_bytes, WAIT: 0, FAILED: MOST_BYTES}.get(kind, -1):
                raise ConnectionError("it sends something else than was asked for")
            payload = _read(frames, length)
            if kind == FAILED:
                raise ModelError(payload.decode(errors="replace"))
            num_bytes -= length
            if payload:
                yield payload


def _read(frames: BinaryIO, count: int) -> bytes:
    found = frames.read(count)
    if len(found) < count:
        raise ConnectionError("it has closed the connection")
    return found


def shut_down(connection: socket.socket) -> None:
    """End a connection that another thread uses. The method of an `SSLSocket` would first take the
    encryption away, under which that thread may be sending."""
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    return error.strerror or str(error)
