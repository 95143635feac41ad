"""A file of which some blocks are here, and the record of which.

The file is sparse: it has the size of the whole file, and holes where nothing was fetched, so every
reader of weight files can open it once its header is here. Its *blocks* have BLOCK_BYTES, the same
on all hosts. Its record, `.parts/NAME.blocks`, has the SHA-256 of each block that is here, at 32
times the block's number, and zeros for the others; then that of the whole file, once it was
compared with what the hub states. A hash is written after its bytes, so a process that is killed
leaves at most bytes without a hash, which are fetched again. Beside `.parts` nothing of a file
without a record counts as here, unless it is a link; elsewhere files are whole.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pipespec.engine.formats.gguf import is_gguf
from pipespec.engine.formats.gguf_file import GgufFile
from pipespec.engine.formats.safetensors_headers import tensor_ranges
from pipespec.errors import ModelError

log = logging.getLogger(__name__)
Range = tuple[int, int]  # bytes of a file: start and stop
BLOCK_BYTES = 2**22  # and of a request
RECORDS = ".parts"  # in folders of the parts cache alone
DIGEST_BYTES = 32
ABSENT = bytes(DIGEST_BYTES)


class PartsFile:
    """A file of `size` bytes, with a record of `num_blocks` hashes and that of the whole; None: all
    is here. Several threads may write to it at once. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, path.stat().st_size
        self.num_blocks = -(-self.size // BLOCK_BYTES)
        self.record: bytearray | None = None
        if is_partial(path):
            num_bytes = DIGEST_BYTES * (self.num_blocks + 1)
            found = record_of(path).read_bytes() if record_of(path).is_file() else b""
            self.record = bytearray(found[:num_bytes].ljust(num_bytes, b"\0"))

    @classmethod
    def create(cls, path: Path, size: int) -> PartsFile:
        """Make a file of `size` bytes without any block, unless it is there, or a link."""
        record = record_of(path)
        begun = path.is_file() and record.is_file() and path.stat().st_size == size
        if not (begun or path.is_symlink()):
            record.parent.mkdir(exist_ok=True)
            record.write_bytes(b"")
            with path.open("ab") as stream:
                stream.truncate(size)
        return cls(path)

    def absent(self, ranges: Iterable[Range] | None = None) -> list[int]:
        """The blocks that hold bytes of these ranges and are not here; None: of the file."""
        wanted = blocks_of([(0, self.size)] if ranges is None else ranges)
        return [each for each in wanted if not self.has(each)]

    def has(self, block: int) -> bool:
        return self.digest(block) != ABSENT

    def digest(self, block: int) -> bytes | None:
        """The recorded hash of a block; ABSENT: it is not here; None: of a whole file."""
        at = DIGEST_BYTES * block
        return None if self.record is None else bytes(self.record[at : at + DIGEST_BYTES])

    def place(self, block: int) -> Range:
        return place_of(block, self.size)

    def read(self, block: int) -> bytes | None:
        """The bytes of a block; None: it is not here, or they are not as recorded, and then it does
        not count as here any more."""
        start, stop = self.place(block)
        with self.path.open("rb") as stream:
            stream.seek(start)
            data = stream.read(stop - start)
        if self.record is None or hashlib.sha256(data).digest() == self.digest(block):
            return data
        if self.has(block):
            log.warning("%s is not as it was fetched, so a block of it is dropped", self.path)
            for each in (block, self.num_blocks):  # the whole is to be compared again
                self._note(each, ABSENT)
        return None

    def write(self, block: int, data: bytes | bytearray) -> None:
        """Write a block, and then its hash."""
        _write(self.path, data, block * BLOCK_BYTES)
        self._note(block, hashlib.sha256(data).digest())

    def verify(self) -> None:
        """Forget the blocks whose bytes are not as recorded."""
        for each in filter(self.has, range(self.num_blocks)):
            self.read(each)

    def compare(self, sha256: str | None) -> None:
        """If all of the file is here, compare it with its SHA-256, if that is known, unless it was
        compared before. Raises ModelError if it differs; then no block counts as here."""
        if sha256 is None or self.has(self.num_blocks) or self.absent():
            return
        with self.path.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").digest()
        if found.hex() == sha256:
            self._note(self.num_blocks, found)
            return
        for each in range(self.num_blocks):
            self._note(each, ABSENT)
        raise ModelError(
            f"{self.path.name} has another SHA-256 than the hub states, so its bytes are wrong; "
            "they were dropped: start again to fetch them anew, or name another mirror "
            "(HF_ENDPOINT)"
        )

    def sync(self) -> None:
        """Have all on the disk, also after a loss of power."""
        for each in () if self.record is None else (self.path, record_of(self.path)):
            with each.open("rb") as stream:
                os.fsync(stream.fileno())

    def _note(self, number: int, digest: bytes) -> None:
        assert self.record is not None
        at = DIGEST_BYTES * number
        _write(record_of(self.path), digest, at)
        self.record[at : at + DIGEST_BYTES] = digest


def _write(path: Path, data: bytes | bytearray, at: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(at)
        stream.write(data)


def blocks_of(ranges: Iterable[Range]) -> list[int]:
    """The blocks that hold bytes of these ranges, in order."""
    found = (range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)) for start, stop in ranges)
    return sorted(set[int]().union(*found))


def place_of(block: int, size: int) -> Range:
    """The bytes of a block of a file of `size` bytes."""
    return block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, size)


def ranges_of(file: Path) -> Mapping[str, Range]:
    """Where each tensor of a weight file is, by its name in the file. Raises ModelError."""
    if not is_gguf(file):
        return tensor_ranges(file)
    return {name: (each.start, each.stop) for name, each in GgufFile(file).tensors.items()}


def record_of(path: Path) -> Path:
    return path.parent / RECORDS / f"{path.name}.blocks"


def is_partial(path: Path) -> bool:
    """Whether some bytes of a file may not be here: it has a record, or has lost it."""
    return path.is_file() and not path.is_symlink() and (path.parent / RECORDS).is_dir()


@contextmanager
def reported(path: Path) -> Iterator[None]:
    """Raise ModelError in place of OSError, as of a full disk."""
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"{error.filename or path} cannot be written ({error.strerror}); make room or set "
            "XDG_CACHE_HOME to a folder that can be written"
        ) from error
