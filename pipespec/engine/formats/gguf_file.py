"""Reads the header of a GGUF file, and maps its tensors; names the files of a checkpoint that is
several: `NAME-00001-of-00003.gguf` and so on.

Every count and length is compared with the remaining bytes before anything is made of it, as a
header may claim 2^61 elements. A tokenizer has some 300,000 texts, for which the reader of the
package `gguf` takes half a minute on a busy machine, and this one 0.07 s.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipespec.errors import ModelError

if TYPE_CHECKING:  # headers are read without it
    import numpy as np

_PART = re.compile(r"(.+-)(\d{5})-of-(\d{5})\.gguf")
FOREIGN = "take another file, or a safetensors checkpoint"
MAGIC = b"GGUF"
# More elements of metadata than any tokenizer has; the package takes microseconds for each.
MOST_ELEMENTS = 1 << 22
MOST_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
ALIGNMENT = "general.alignment"
# The types of numbers among the metadata, as in `struct`.
FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


def part_names(name: str) -> tuple[str, ...]:
    """The names of all files of a checkpoint, given one of them; most have no other."""
    found = _PART.fullmatch(name)
    if found is None or not 1 <= int(found[2]) <= int(found[3]):
        return (name,)
    return tuple(
        f"{found[1]}{number:05}-of-{found[3]}.gguf" for number in range(1, int(found[3]) + 1)
    )


def parts_of(path: Path) -> tuple[Path, ...]:
    """The files of a checkpoint, given one of them; it is called by the first."""
    return tuple(path.with_name(name) for name in part_names(path.name))


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
        kind: the architecture of llama.cpp.
    """

    def __init__(self, path: Path):
        """Raises ModelError if the header describes more than the file's bytes can hold."""
        self.path = path
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        except OSError as error:
            raise ModelError(
                f"{path} cannot be read ({error.strerror}); make it readable"
            ) from error
        walk = _walked(path, data, size)
        if isinstance(data, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):  # read again if needed
            data.madvise(mmap.MADV_DONTNEED, 0, walk.at // mmap.PAGESIZE * mmap.PAGESIZE)
        self.tensors, self._fields = walk.tensors, walk.fields
        self._files = dict.fromkeys(self.tensors, data)
        self.kind = str(self.metadata("general.architecture"))

    def unread(self, what: str) -> ModelError:
        """That the file is not read, and why."""
        return ModelError(f"{self.path} {what}; {FOREIGN}")

    def add_tensors(self, other: GgufFile) -> None:
        self.tensors |= other.tensors
        self._files |= other._files

    def metadata(self, name: str) -> Any:
        """A number, text or list; None: there is none of this name. Raises ModelError."""
        found = self._fields.get(name)
        try:
            return found() if callable(found) else found
        except UnicodeDecodeError as error:
            raise self.unread(f"holds a text that is not UTF-8 ({error})") from error

    def field(self, name: str) -> Any:
        """The same of the metadata of the architecture."""
        return self.metadata(f"{self.kind}.{name}")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: each.shape for name, each in self.tensors.items()}

    def data(self, name: str) -> np.ndarray:
        """The numbers of a tensor of float32 or float16, or the bytes of its blocks, whose last
        dimension is that of a row. Mapped, not read."""
        import numpy as np

        place = self.tensors[name]
        dtype = np.dtype({0: "<f4", 1: "<f2"}.get(place.kind, "u1"))
        count = (place.stop - place.start) // dtype.itemsize
        numbers = np.frombuffer(self._files[name], dtype, count, place.start)
        return numbers.reshape(*place.shape[:-1], -1) if numbers.size else numbers


def header_ends(path: Path, prefix: bytes, size: int) -> bool:
    """Whether the first bytes of a file of `size` bytes hold its whole header. Raises
    ModelError."""
    try:
        _walked(path, prefix, size)
    except _PrefixEnds:
        return False
    return True


