"""A weight file of which some bytes are here, and the record of which.

The file is sparse: it has the size and the header of the whole file, so that every reader of such
files can open it, and holes where nothing was fetched. Its record, `.parts/NAME.log`, has a line of
JSON for each range of bytes that is here and for each tensor whose hash is known:

    {"range": [start, stop], "sha256": "..."}
    {"tensor": "model.norm.weight", "sha256": "..."}

A line is appended once its bytes are on the disk. A process that is killed leaves at most an
unfinished last line, which is ignored, and bytes without a line, which are fetched again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pipespec.engine.checkpoint_parts.ranges import Range, RangeSet
from pipespec.errors import ModelError
from pipespec.system.validation import Missing, Unreadable, parse_json, read_bytes

RECORDS = ".parts"
# A record has a line per piece and per tensor, of some 150 bytes.
MOST_RECORD_BYTES = 2**30
READ_BYTES = 2**20


class PartsFile:
    """A weight file in a folder of the parts cache. Several threads may write to it at once."""

    def __init__(self, path: Path) -> None:
        """Read the record of a file that `create` has made. Raises ModelError."""
        self.path = path
        self._record = record_of(path)
        self._lock = threading.Lock()
        self.here, self.hashes = RangeSet(), dict[str, str]()
        self._sums: dict[Range, str] = {}
        for line in self._lines():
            self._note(line)

    @classmethod
    def create(cls, path: Path, size: int, header: bytes) -> PartsFile:
        """Make a file of `size` bytes that begins with `header`, unless it is there. Raises
        ModelError."""
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
            if (0, len(header)) not in file.here:
                with file.opened() as descriptor:
                    os.pwrite(descriptor, header, 0)
                file.commit((0, len(header)), hashlib.sha256(header).hexdigest())
        return file

    def absent(self, wanted: Iterable[Range]) -> list[Range]:
        """The bytes of these ranges that are not here."""
        with self._lock:
            return [gap for each in wanted for gap in self.here.gaps(each)]

    @contextmanager
    def opened(self) -> Iterator[int]:
        """A descriptor to read from and write to."""
        descriptor = os.open(self.path, os.O_RDWR)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def commit(self, done: Range, sha256: str) -> None:
        """Record a range whose bytes were written. Raises OSError."""
        with self.opened() as descriptor:
            os.fdatasync(descriptor)
        self._append({"range": list(done), "sha256": sha256})

    def commit_tensors(self, hashes: Mapping[str, str]) -> None:
        """Record the hashes of tensors whose bytes are here. Raises OSError."""
        self._append(*({"tensor": name, "sha256": sha} for name, sha in hashes.items()))

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

    def verify(self, ranges: Mapping[str, Range]) -> int:
        """Forget recorded bytes that differ from what was recorded; the number of bytes forgotten.

        Args:
            ranges: where each tensor is. Tensors with a known hash are not read again.
        """
        known = RangeSet(ranges[name] for name in self.hashes if name in ranges)
        wrong = [
            part for part, sha in self._sums.items() if part not in known and self.hash(part) != sha
        ]
        if wrong:
            self.forget(wrong, ranges)
        return sum(stop - start for start, stop in wrong)

    def forget(self, wrong: Iterable[Range], ranges: Mapping[str, Range]) -> None:
        """Take the pieces in which these ranges are out of the record, and the hashes of all
        tensors that are then no longer whole. Raises OSError."""
        gone = RangeSet(wrong)
        with self._lock:
            sums = {each: sha for each, sha in self._sums.items() if not _overlaps(gone, each)}
            kept = RangeSet(sums)
            hashes = {
                name: sha
                for name, sha in self.hashes.items()
                if name in ranges and ranges[name] in kept
            }
            lines: list[dict[str, Any]] = [
                {"range": list(each), "sha256": sha} for each, sha in sums.items()
            ]
            lines += [{"tensor": name, "sha256": sha} for name, sha in hashes.items()]
            partial = self._record.with_suffix(".partial")
            partial.write_bytes(b"".join(map(_encoded, lines)))
            os.replace(partial, self._record)
            self.here, self.hashes, self._sums = RangeSet(), {}, {}
            for line in lines:
                self._note(line)

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
        if "range" in line:
            start, stop = line["range"]
            self.here.add((start, stop))
            self._sums[start, stop] = line["sha256"]
        else:
            self.hashes[line["tensor"]] = line["sha256"]

    def _append(self, *lines: dict[str, Any]) -> None:
        with self._lock:
            with self._record.open("r+b") as stream:
                if stream.seek(0, os.SEEK_END):
                    stream.seek(-1, os.SEEK_END)
                    whole = stream.read(1) == b"\n"
                    stream.write(b"" if whole else b"\n")
                stream.write(b"".join(map(_encoded, lines)))
                stream.flush()
                os.fsync(stream.fileno())
            for line in lines:
                self._note(line)


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


def _overlaps(ranges: RangeSet, wanted: Range) -> bool:
    return list(ranges.gaps(wanted)) != [wanted]


def _encoded(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line).encode() + b"\n"
