"""A file of which some blocks are here, and the record of which.

The file is sparse: it has the size of the whole file, and holes where nothing was fetched, so every
reader of weight files can open it once its header is here. It is divided into *blocks* of
BLOCK_BYTES, the same on all hosts. Its record, `.parts/NAME.sha256`, has the SHA-256 of each block
that is here, at 32 times the block's number, and zeros for the others; then that of the whole file,
once it was compared with what the hub states. A hash is written after its bytes, so a process that
is killed leaves at most bytes without a hash, which are fetched again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from pipespec.engine.formats.gguf import is_gguf
from pipespec.engine.formats.gguf_file import GgufFile
from pipespec.engine.formats.safetensors_headers import tensor_ranges
from pipespec.errors import ModelError

# Bytes of a file: start and stop.
Range = tuple[int, int]
BLOCK_BYTES = 2**20
RECORDS = ".parts"
DIGEST_BYTES = 32
ABSENT = bytes(DIGEST_BYTES)


class PartsFile:
    """A file in a folder of the parts cache. Several threads may write to it at once.

    Attributes:
        size: of the whole file, in bytes.
        record: what is in the record, which has `num_blocks` hashes and that of the whole file.
    """

    def __init__(self, path: Path) -> None:
        """Read the record of a file that `create` has made. Raises ModelError."""
        self.path = path
        try:
            self.size = path.stat().st_size
            found = record_of(path).read_bytes()
        except OSError as error:
            raise ModelError(
                f"{path} or its record cannot be read ({error.strerror}); remove its folder"
            ) from error
        self.num_blocks = -(-self.size // BLOCK_BYTES)
        num_bytes = DIGEST_BYTES * (self.num_blocks + 1)
        self.record = bytearray(found[:num_bytes].ljust(num_bytes, b"\0"))

    @classmethod
    def create(cls, path: Path, size: int) -> PartsFile:
        """Make a file of `size` bytes, unless it is there. Raises ModelError."""
        if not (path.is_file() and is_partial(path)):
            with reported(path):
                record_of(path).parent.mkdir(exist_ok=True)
                # In this order: a file without record would count as whole.
                record_of(path).write_bytes(b"")
                with path.open("ab") as stream:
                    stream.truncate(size)
        return cls(path)

    @cached_property
    def ranges(self) -> Mapping[str, Range]:
        """Where each tensor is, by its name in the file. Raises ModelError."""
        return ranges_of(self.path)

    @property
    def tensors(self) -> set[str]:
        """The names in the file of the tensors that are here."""
        return {name for name, place in self.ranges.items() if not self.absent([place])}

    def absent(self, ranges: Iterable[Range] | None = None) -> list[int]:
        """The blocks that hold bytes of these ranges and are not here; None: of the file."""
        wanted = blocks_of([(0, self.size)] if ranges is None else ranges)
        return [each for each in wanted if not self.has(each)]

    def has(self, block: int) -> bool:
        """Whether a block is here."""
        return self.digest(block) != ABSENT

    def digest(self, block: int) -> bytes:
        """The recorded hash of a block; ABSENT: it is not here."""
        return bytes(self.record[DIGEST_BYTES * block : DIGEST_BYTES * (block + 1)])

    def place(self, block: int) -> Range:
        """The bytes of a block."""
        return place_of(block, self.size)

    def num_bytes(self, blocks: Iterable[int]) -> int:
        """The bytes of these blocks."""
        return sum(stop - start for start, stop in map(self.place, blocks))

    def hash(self, part: Range) -> bytes:
        """The SHA-256 of bytes of the file as it is. Raises OSError."""
        found = hashlib.sha256()
        with self.path.open("rb") as stream:
            stream.seek(part[0])
            while (left := part[1] - stream.tell()) > 0:
                found.update(stream.read(min(left, BLOCK_BYTES)))
        return found.digest()

    def write(self, block: int, data: bytes, sha: bytes | None = None) -> None:
        """Write a block, and then its hash, which may be known. Raises OSError."""
        _write(self.path, data, block * BLOCK_BYTES)
        self._note(block, sha or hashlib.sha256(data).digest())

    def verify(self) -> None:
        """Forget the blocks whose bytes are not as recorded. Raises ModelError."""
        with reported(self.path):
            for each in filter(self.has, range(self.num_blocks)):
                if self.hash(self.place(each)) != self.digest(each):
                    self._note(each, ABSENT)
                    self._note(self.num_blocks, ABSENT)  # the whole is to be compared again

    def compare(self, sha256: str | None) -> None:
        """If all of the file is here, compare it with its SHA-256, if that is known, unless it was
        compared before. Raises ModelError if it differs; then no block counts as here."""
        if sha256 is None or self.digest(self.num_blocks) != ABSENT or self.absent():
            return
        with reported(self.path):
            found = self.hash((0, self.size))
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
        """Have all on the disk, also after a loss of power. Raises ModelError."""
        with reported(self.path):
            for each in (self.path, record_of(self.path)):
                with each.open("rb") as stream:
                    os.fsync(stream.fileno())

    def _note(self, number: int, digest: bytes) -> None:
        at = DIGEST_BYTES * number
        _write(record_of(self.path), digest, at)
        self.record[at : at + DIGEST_BYTES] = digest


def _write(path: Path, data: bytes, at: int) -> None:
    with path.open("r+b", buffering=0) as stream:
        if os.pwrite(stream.fileno(), data, at) < len(data):
            raise OSError(28, "No space left on device")


def blocks_of(ranges: Iterable[Range]) -> list[int]:
    """The blocks that hold bytes of these ranges, in order."""
    found = set[int]()
    for start, stop in ranges:
        found.update(range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)))
    return sorted(found)


def place_of(block: int, size: int) -> Range:
    """The bytes of a block of a file of `size` bytes."""
    return block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, size)


def ranges_of(file: Path) -> Mapping[str, Range]:
    """Where each tensor of a weight file is, by its name in the file. Raises ModelError."""
    if not is_gguf(file):
        return tensor_ranges(file)
    return {name: (each.start, each.stop) for name, each in GgufFile(file).tensors.items()}


def record_of(path: Path) -> Path:
    """The record of a file."""
    return path.parent / RECORDS / f"{path.name}.sha256"


def is_partial(path: Path) -> bool:
    """Whether a file has a record, so that some of its bytes may not be here."""
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
