"""Checks that a GGUF file is as large as its header says, before anything else reads the header.

The package `gguf` creates an object for each element of the metadata, so that a header with a count
of 2^61 would exhaust memory. Here every count and length is compared with the remaining bytes, and
nothing is stored.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path

from pipespec.errors import ModelError

MAGIC = b"GGUF"
# More elements of metadata than any tokenizer has; the package takes microseconds for each.
MOST_ELEMENTS = 1 << 22
MOST_DIMENSIONS = 4
DEEPEST = 4  # arrays of arrays
DEFAULT_ALIGNMENT = 32
ALIGNMENT = b"general.alignment"
# Bytes of a value of each type of metadata.
SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
UINT32, STRING, ARRAY = 4, 8, 9
SMALLEST = {**SCALARS, STRING: 8, ARRAY: 12}
# A key's length, its type and a value of a byte; a tensor's name, dimensions, type and offset.
SMALLEST_FIELD, SMALLEST_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8


def check_bounds(
    path: Path, block_sizes: Mapping[int, tuple[int, int]]
) -> dict[str, tuple[int, int]]:
    """Raise ModelError if the header describes more than the file's bytes can hold; return where
    each tensor begins and ends, in bytes of the file.

    Args:
        block_sizes: of each type of tensor, how many numbers a block has and how many bytes.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size == 0:
                raise _NotWhole("it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Walk(data, size, block_sizes).run()
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); make it readable") from error
    except _NotWhole as error:
        raise ModelError(f"{path} is not a whole GGUF file ({error}); fetch it again") from error


def bounds_of_prefix(
    path: Path, prefix: bytes, size: int, block_sizes: Mapping[int, tuple[int, int]]
) -> dict[str, tuple[int, int]] | None:
    """The same for the first bytes of a file of `size` bytes; None: they do not hold its whole
    header."""
    try:
        return _Walk(prefix, size, block_sizes).run()
    except _PrefixEnds:
        return None
    except _NotWhole as error:
        raise ModelError(f"{path} is not a whole GGUF file ({error}); fetch it again") from error


class _PrefixEnds(Exception):
    """The header is longer than the bytes that are given of it."""


class _NotWhole(Exception):
    """Why the file is not a whole GGUF file, as a clause."""


class _Walk:
    """One pass over the header, from the first byte on."""

    def __init__(
        self, data: mmap.mmap | bytes, size: int, block_sizes: Mapping[int, tuple[int, int]]
    ):
        self.data = data
        self.size = size
        self.block_sizes = block_sizes
        self.at = 0
        self.order = "<"
        self.elements = 0
        self.alignment = DEFAULT_ALIGNMENT

    def run(self) -> dict[str, tuple[int, int]]:
        if self._take(4) != MAGIC:
            raise _NotWhole("it does not begin with GGUF")
        if self._number("I") & 0xFFFF == 0:  # written on a machine of the other byte order
            self.order = ">"
        tensors, fields = self._number("Q"), self._number("Q")
        self._room(fields, SMALLEST_FIELD, "metadata fields")
        self._room(tensors, SMALLEST_TENSOR, "tensors")
        for _ in range(fields):
            self._field()
        places = [self._tensor() for _ in range(tensors)]
        start = -(-self.at // self.alignment) * self.alignment
        for name, offset, num_bytes in places:
            if start + offset + num_bytes > self.size:
                raise _NotWhole(
                    f"{name} claims {num_bytes} bytes from byte {start + offset} on, the file has "
                    f"{self.size}"
                )
        return {
            name: (start + offset, start + offset + num_bytes) for name, offset, num_bytes in places
        }

    def _field(self) -> None:
        key = self._string()
        kind = self._number("I")
        if key == ALIGNMENT and kind == UINT32:
            self.alignment = self._number("I")
            if self.alignment == 0 or self.alignment & (self.alignment - 1):
                raise _NotWhole(f"its alignment is {self.alignment}, which is no power of two")
            return
        self._value(kind, 0)

    def _value(self, kind: int, depth: int) -> None:
        self.elements += 1
        if kind in SCALARS:
            self._take(SCALARS[kind])
        elif kind == STRING:
            self._string()
        elif kind == ARRAY and depth < DEEPEST:
            inner, count = self._number("I"), self._number("Q")
            if inner not in SMALLEST:
                raise _NotWhole(f"an array holds values of the unknown type {inner}")
            self._room(count, SMALLEST[inner], "elements of an array")
            if inner in SCALARS:
                self.elements += count
                self._skip(count * SCALARS[inner])
            else:
                for _ in range(count):
                    self._value(inner, depth + 1)
        else:
            raise _NotWhole(f"its metadata hold a value of the unknown type {kind}")
        if self.elements > MOST_ELEMENTS:
            raise _NotWhole(f"its metadata have more than {MOST_ELEMENTS} elements")

    def _tensor(self) -> tuple[str, int, int]:
        """The name of a tensor, its offset in the data, and its bytes."""
        name = self._string().decode("utf-8", "replace")[:100]
        dimensions = self._number("I")
        if dimensions > MOST_DIMENSIONS:
            raise _NotWhole(f"{name} has {dimensions} dimensions, of at most {MOST_DIMENSIONS}")
        count = math.prod(self._number("Q") for _ in range(dimensions))
        kind, offset = self._number("I"), self._number("Q")
        # The reader reports unknown types.
        numbers, num_bytes = self.block_sizes.get(kind, (1, 0))
        return name, offset, count // numbers * num_bytes

    def _room(self, count: int, least: int, what: str) -> None:
        left = self.size - self.at
        if count * least > left:
            raise _NotWhole(f"it claims {count} {what}, which its {self.size} bytes cannot hold")

    def _string(self) -> bytes:
        length = self._number("Q")
        self._room(length, 1, "bytes of a text")
        return self._take(length)

    def _number(self, form: str) -> int:
        found: int = struct.unpack(self.order + form, self._take(struct.calcsize(form)))[0]
        return found

    def _take(self, count: int) -> bytes:
        start = self.at
        self._skip(count)
        return self.data[start : self.at]

    def _skip(self, count: int) -> None:
        if count > self.size - self.at:
            raise _NotWhole(f"its {self.size} bytes end within its header")
        self.at += count
        if self.at > len(self.data):
            raise _PrefixEnds
