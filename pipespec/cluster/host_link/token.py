"""What lets one host join a running cluster: a key that is used once, and where to bring it.

A *token* is one word: the launcher's address and port, the fingerprint of its SSH key, a secret
from which the key of the host's side follows, and a checksum, so that a mistyped one is refused
before anything is connected to; what it opens is decided by the launcher alone (`Invitations`).
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

import asyncssh
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from pipespec.errors import ConfigError

VERSION = 2
SECRET_BYTES, FINGERPRINT_BYTES, CHECK_BYTES, PORT_BYTES = 20, 32, 5, 2
REMEDY = "copy the whole command that `pipespec up --invite` or `pipespec invite` printed"


def fingerprint_of(key: asyncssh.SSHKey) -> bytes:
    return hashlib.sha256(key.public_data).digest()


def key_of(secret: bytes) -> asyncssh.SSHKey:
    seed = hashlib.sha256(b"pipespec invitation" + secret).digest()
    raw = Ed25519PrivateKey.from_private_bytes(seed)
    found: asyncssh.SSHKey = asyncssh.import_private_key(
        raw.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    return found


@dataclass(frozen=True)
class Token:
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
    """The keys that let hosts in, by their fingerprints, each for one host and for a limited time.
    For any threads. `clock`: the seconds of a clock that never goes back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._expiring: dict[bytes, float] = {}
        self._used: set[bytes] = set()

    def make(self, seconds: float) -> bytes:
        """A new secret, whose key is valid for so long."""
        secret = secrets.token_bytes(SECRET_BYTES)
        with self._lock:
            self._expiring[fingerprint_of(key_of(secret))] = self._clock() + seconds
        return secret

    def __contains__(self, fingerprint: bytes) -> bool:
        """Whether that key is, or was, one of ours."""
        return fingerprint in self._expiring

    def use(self, fingerprint: bytes) -> None:
        """Let the host in that has proven that key; it lets in no other. Raises Refused."""
        with self._lock:
            if fingerprint in self._used:
                raise Refused(
                    "this invitation was used already, and lets in one host only; "
                    "`pipespec invite` prints another"
                )
            if self._expiring[fingerprint] <= self._clock():
                raise Refused("this invitation has expired")
            self._used.add(fingerprint)