def _walked(path: Path, data: mmap.mmap | bytes, size: int) -> _Walk:
    try:
        return _Walk(path, data, size)
    except (_NotWhole, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not a whole GGUF file ({error}); fetch it again") from error


class _PrefixEnds(Exception):
    """The header is longer than the bytes that are given of it."""


class _NotWhole(Exception):
    """Why the file is not a whole GGUF file, as a clause."""


class _Walk:
    def __init__(self, path: Path, data: mmap.mmap | bytes, size: int):
        self.data, self.size = data, size
        self.at = self.elements = 0
        self.fields: dict[str, Any] = {}
        self.tensors: dict[str, TensorPlace] = {}
        if self._take(4) != MAGIC:
            raise _NotWhole("it does not begin with GGUF")
        if self._number("I") & 0xFFFF == 0:
            raise _NotWhole("it is written for machines of the other byte order")
        tensors, fields = self._number("Q"), self._number("Q")
        self._room(fields, 8 + 4 + 1, "metadata fields")  # a key's length, type, value of a byte
        self._room(tensors, 8 + 4 + 4 + 8, "tensors")  # name, dimensions, type and offset
        self._count(fields)
        for _ in range(fields):
            key, kind = self._texts(1)()[0], self._number("I")
            self.fields[key] = self._value(kind)
        places = [self._tensor() for _ in range(tensors)]
        alignment = self.fields.get(ALIGNMENT, DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise _NotWhole(f"its alignment is {alignment!r:.20}, which is no power of two")
        first = -(-self.at // alignment) * alignment
        for name, shape, kind, offset, num_bytes in places:
            start = first + offset
            if start + num_bytes > size:
                claim = f"{num_bytes} bytes from byte {start} on"
                raise _NotWhole(f"{name} claims {claim}, the file has {size}")
            self.tensors[name] = TensorPlace(path, shape, kind, start, start + num_bytes)

    def _value(self, kind: int) -> Any:
        if kind in FORMS:
            return self._number(FORMS[kind])
        if kind == STRING:
            return self._texts(1)()[0]
        if kind != ARRAY:
            raise _NotWhole(f"its metadata hold a value of the unknown type {kind}")
        inner, count = self._number("I"), self._number("Q")
        if inner not in (*FORMS, STRING):  # no file has arrays of arrays
            raise _NotWhole(f"an array holds values of the unknown type {inner}")
        size = 8 if inner == STRING else struct.calcsize(FORMS[inner])
        self._room(count, size, "elements of an array")
        self._count(count)
        if inner == STRING:
            return self._texts(count)
        return list(struct.unpack(f"<{count}{FORMS[inner]}", self._take(count * size)))

    def _count(self, elements: int) -> None:
        self.elements += elements
        if self.elements > MOST_ELEMENTS:
            raise _NotWhole(f"its metadata have more than {MOST_ELEMENTS} elements")

    def _texts(self, count: int) -> Callable[[], list[str]]:
        """What reads texts, as most readers of a header need no tokenizer."""
        spans = partial(_spans, self.data, self.at, count)
        for start, stop in spans():
            if stop > len(self.data):
                self.at = start - 8
                self._take(8)
                self._room(stop - start, 1, "bytes of a text")
                raise _PrefixEnds
            self.at = stop
        return lambda: [self.data[start:stop].decode() for start, stop in spans()]

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int, int]:
        """The name of a tensor, its shape, its type, its offset in the data, and its bytes."""
        from gguf import GGML_QUANT_SIZES

        name = self._texts(1)()[0][:100]
        dimensions = self._number("I")
        if dimensions > MOST_DIMENSIONS:
            raise _NotWhole(f"{name} has {dimensions} dimensions, of at most {MOST_DIMENSIONS}")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        kind, offset = self._number("I"), self._number("Q")
        # Unknown types are refused later.
        numbers, num_bytes = GGML_QUANT_SIZES.get(kind, (1, 0))
        return name, shape, kind, offset, math.prod(shape) // numbers * num_bytes

    def _room(self, count: int, least: int, what: str) -> None:
        if count * least > self.size - self.at:
            raise _NotWhole(f"it claims {count} {what}, which its {self.size} bytes cannot hold")

    def _number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(form)))[0]

    def _take(self, count: int) -> bytes:
        if count > self.size - self.at:
            raise _NotWhole(f"its {self.size} bytes end within its header")
        self.at += count
        if self.at > len(self.data):
            raise _PrefixEnds
        return self.data[self.at - count : self.at]


def _spans(data: mmap.mmap | bytes, stop: int, count: int) -> Iterator[tuple[int, int]]:
    """Where texts begin and end, up to the first that the data do not hold."""
    length_at = struct.Struct("<Q").unpack_from
    for _ in range(count):
        start = stop + 8
        stop = start + (length_at(data, stop)[0] if start <= len(data) else 0)
        yield start, stop
