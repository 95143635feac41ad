"""Connections between the launcher and a host that joins: TLS 1.3, with a secret proven by both.

    launcher   {"version": ..., "nonce": ...}
    host       {"for": purpose, "id": ..., "nonce": ...}
    launcher   {"proof": ...}, or {"refused": clause}
    host       {"proof": ..., ...}, with what it has to say

The certificate's fingerprint comes with the token. Each proof is an HMAC with the secret over both
nonces, the purpose, the side and the fingerprint that this side sees. So a recorded proof is of no
use, and neither is a listener with another certificate. Only then a host says anything of itself.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from pipespec.cluster.join_token import Refused, Token, fingerprint_of
from pipespec.cluster.weight_server import shut_down
from pipespec.controller.certificate import Certificate
from pipespec.errors import HostFailed
from pipespec.system.keep_alive import keep_alive
from pipespec.system.versions import own_version

# The purposes of a connection: a host that is new, one that is back, a program on a host.
JOIN, RETURN, PROGRAM = "join", "return", "program"
# The frames of a program on a host: [ kind, uint8 | length, uint32 | payload ].
INPUT, END_INPUT, OUTPUT, ERRORS, EXITED = range(5)
HEAD = struct.Struct("!BI")
MOST_BYTES = 2**20
MOST_LINE_BYTES = 2**16
# Seconds to connect; for TLS and both proofs; for a message on its way.
CONNECT_S, PROVING_S, SENDING_S = 5.0, 10.0, 60.0
NONCE_BYTES = 32
LAUNCHER, HOST = "launcher", "host"
NO_MESSAGES = "it sends something else than messages"


class JoinLink:
    """One end of a connection. One thread may read while others write."""

    def __init__(self, secured: ssl.SSLSocket) -> None:
        self._socket = secured
        self._socket.setblocking(False)
        # OpenSSL's state of a connection is for one thread at a time.
        self._using, self._writing = threading.Lock(), threading.Lock()
        self._unread = b""

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. Raises OSError."""
        self.write(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """The next message; None: the other side has closed. Raises OSError, also if none comes in
        so many seconds."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self._unread:
            if len(self._unread) > MOST_LINE_BYTES:
                raise ConnectionError(NO_MESSAGES)
            chunk = self._read(MOST_LINE_BYTES, deadline)
            if not chunk:
                return None
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ConnectionError(NO_MESSAGES)
        return found

    def read(self, most: int) -> bytes:
        """Some bytes, as they come; none: the other side has closed. Raises OSError."""
        if self._unread:
            found, self._unread = self._unread[:most], self._unread[most:]
            return found
        return self._read(most, None)

    def read_frame(self) -> tuple[int, bytes] | None:
        """The next frame; None: the other side has closed. Raises OSError."""
        head = self._read_all(HEAD.size)
        if head is None:
            return None
        kind, length = HEAD.unpack(head)
        if length > MOST_BYTES:
            raise ConnectionError("it sends something else than frames")
        payload = self._read_all(length)
        return None if payload is None else (kind, payload)

    def write(self, data: bytes) -> None:
        """Send bytes. Raises OSError."""
        deadline = time.monotonic() + SENDING_S
        with self._writing:
            rest = memoryview(data)
            while rest:
                try:
                    with self._using:
                        rest = rest[self._socket.send(rest) :]
                except ssl.SSLWantWriteError:
                    self._await(select.POLLOUT, deadline)
                except ssl.SSLWantReadError:
                    self._await(select.POLLIN, deadline)

    def end(self) -> None:
        """End it, also for threads that read or write."""
        shut_down(self._socket)

    def close(self) -> None:
        """Free it, once no thread uses it."""
        with suppress(OSError):
            self._socket.close()

    def _read_all(self, count: int) -> bytes | None:
        found = b""
        while len(found) < count:
            chunk = self.read(count - len(found))
            if not chunk:
                return None
            found += chunk
        return found

    def _read(self, most: int, deadline: float | None) -> bytes:
        while True:
            try:
                with self._using:
                    return self._socket.recv(most)
            except ssl.SSLWantReadError:
                self._await(select.POLLIN, deadline)
            except ssl.SSLWantWriteError:
                self._await(select.POLLOUT, deadline)
            except ssl.SSLEOFError:
                return b""  # ended without TLS's farewell

    def _await(self, event: int, deadline: float | None) -> None:
        left = None if deadline is None else max(deadline - time.monotonic(), 0) * 1e3
        poll = select.poll()
        poll.register(self._socket, event)
        if not poll.poll(left):
            raise TimeoutError("timed out")


def server_context(certificate: Certificate) -> ssl.SSLContext:
    """For the launcher."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    certificate.load_into(context)
    return context


def accept(plain: socket.socket, context: ssl.SSLContext) -> JoinLink:
    """The launcher's end of a connection. Raises OSError."""
    plain.settimeout(PROVING_S)
    keep_alive(plain)
    return JoinLink(context.wrap_socket(plain, server_side=True))


def connect(token: Token) -> tuple[JoinLink, str]:
    """A host's end of a connection, and the address of this host. Raises HostFailed unless the
    launcher answers with the certificate that the token names."""
    where = f"{token.address}:{token.port}"
    try:
        plain = socket.create_connection((token.address, token.port), CONNECT_S)
    except OSError as error:
        raise HostFailed(
            f"{where} cannot be reached ({error.strerror or error}); check that the cluster is up "
            "and that no firewall stops the port"
        ) from error
    # No authority vouches for the launcher: its fingerprint does, and its proof.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        plain.settimeout(PROVING_S)
        keep_alive(plain)
        secured = context.wrap_socket(plain)
    except OSError as error:
        plain.close()
        raise HostFailed(f"{where} is no launcher of pipespec ({error})") from error
    found = fingerprint_of(secured.getpeercert(binary_form=True) or b"")
    if not hmac.compare_digest(found, token.fingerprint):
        secured.close()
        raise HostFailed(
            f"{where} has another certificate than the cluster that made this token; ask for a new "
            "token"
        )
    own = str(secured.getsockname()[0])
    return JoinLink(secured), own


def proof(secret: bytes, side: str, purpose: str, nonces: str, fingerprint: bytes) -> str:
    """What shows that one side knows the secret."""
    said = json.dumps(["pipespec", side, purpose, nonces, fingerprint.hex()]).encode()
    return hmac.new(secret, said, hashlib.sha256).hexdigest()


def admit(
    link: JoinLink, fingerprint: bytes, secret_of: Callable[[str, str], bytes]
) -> tuple[str, str, dict[str, Any]]:
    """The launcher's part: the purpose, the id, and what the host says, once it has proven the
    secret that `secret_of(purpose, id)` gives. Raises Refused, which it raises too, and OSError."""
    nonce = secrets.token_hex(NONCE_BYTES)
    link.send({"version": own_version(), "nonce": nonce})
    asked = _text(link.receive(PROVING_S), "for", "id", "nonce")
    purpose, name = asked["for"], asked["id"]
    try:
        secret = secret_of(purpose, name)
    except Refused as refused:
        link.send({"refused": str(refused)})
        raise
    nonces = nonce + asked["nonce"]
    link.send({"proof": proof(secret, LAUNCHER, purpose, nonces, fingerprint)})
    said = _text(link.receive(PROVING_S), "proof")
    if not hmac.compare_digest(
        said.pop("proof"), proof(secret, HOST, purpose, nonces, fingerprint)
    ):
        raise Refused("its proof is wrong")
    return purpose, name, said


def introduce(
    link: JoinLink,
    fingerprint: bytes,
    purpose: str,
    name: str,
    secret: bytes,
    saying: Mapping[str, Any],
) -> None:
    """A host's part: say something to a launcher that has proven the secret. Raises Refused if
    either side refuses, OSError."""
    hello = _text(link.receive(PROVING_S), "version", "nonce")
    if hello["version"] != (own := own_version()):
        raise Refused(
            f"pipespec here is {own}, but that of the cluster is {hello['version']}; install the "
            "same on all hosts"
        )
    nonce = secrets.token_hex(NONCE_BYTES)
    link.send({"for": purpose, "id": name, "nonce": nonce})
    answer = link.receive(PROVING_S)
    if answer is not None and isinstance(answer.get("refused"), str):
        raise Refused(answer["refused"])
    nonces = hello["nonce"] + nonce
    expected = proof(secret, LAUNCHER, purpose, nonces, fingerprint)
    if not hmac.compare_digest(_text(answer, "proof")["proof"], expected):
        raise Refused("it does not know the secret of this invitation")
    link.send({"proof": proof(secret, HOST, purpose, nonces, fingerprint), **saying})


def _text(message: dict[str, Any] | None, *names: str) -> dict[str, Any]:
    """A message that must have these texts. Raises OSError."""
    if message is None:
        raise ConnectionError("it has closed the connection")
    for name in names:
        value = message.get(name)
        # `compare_digest` takes ASCII alone.
        if not isinstance(value, str) or not value.isascii():
            raise ConnectionError(NO_MESSAGES)
    return message
