"""Reads the header of a GGUF file, and maps its tensors.

Every count and length is compared with the remaining bytes before anything is made of it, as a
header may claim 2^61 elements. Arrays of metadata are decoded when they are asked for: a tokenizer
has some 300,000 texts, for which the package `gguf` takes half a minute on a busy machine.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipespec.errors import ModelError

if TYPE_CHECKING:  # headers are read without it
    import numpy as np

MAGIC = b"GGUF"
# More elements of metadata than any tokenizer has; the package takes microseconds for each.
MOST_ELEMENTS = 1 << 22
MOST_DIMENSIONS = 4
DEEPEST = 4  # arrays of arrays
DEFAULT_ALIGNMENT = 32
ALIGNMENT = b"general.alignment"
# Bytes of a value of each type of metadata.
FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
SCALARS = {kind: struct.calcsize(f"<{form}") for kind, form in FORMS.items()}
UINT32, STRING, ARRAY = 4, 8, 9
SMALLEST = {**SCALARS, STRING: 8, ARRAY: 12}
# A key's length, its type and a value of a byte; a tensor's name, dimensions, type and offset.
SMALLEST_FIELD, SMALLEST_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8


# Of each type of tensor, how many numbers a block has and how many bytes.
BlockSizes = Mapping[int, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor is: its bytes of the file from `start` to `stop`, `shape` as in numpy, and the
    number of its type."""

    file: Path
    shape: tuple[int, ...]
    kind: int
    start: int
    stop: int


class GgufFile:
    """The header of a file, whose tensors are mapped.

    Attributes:
        tensors: by their names.
    """

    def __init__(self, path: Path, block_sizes: BlockSizes):
        """Raises ModelError if the header describes more than the file's bytes can hold."""
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                if size == 0:
                    raise _NotWhole("it is empty")
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                walk = _Walk(path, data, size, block_sizes)
                self.tensors = walk.run()
        except OSError as error:
            raise ModelError(
                f"{path} cannot be read ({error.strerror}); make it readable"
            ) from error
        except _NotWhole as error:
            raise _fetch_again(path, error) from error
        self._fields = walk.fields
        self._files = dict.fromkeys(self.tensors, (data, walk.order))

    def add_tensors(self, other: GgufFile) -> None:
        """Have the tensors of another part of the same checkpoint too."""
        self.tensors |= other.tensors
        self._files |= other._files

    def metadata(self, name: str) -> Any:
        """A number, text or list; None: there is none of this name. Raises ValueError for texts
        that are not UTF-8."""
        found = self._fields.get(name)
        return None if found is None else found()

    def data(self, name: str) -> np.ndarray:
        """The numbers of a tensor of float32 or float16, or the bytes of its blocks, whose last
        dimension is that of a row. Mapped, not read."""
        import numpy as np

        place, (mapped, order) = self.tensors[name], self._files[name]
        form = {0: "f4", 1: "f2"}.get(place.kind)
        dtype = np.dtype("u1" if form is None else f"{order}{form}")
        count = (place.stop - place.start) // dtype.itemsize
        numbers = np.frombuffer(mapped, dtype, count, place.start)
        numbers = numbers.astype(dtype.newbyteorder("="), copy=False)
        return numbers.reshape(*place.shape[:-1], -1) if numbers.size else numbers


def header_ends(path: Path, prefix: bytes, size: int, block_sizes: BlockSizes) -> bool:
    """Whether the first bytes of a file of `size` bytes hold its whole header. Raises
    ModelError."""
    try:
        _Walk(path, prefix, size, block_sizes).run()
    except _PrefixEnds:
        return False
    except _NotWhole as error:
        raise _fetch_again(path, error) from error
    return True


def _fetch_again(path: Path, error: Exception) -> ModelError:
    return ModelError(f"{path} is not a whole GGUF file ({error}); fetch it again")


class _PrefixEnds(Exception):
    """The header is longer than the bytes that are given of it."""


class _NotWhole(Exception):
    """Why the file is not a whole GGUF file, as a clause."""


