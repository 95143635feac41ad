"""What lets one host join a running cluster: a secret that is used once, and where to bring it.

A *token* is one word: the launcher's address and port, the fingerprint of its certificate, the
secret and a checksum, so that a mistyped one is refused before anything is connected to; what it
opens is decided by the launcher alone (`Invitations`).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pipespec.errors import ConfigError

VERSION = 1
SECRET_BYTES, FINGERPRINT_BYTES, CHECK_BYTES, PORT_BYTES = 20, 32, 5, 2
REMEDY = "copy the whole command that `pipespec up --invite` or `pipespec invite` printed"


def fingerprint_of(certificate: bytes) -> bytes:
    """The fingerprint of a certificate in DER."""
    return hashlib.sha256(certificate).digest()


def id_of(secret: bytes) -> str:
    """By what an invitation is named to the launcher; it does not reveal the secret."""
    return hashlib.sha256(b"pipespec invitation" + secret).hexdigest()


@dataclass(frozen=True)
class Token:
    """Where a host joins, and with what."""

    address: str
    port: int
    fingerprint: bytes = field(repr=False)
    secret: bytes = field(repr=False)

    def encode(self) -> str:
        """The token as one word of letters, digits, - and _."""
        where = self.port.to_bytes(PORT_BYTES) + self.address.encode()
        packed = bytes([VERSION]) + self.secret + self.fingerprint + where
        word = base64.urlsafe_b64encode(packed + _checksum(packed)).decode().rstrip("=")
        return f"p{word}"  # an option would begin with a hyphen

    @classmethod
    def decode(cls, text: str) -> Token:
        """The inverse of `encode`. Raises ConfigError, which shows nothing of the text."""
        try:
            word = text.strip()
            if not word.startswith("p") or not word.isascii():
                raise ValueError
            whole = base64.b64decode(word[1:] + "=" * (-len(word[1:]) % 4), b"-_", validate=True)
            packed, check = whole[:-CHECK_BYTES], whole[-CHECK_BYTES:]
            if not hmac.compare_digest(check, _checksum(packed)) or packed[0] != VERSION:
                raise ValueError
            start = 1 + SECRET_BYTES + FINGERPRINT_BYTES
            found = cls(
                packed[start + PORT_BYTES :].decode(),
                int.from_bytes(packed[start : start + PORT_BYTES]),
                packed[1 + SECRET_BYTES : start],
                packed[1 : 1 + SECRET_BYTES],
            )
            # Its last letter may hold bits that are in no byte.
            if found.encode() != word:
                raise ValueError
        except (ValueError, IndexError):
            raise ConfigError(f"That is no token, or not all of one; {REMEDY}.") from None
        return found


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(b"pipespec checksum" + data).digest()[:CHECK_BYTES]


class Refused(Exception):
    """A host is not let in; the message is a clause."""


class Invitations:
    """The secrets that let hosts in, each for one host and for a limited time. For any threads.

    Args:
        clock: the seconds of a clock that never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[str, tuple[bytes, float]] = {}  # by id: the secret, and when it expires
        self._over: dict[str, str] = {}  # by id: why it lets no host in

    def make(self, seconds: float) -> bytes:
        """A new secret, which is valid for so long."""
        secret = secrets.token_bytes(SECRET_BYTES)
        with self._lock:
            self._open[id_of(secret)] = secret, self._clock() + seconds
        return secret

    def secret(self, name: str) -> bytes:
        """The secret of that id, which is still to be used. Raises Refused."""
        with self._lock:
            return self._valid(name)

    def use(self, name: str) -> None:
        """Let the host in that has proven that secret; it lets in no other. Raises Refused."""
        with self._lock:
            self._valid(name)
            del self._open[name]
            self._over[name] = "was used already, and lets in one host only"

    def _valid(self, name: str) -> bytes:
        if name in self._open and self._open[name][1] <= self._clock():
            del self._open[name]
            self._over[name] = "has expired"
        if name not in self._open:
            raise Refused(f"this invitation {self._over.get(name, 'is not one of this cluster')}")
        return self._open[name][0]
