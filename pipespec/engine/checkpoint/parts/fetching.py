"""Fetches blocks of files into a folder of the parts cache, over several connections.

The caller holds the lock of the folder. Memory: one block per connection.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from pipespec.engine.checkpoint.parts.parts_file import PartsFile, reported
from pipespec.engine.checkpoint.parts.range_source import RangeSource, Unavailable
from pipespec.errors import ModelError

NUM_CONNECTIONS = 8
# Neighbours that are fetched by one request.
REQUEST_BLOCKS = 16
# Left free on the disk.
SPARE_BYTES = 256 * 2**20
GIB = 2**30
# Blocks by file, and the hash of each by the source's record, if it has one.
Wanted = Mapping[PartsFile, Mapping[int, bytes | None]]
# Called with numbers of bytes, from several threads.
OnBytes = Callable[[int], object]


class WrongBytes(ModelError):
    """A source sends other bytes than it has recorded."""


def fetch(
    asked: Sequence[tuple[RangeSource, Wanted]], moved: OnBytes = lambda count: None
) -> dict[RangeSource, ModelError]:
    """Fetch blocks from several sources at once; why a source was given up: Unavailable or
    WrongBytes.

    Raises ModelError: the disk is too small or cannot be written, or a source refuses.
    """
    _require_room([each for _, want in asked for each in want.items()])
    failed: dict[RangeSource, ModelError] = {}

    def drain(source: RangeSource, want: Wanted, left: deque[tuple[PartsFile, list[int]]]) -> None:
        while not source.stopped.is_set() and source not in failed:
            try:
                file, blocks = left.popleft()
            except IndexError:
                return
            try:
                _get(source, file, blocks, want[file], moved)
            except (Unavailable, WrongBytes) as error:
                failed.setdefault(source, error)

    # Connections of its own for each source: none waits for another.
    count = max(1, NUM_CONNECTIONS // max(1, len(asked)))
    with ThreadPoolExecutor(count * max(1, len(asked))) as pool:
        try:
            tasks = []
            for source, want in asked:
                left = deque((file, run) for file, some in want.items() for run in _runs(some))
                tasks += [pool.submit(drain, source, want, left) for _ in range(count)]
            for task in as_completed(tasks):
                task.result()
        except BaseException:
            for source, _ in asked:
                source.stopped.set()
            raise
        finally:
            for file in {file for _, want in asked for file in want}:
                file.sync()
    return failed


def fetch_all(source: RangeSource, wanted: Mapping[PartsFile, Iterable[int]]) -> None:
    """Fetch blocks from the one source that there is. Raises ModelError."""
    asked = {file: dict.fromkeys(blocks) for file, blocks in wanted.items()}
    for error in fetch([(source, asked)]).values():
        raise error


def _require_room(wanted: Sequence[tuple[PartsFile, Iterable[int]]]) -> None:
    """Raise ModelError unless the disk has room for what is fetched."""
    total = sum(file.num_bytes(blocks) for file, blocks in wanted)
    if not total:
        return
    folder = wanted[0][0].path.parent
    free = shutil.disk_usage(folder).free
    if total + SPARE_BYTES > free:
        raise ModelError(
            f"{folder} needs {total / GIB:.2f} GiB for weights, but {free / GIB:.2f} GiB are free "
            "there; make room (`pipespec cache prune`), or set XDG_CACHE_HOME to another disk"
        )


def _get(
    source: RangeSource,
    file: PartsFile,
    blocks: list[int],
    hashes: Mapping[int, bytes | None],
    moved: OnBytes,
) -> None:
    """Fetch neighbouring blocks and record them. Nothing is written outside them."""
    left, data = deque(blocks), bytearray()

    def take(chunk: bytes) -> None:
        data.extend(chunk)
        while left and len(data) >= (size := file.num_bytes([left[0]])):
            block, found = left.popleft(), bytes(data[:size])
            sha = hashlib.sha256(found).digest()
            if hashes[block] not in (None, sha):
                raise WrongBytes(f"{source.name} sends wrong bytes of {file.path.name}")
            file.write(block, found, sha)
            del data[:size]
            moved(size)

    with reported(file.path):
        part = file.place(blocks[0])[0], file.place(blocks[-1])[1]
        source.read(file.path.name, part, file.size, take)


def _runs(blocks: Iterable[int]) -> list[list[int]]:
    """Neighbours that are fetched together."""
    found: list[list[int]] = []
    for block in sorted(blocks):
        last = found[-1] if found else [-2]
        if last[-1] + 1 == block and len(last) < REQUEST_BLOCKS:
            last.append(block)
        else:
            found.append([block])
    return found