class _Walk:
    """One pass over the header, from the first byte on."""

    def __init__(self, path: Path, data: mmap.mmap | bytes, size: int, block_sizes: BlockSizes):
        self.path, self.data = path, data
        self.size = size
        self.block_sizes = block_sizes
        self.at = 0
        self.order = "<"
        self.elements = 0
        self.alignment = DEFAULT_ALIGNMENT
        self.fields: dict[str, Callable[[], Any]] = {}

    def run(self) -> dict[str, TensorPlace]:
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
        first = -(-self.at // self.alignment) * self.alignment
        found = {}
        for name, shape, kind, offset, num_bytes in places:
            start = first + offset
            if start + num_bytes > self.size:
                raise _NotWhole(
                    f"{name} claims {num_bytes} bytes from byte {start} on, the file has "
                    f"{self.size}"
                )
            found[name] = TensorPlace(self.path, shape, kind, start, start + num_bytes)
        return found

    def _field(self) -> None:
        key = self._string()
        kind = self._number("I")
        if key == ALIGNMENT and kind == UINT32:
            self.alignment = self._number("I")
            if self.alignment == 0 or self.alignment & (self.alignment - 1):
                raise _NotWhole(f"its alignment is {self.alignment}, which is no power of two")
            return
        read = partial(_decoded, self.data, self.order, kind, self.at)
        self.fields[key.decode("utf-8", "replace")] = read
        self._value(kind, 0)

    def _value(self, kind: int, depth: int) -> None:
        self.elements += 1
        if kind in SCALARS:
            self._skip(SCALARS[kind])
        elif kind == STRING:
            self._skip_texts(1)
        elif kind == ARRAY and depth < DEEPEST:
            inner, count = self._number("I"), self._number("Q")
            if inner not in SMALLEST:
                raise _NotWhole(f"an array holds values of the unknown type {inner}")
            self._room(count, SMALLEST[inner], "elements of an array")
            if inner in SCALARS:
                self.elements += count
                self._skip(count * SCALARS[inner])
            elif inner == STRING:
                self.elements += count
                if self.elements <= MOST_ELEMENTS:
                    self._skip_texts(count)
            else:
                for _ in range(count):
                    self._value(inner, depth + 1)
        else:
            raise _NotWhole(f"its metadata hold a value of the unknown type {kind}")
        if self.elements > MOST_ELEMENTS:
            raise _NotWhole(f"its metadata have more than {MOST_ELEMENTS} elements")

    def _skip_texts(self, count: int) -> None:
        at, data, size = self.at, self.data, self.size
        length_at = struct.Struct(f"{self.order}Q").unpack_from
        try:
            for _ in range(count):
                length = length_at(data, at)[0]
                at += 8 + length
                if at > size:
                    self._room(length, 1, "bytes of a text")
                    raise _NotWhole(f"its {size} bytes end within a text")
        except struct.error:
            at += 8
        self._skip(at - self.at)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int, int]:
        """The name of a tensor, its shape, its type, its offset in the data, and its bytes."""
        name = self._string().decode("utf-8", "replace")[:100]
        dimensions = self._number("I")
        if dimensions > MOST_DIMENSIONS:
            raise _NotWhole(f"{name} has {dimensions} dimensions, of at most {MOST_DIMENSIONS}")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        kind, offset = self._number("I"), self._number("Q")
        numbers, num_bytes = self.block_sizes.get(kind, (1, 0))  # unknown ones are refused later
        return name, shape, kind, offset, math.prod(shape) // numbers * num_bytes

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


def _decoded(data: mmap.mmap | bytes, order: str, kind: int, at: int) -> Any:
    """The value of this kind at this byte, all of which has been walked over."""
    return _decode(data, order, kind, at)[0]


def _decode(data: mmap.mmap | bytes, order: str, kind: int, at: int) -> tuple[Any, int]:
    """The value of this kind at this byte, and where it ends."""
    if kind in FORMS:
        return struct.unpack_from(order + FORMS[kind], data, at)[0], at + SCALARS[kind]
    if kind == STRING:
        (length,) = struct.unpack_from(f"{order}Q", data, at)
        at += 8
        return data[at : at + length].decode(), at + length
    inner, count = struct.unpack_from(f"{order}IQ", data, at)
    at += 12
    if inner in FORMS:
        form = f"{order}{count}{FORMS[inner]}"
        return list(struct.unpack_from(form, data, at)), at + count * SCALARS[inner]
    values = []
    for _ in range(count):
        value, at = _decode(data, order, inner, at)
        values.append(value)
    return values, at
