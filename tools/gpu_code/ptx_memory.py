"""Memory of a GPU in main memory: every access is checked for its bounds and its alignment."""

from __future__ import annotations

import numpy as np

# Where global memory begins, and the bytes between two tensors, which no access may touch.
BASE, GAP = 1 << 40, 256
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class PtxFault(Exception):
    """The kernel did what a GPU would punish, or what this emulator does not know."""


class Memory:
    """Bytes from address `base` on."""

    def __init__(self, num_bytes: int, base: int = 0, *, empty: int = 0):
        self.base = base
        self.bytes = np.full(-(-num_bytes // 16) * 16, empty, np.uint8)
        self._words = {size: self.bytes.view(kind) for size, kind in _WORDS.items()}
        # Whether a byte belongs to a tensor.
        self._owned = np.ones(len(self.bytes), bool)

    @classmethod
    def holding(cls, tensors: list[np.ndarray], offsets: list[int]) -> tuple[Memory, list[int]]:
        """Global memory with these arrays of bytes, and their addresses, each with its offset from
        a multiple of GAP."""
        starts, end = [], GAP
        for each, offset in zip(tensors, offsets, strict=True):
            starts.append(end + offset)
            end += -(-(len(each) + offset) // GAP) * GAP + GAP
        made = cls(end, BASE)
        made._owned[:] = False
        for start, each in zip(starts, tensors, strict=True):
            made.bytes[start : start + len(each)] = each
            made._owned[start : start + len(each)] = True
        return made, [BASE + start for start in starts]

    def at(self, address: int, num_bytes: int) -> np.ndarray:
        """The bytes at an address."""
        return self.bytes[address - self.base :][:num_bytes]

    def load(self, address: np.ndarray, size: int) -> np.ndarray:
        """Words of `size` bytes at these addresses."""
        return self._words[size][self._at(address, size)]

    def store(self, address: np.ndarray, words: np.ndarray, size: int) -> None:
        """The inverse of `load`; of several words for one address, any is kept."""
        self._words[size][self._at(address, size)] = words.astype(_WORDS[size])

    def check_alignment(self, address: np.ndarray, size: int) -> None:
        """Vectors of words need the alignment of their whole size."""
        if (address % np.uint64(size)).any():
            raise PtxFault(f"an access to {size} bytes is not aligned")

    def _at(self, address: np.ndarray, size: int) -> np.ndarray:
        at = address.astype(np.int64) - self.base
        if len(at) and (at.min() < 0 or at.max() + size > len(self.bytes)):
            raise PtxFault("an access is outside of memory")
        if not (self._owned[at].all() and self._owned[at + size - 1].all()):
            raise PtxFault("an access is outside of every tensor")
        self.check_alignment(address, size)
        return at // size
