"""Encrypts and authenticates messages between hosts, by AES-256-GCM.

    sealed   [ length, int64 | the message, encrypted | tag, 16 bytes ]

The length is in the clear, because a receiver posts room for the longest message and must know how
much of it arrived; the tag authenticates it. Sender and receiver count the messages of a link from
1, and the count is the nonce, so a message that was altered, cut, repeated or reordered cannot be
decrypted.
"""

from __future__ import annotations

import torch

from pipespec.errors import RankFailed

KEY_BYTES = 32
_INT = 8
_TAG = 16
_NONCE = 12
# How many bytes sealing adds to a message.
SEAL_BYTES = _INT + _TAG


def link_key(secret: str, epoch: int, meeting: tuple[str, str], sender: int) -> bytes:
    """The key of the link from a rank to the next for one connection of them, KEY_BYTES long.
    `secret` is the cluster's. `meeting` holds the random numbers that sender and receiver drew for
    this connection: if an epoch is repeated, by a fault or by an attacker, the key differs, so no
    key is used with the same nonce twice."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    assert secret, "a link cannot be sealed without the cluster's secret"
    drawn = " ".join(part.encode().hex() for part in meeting)
    info = f"pipespec link, epoch {epoch}, meeting {drawn}, {sender} to {sender + 1}, batches"
    derivation = HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info.encode())
    return derivation.derive(secret.encode())


class Seal:
    """One end of a sealed link: the sender calls `seal`, the receiver `open`. `sender` is the
    sending rank, for the error message."""

    def __init__(self, key: bytes, sender: int):
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(key)
        self._sender = sender
        self._count = 1  # of the next message

    def seal(self, message: torch.Tensor) -> torch.Tensor:
        """Encrypt a message, uint8 `[bytes]` with a multiple of 8 bytes, as the next one that is
        sent: uint8 `[bytes + SEAL_BYTES]`."""
        size = len(message)
        assert size % _INT == 0, f"a message of {size} bytes"
        sealed = torch.empty(size + SEAL_BYTES, dtype=torch.uint8)
        whole, length = _bytes(sealed), size.to_bytes(_INT, "little")
        whole[:_INT] = length
        self._cipher.encrypt_into(self._nonce(), _bytes(message), length, whole[_INT:])
        self._count += 1
        return sealed

    def open(self, buffer: torch.Tensor, *, pinned: bool = False) -> torch.Tensor:
        """Decrypt the next message, uint8 `[bytes]`, into memory of its own; bytes of the buffer
        beyond its end are ignored. Raises RankFailed if it is not the next message, or was
        altered."""
        from cryptography.exceptions import InvalidTag

        size = self._size(buffer)
        if size is None:
            raise self._refused()
        message = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        encrypted = _bytes(buffer)[_INT : size + SEAL_BYTES]
        length = size.to_bytes(_INT, "little")
        try:
            self._cipher.decrypt_into(self._nonce(), encrypted, length, _bytes(message))
        except InvalidTag:
            raise self._refused() from None
        self._count += 1
        return message

    def _nonce(self) -> bytes:
        return self._count.to_bytes(_NONCE, "little")

    def _size(self, buffer: torch.Tensor) -> int | None:
        """The length that a buffer states for its message; None: it is invalid."""
        size = int.from_bytes(_bytes(buffer)[:_INT], "little")
        return size if 0 < size <= len(buffer) - SEAL_BYTES and size % _INT == 0 else None

    def _refused(self) -> RankFailed:
        return RankFailed(
            f"Message {self._count} from rank {self._sender} was altered, repeated, reordered or "
            "cut on its way, or its sender does not hold the cluster's secret; check who else can "
            "write to the network between the hosts."
        )


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.numpy().data
