"""Walks over the header of a GGUF file before anything else reads it: checks that the file is as
large as that says, and finds its single values and where its tensors are.

The package `gguf` creates an object for each element of the metadata, which takes seconds, and
would exhaust memory with a count of 2^61. Here every count and length is compared with the
remaining bytes, and no array is stored.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipespec.errors import ModelError

MAGIC = b"GGUF"
# More elements of metadata than any tokenizer has; the package takes microseconds for each.
MOST_ELEMENTS = 1 << 22
MOST_DIMENSIONS = 4
DEEPEST = 4  # arrays of arrays
DEFAULT_ALIGNMENT = 32
ALIGNMENT = "general.alignment"
# How a value of each type of metadata is stored, and its bytes.
FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
SCALARS = {kind: struct.calcsize(form) for kind, form in FORMS.items()}
UINT32, STRING, ARRAY = 4, 8, 9
SMALLEST = {**SCALARS, STRING: 8, ARRAY: 12}
# A key's length, its type and a value of a byte; a tensor's name, dimensions, type and offset.
SMALLEST_FIELD, SMALLEST_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8


@dataclass(frozen=True)
class Place:
    """Where a tensor is: its first byte in a file and the one after its last, the number of its
    type, and its shape as `[..., rows, columns]`."""

    file: Path
    start: int
    stop: int
    kind: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Outline:
    """Of a header: metadata that are single values, and the places of tensors by their names."""

    fields: Mapping[str, Any]
    places: Mapping[str, Place]


def outline(path: Path, block_sizes: Mapping[int, tuple[int, int]]) -> Outline:
    """The outline of a file's header. Raises ModelError if the header describes more than the
    file's bytes can hold.

    Args:
        block_sizes: of each type of tensor, how many numbers a block has and how many bytes;
            tensors of other types are taken to have none.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size == 0:
                raise _NotWhole("it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Walk(path, data, size, block_sizes).run()
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); make it readable") from error
    except _NotWhole as error:
        raise ModelError(f"{path} is not a whole GGUF file ({error}); fetch it again") from error


def outline_of_prefix(
    path: Path, prefix: bytes, size: int, block_sizes: Mapping[int, tuple[int, int]]
) -> Outline | None:
    """The same for the first bytes of a file of `size` bytes; None: they do not hold its whole
    header."""
    try:
        return _Walk(path, prefix, size, block_sizes).run()
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
        self,
        path: Path,
        data: mmap.mmap | bytes,
        size: int,
        block_sizes: Mapping[int, tuple[int, int]],
    ):
        self.path = path
        self.data = data
        self.size = size
        self.block_sizes = block_sizes
        self.at = 0
        self.order = "<"
        self.elements = 0
        self.alignment = DEFAULT_ALIGNMENT
        self.fields: dict[str, Any] = {}

    def run(self) -> Outline:
        if self._take(4) != MAGIC:
            raise _NotWhole("it does not begin with GGUF")
        if self._number("I") & 0xFFFF == 0:  # written on a machine of the other byte order
            self.order = ">"
        count, fields = self._number("Q"), self._number("Q")
        self._room(fields, SMALLEST_FIELD, "metadata fields")
        self._room(count, SMALLEST_TENSOR, "tensors")
        for _ in range(fields):
            self._field()
        tensors = [self._tensor() for _ in range(count)]
        start = -(-self.at // self.alignment) * self.alignment
        places = {}
        for name, offset, num_bytes, kind, shape in tensors:
            if start + offset + num_bytes > self.size:
                raise _NotWhole(
                    f"{name} claims {num_bytes} bytes from byte {start + offset} on, the file has "
                    f"{self.size}"
                )
            first = start + offset
            places[name] = Place(self.path, first, first + num_bytes, kind, shape)
        return Outline(self.fields, places)

    def _field(self) -> None:
        key = self._string().decode("utf-8", "replace")
        kind = self._number("I")
        if kind in FORMS:
            self.fields[key] = self._number(FORMS[kind])
        elif kind == STRING:
            self.fields[key] = self._string().decode("utf-8", "replace")
        else:
            self._value(kind, 0)
        self.elements += 1
        if key == ALIGNMENT and kind == UINT32:
            self.alignment = self.fields[key]
            if self.alignment == 0 or self.alignment & (self.alignment - 1):
                raise _NotWhole(f"its alignment is {self.alignment}, which is no power of two")

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
            elif inner == STRING and (stop := self._after_strings(count)) is not None:
                self.elements += count
                self.at = stop
            else:
                for _ in range(count):
                    self._value(inner, depth + 1)
        else:
            raise _NotWhole(f"its metadata hold a value of the unknown type {kind}")
        if self.elements > MOST_ELEMENTS:
            raise _NotWhole(f"its metadata have more than {MOST_ELEMENTS} elements")

    def _after_strings(self, count: int) -> int | None:
        """Where so many strings end; None: not within the data. (Vocabularies have 10^5.)"""
        at, data, length_at = self.at, self.data, struct.Struct(self.order + "Q").unpack_from
        try:
            for _ in range(count):
                at += 8 + length_at(data, at)[0]
        except (struct.error, OverflowError):
            return None
        return at if at <= len(data) else None

    def _tensor(self) -> tuple[str, int, int, int, tuple[int, ...]]:
        """The name of a tensor, its offset in the data, its bytes, type and shape."""
        name = self._string().decode("utf-8", "replace")[:100]
        dimensions = self._number("I")
        if dimensions > MOST_DIMENSIONS:
            raise _NotWhole(f"{name} has {dimensions} dimensions, of at most {MOST_DIMENSIONS}")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        kind, offset = self._number("I"), self._number("Q")
        # The reader reports unknown types.
        numbers, num_bytes = self.block_sizes.get(kind, (1, 0))
        return name, offset, math.prod(shape) // numbers * num_bytes, kind, shape

    def _room(self, count: int, least: int, what: str) -> None:
        left = self.size - self.at
        if count * least > left:
            raise _NotWhole(f"it claims {count} {what}, which its {self.size} bytes cannot hold")

    def _string(self) -> bytes:
        length = self._number("Q")
        self._room(length, 1, "bytes of a text")
        return self._take(length)

    def _number(self, form: str) -> Any:
        found: Any = struct.unpack(self.order + form, self._take(struct.calcsize(form)))[0]
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
