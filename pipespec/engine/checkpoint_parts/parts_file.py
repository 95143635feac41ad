"""A weight file of which some pieces are here, and the record of which.

The file is sparse: it has the size and the header of the whole file, so that every reader of such
files can open it, and holes where nothing was fetched. The header divides it into *pieces*: the
header itself, and each tensor with what follows it up to the next one, cut every PIECE_BYTES. So
all hosts have the same pieces, and know by their hashes whether they have the same bytes. Its
record, `.parts/NAME.log`, has a line of JSON for each that is here:

    {"range": [start, stop], "sha256": "..."}    null: its bytes were found to be wrong
    {"checked": true}                            after a fetch that has ended: all lines before

A line is appended once its bytes are on the disk. A process that is killed leaves at most an
unfinished last line, which is ignored, and bytes without a line, which are fetched again. The range
of the whole file stands for its comparison with the hash that the hub states.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipespec.engine.checkpoint.formats import gguf
from pipespec.engine.checkpoint.safetensors_headers import tensor_ranges
from pipespec.errors import ModelError
from pipespec.system.validation import Missing, Unreadable, parse_json, read_bytes

# Bytes of a file: start and stop.
Range = tuple[int, int]
PIECE_BYTES = 4 * 2**20
RECORDS = ".parts"
# A record has a line per piece, of some 120 bytes.
MOST_RECORD_BYTES = 2**30
READ_BYTES = 2**20


class PartsFile:
    """A weight file in a folder of the parts cache. Several threads may write to it at once.

    Attributes:
        hashes: of the pieces that are here.
    """

    def __init__(self, path: Path) -> None:
        """Read the record of a file that `create` has made. Raises ModelError."""
        self.path = path
        self._record = record_of(path)
        self.hashes: dict[Range, str] = {}
        self._unchecked: dict[Range, None] = {}
        self._changed = threading.Condition()
        self._arrived, self._expected = set[Range](), set[Range]()
        for line in self._lines():
            self._note(line)

    @classmethod
    def create(cls, path: Path, size: int, header: bytes) -> PartsFile:
        """Make a file of `size` bytes that begins with `header`, and perhaps more, unless it is
        there. Raises ModelError."""
        record = record_of(path)
        with reported(path), ExitStack() as stack:
            record.parent.mkdir(exist_ok=True)
            # Of two processes that find no file, the second would empty the record of the first.
            lock = stack.enter_context((record.parent / "create").open("wb"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (path.is_file() and record.is_file() and path.stat().st_size == size):
                # In this order: a file without record would count as whole.
                record.write_bytes(b"")
                path.unlink(missing_ok=True)
                with path.open("wb") as stream:
                    stream.truncate(size)
            file = cls(path)
            with path.open("rb") as stream:
                is_there = file.hashes and stream.read(len(header)) == header
            if not is_there:
                with file.opened() as descriptor:
                    os.pwrite(descriptor, header, 0)
                whole = [e for e in file.pieces([(0, len(header))]) if e[1] <= len(header)]
                file.commit({each: file.hash(each) for each in whole})
        return file

    @cached_property
    def ranges(self) -> Mapping[str, Range]:
        """Where each tensor is, by its name in the file. Raises ModelError."""
        return ranges_of(self.path)

    @cached_property
    def _cuts(self) -> list[int]:
        return cuts(self.path, self.ranges)

    def pieces(self, ranges: Iterable[Range] | None = None) -> list[Range]:
        """The pieces that hold bytes of these ranges, in order; None: all."""
        return pieces(self._cuts, ranges)

    def absent(self, ranges: Iterable[Range] | None = None) -> list[Range]:
        """Those of them that are not here."""
        return [each for each in self.pieces(ranges) if each not in self.hashes]

    @property
    def tensors(self) -> set[str]:
        """The names in the file of the tensors that are here."""
        return {name for name, place in self.ranges.items() if not self.absent([place])}

    @contextmanager
    def opened(self) -> Iterator[int]:
        """A descriptor to read from and write to."""
        descriptor = os.open(self.path, os.O_RDWR)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def commit(self, hashes: Mapping[Range, str]) -> None:
        """Record pieces whose bytes were written. Raises OSError."""
        with self.opened() as descriptor:
            os.fdatasync(descriptor)
        self._append(*({"range": list(each), "sha256": sha} for each, sha in hashes.items()))

    def forget(self, wrong: Iterable[Range]) -> None:
        """Take pieces out of the record. Raises OSError."""
        gone = [each for each in wrong if each in self.hashes]
        if gone:
            gone += {(0, self.path.stat().st_size)} & self.hashes.keys()
            self._append(*({"range": list(each), "sha256": None} for each in gone))

    def hash(self, part: Range) -> str:
        """The SHA-256 of bytes that are here. Raises OSError."""
        found = hashlib.sha256()
        with self.path.open("rb") as stream:
            stream.seek(part[0])
            left = part[1] - part[0]
            while left and (data := stream.read(min(left, READ_BYTES))):
                found.update(data)
                left -= len(data)
        return found.hexdigest()

    def verify(self) -> None:
        """Forget what a fetch that was killed has left and is not what was recorded."""
        with reported(self.path):
            self.forget([e for e in self._unchecked if self.hash(e) != self.hashes[e]])
            self.end_fetch()

    def end_fetch(self) -> None:
        """Record that what is here need not be read again. Raises OSError."""
        if self._unchecked:
            self._append({"checked": True})

    def compare(self, sha256: str | None) -> None:
        """If all of the file is here, compare it with its SHA-256, if that is known, unless it was
        compared before. Raises ModelError if it differs; then nothing of it counts as here."""
        whole = 0, self.path.stat().st_size
        if sha256 is None or whole in self.hashes or self.absent():
            return
        with reported(self.path):
            if self.hash(whole) == sha256:
                self.commit({whole: sha256})
                self.end_fetch()
                return
            self.forget(self.pieces()[1:])
        raise ModelError(
            f"{self.path.name} has another SHA-256 than the hub states, so its bytes are wrong; "
            "they were dropped: start again to fetch them anew, or name another mirror "
            "(HF_ENDPOINT)"
        )

    # --- readers that wait for what is fetched ----------------------------------------------------

    def expect(self, expected: Iterable[Range]) -> None:
        """These pieces will be fetched too."""
        new = set(expected)
        with self._changed:
            self._expected |= new
            self._arrived -= new

    def arrived(self, piece: Range) -> None:
        """The bytes of a piece were written."""
        with self._changed:
            self._arrived.add(piece)
            self._changed.notify_all()

    def wait_for(self, part: Range, timeout_s: float) -> bool:
        """Whether these bytes are here within so many seconds. Raises ModelError at once if they
        will not come."""
        with self._changed:
            absent = [e for e in self.absent([part]) if e not in self._arrived]
            if not self._expected.issuperset(absent):
                raise ModelError(
                    f"bytes {part[0]} to {part[1]} of {self.path} are neither here nor fetched in "
                    "this start; start again"
                )
            return self._changed.wait_for(lambda: self._arrived.issuperset(absent), timeout_s)

    # --- the record -------------------------------------------------------------------------------

    def _lines(self) -> Iterator[dict[str, Any]]:
        try:
            data = read_bytes(self._record, most=MOST_RECORD_BYTES)
        except Missing:
            raise ModelError(f"{self.path} has no record {self._record}; remove both") from None
        except Unreadable as error:
            raise ModelError(f"{self._record} cannot be read ({error}); remove it") from error
        for line in data.split(b"\n")[:-1]:
            try:
                found = parse_json(line)
            except Unreadable:  # a killed process has left half a line, and another went on
                continue
            if isinstance(found, dict):
                yield found

    def _note(self, line: Mapping[str, Any]) -> None:
        if "checked" in line:
            self._unchecked.clear()
        if "range" not in line:
            return
        start, stop = line["range"]
        self._unchecked.pop((start, stop), None)
        self.hashes.pop((start, stop), None)
        if line["sha256"] is not None:
            self.hashes[start, stop] = line["sha256"]
            self._unchecked[start, stop] = None

    def _append(self, *lines: dict[str, Any]) -> None:
        with self._changed:
            with self._record.open("r+b") as stream:
                if stream.seek(0, os.SEEK_END):
                    stream.seek(-1, os.SEEK_END)
                    whole = stream.read(1) == b"\n"
                    stream.write(b"" if whole else b"\n")
                stream.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
                stream.flush()
                os.fsync(stream.fileno())
            for line in lines:
                self._note(line)


def ranges_of(file: Path) -> Mapping[str, Range]:
    """Where each tensor of a weight file is, by its name in the file. Raises ModelError."""
    return gguf.tensor_ranges(file) if gguf.is_gguf(file) else tensor_ranges(file)


def cuts(file: Path, ranges: Mapping[str, Range] | None = None) -> list[int]:
    """Where the pieces of a weight file begin, and the last one ends. Raises ModelError."""
    ranges = ranges_of(file) if ranges is None else ranges
    found = {0, file.stat().st_size}
    for start, stop in ranges.values():
        found.update(range(start, max(stop, start + 1), PIECE_BYTES))
    return sorted(found)


def pieces(cuts: list[int], ranges: Iterable[Range] | None = None) -> list[Range]:
    """The pieces that hold bytes of these ranges, in order; None: all."""
    if ranges is None:
        return list(pairwise(cuts))
    found = set[Range]()
    for start, stop in ranges:
        first, end = bisect_right(cuts, start) - 1, bisect_left(cuts, stop)
        found.update(pairwise(cuts[first : end + 1]))
    return sorted(found)


def record_of(path: Path) -> Path:
    """The record of a weight file."""
    return path.parent / RECORDS / f"{path.name}.log"


def is_partial(path: Path) -> bool:
    """Whether a weight file has a record, so that some of its bytes may not be here."""
    return record_of(path).is_file()


@contextmanager
def reported(path: Path) -> Iterator[None]:
    """Raise ModelError in place of OSError: a full disk, or a folder that cannot be written."""
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"{path} cannot be written ({error.strerror}); make room or set XDG_CACHE_HOME to a "
            "folder that can be written"
        ) from error
