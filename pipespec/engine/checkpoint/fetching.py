"""Fetches blocks of weight files into a folder of the parts cache, over several connections.

The caller holds the lock of the folder. Memory: one block per connection.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from pipespec.engine.checkpoint.partial_checkpoint import clause, missing, tensors_by_file
from pipespec.engine.checkpoint.parts.folder import (
    folder_of_checkpoint,
    read_repository,
    sole_fetcher,
)
from pipespec.engine.checkpoint.parts.parts_file import PartsFile, is_partial, reported
from pipespec.engine.checkpoint.parts.range_source import HubSource, RangeSource, Unavailable
from pipespec.errors import ModelError

NUM_CONNECTIONS = 8
# Neighbours that are fetched by one request.
REQUEST_BLOCKS = 16
# Left free on the disk.
SPARE_BYTES = 256 * 2**20
GIB = 2**30
# Blocks by file, and the hash of each by the source's record, if it has one.
Wanted = Mapping[str, Mapping[int, bytes | None]]
# Neighbours of a file.
_Run = tuple[PartsFile, list[int]]


class WrongBytes(ModelError):
    """A source sends other bytes than it has recorded."""


def fetch_parts(
    path: Path,
    parts: Collection[str],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Fetch the parts (`slice_tensors`) that a checkpoint lacks here from the hub; the bytes
    fetched, with which, and with those that are wanted, `on_progress` is called.

    Raises ModelError if it lacks some and is of no repository of the hub, or they cannot be
    fetched.
    """
    lacking = missing(path, parts)
    if not lacking:
        return 0
    folder, done, counting = folder_of_checkpoint(path), 0, threading.Lock()
    repository = read_repository(folder)
    if repository is None or not repository.on_hub:
        raise ModelError(f"{path} {clause(lacking)}; copy the files there")

    def moved(count: int) -> None:
        nonlocal done
        with counting:
            done += count
            on_progress(done, total)

    with sole_fetcher(folder):
        files, absent = lacking_blocks(path, parts)
        total = sum(files[name].num_bytes(blocks) for name, blocks in absent.items())
        source = HubSource(repository.repo, repository.commit)
        wanted = {name: dict.fromkeys(blocks) for name, blocks in absent.items()}
        for error in fetch(files, [("hub", source, wanted)], moved).values():
            raise error
        for name, file in files.items():
            file.compare(repository.weights[name].sha256)
    return done


def lacking_blocks(
    path: Path, parts: Collection[str]
) -> tuple[dict[str, PartsFile], dict[str, list[int]]]:
    """The files with these parts of which blocks may be absent, and which of the parts' are."""
    files, absent = {}, {}
    for file, names in tensors_by_file(path, parts).items():
        if is_partial(file):
            own = files[file.name] = PartsFile(file)
            absent[file.name] = own.absent(own.ranges[each] for each in names.values())
    return files, absent


def fetch(
    files: Mapping[str, PartsFile],
    asked: Sequence[tuple[str, RangeSource, Wanted]],
    moved: Callable[[int], object],
) -> dict[str, ModelError]:
    """Fetch blocks from all their sources at once; why a source was given up (Unavailable or
    WrongBytes), by its name.

    Args:
        asked: name, source, and what it is asked for.
        moved: called with numbers of bytes, from several threads.

    Raises ModelError: the disk is too small or cannot be written, or a source refuses.
    """
    _require_room(files, asked)
    failed: dict[str, ModelError] = {}
    stop = threading.Event()

    def drain(name: str, source: RangeSource, want: Wanted, left: deque[_Run]) -> None:
        while not stop.is_set() and name not in failed:
            try:
                file, blocks = left.popleft()
            except IndexError:
                return
            try:
                _get(source, file, blocks, want[file.path.name], moved)
            except (Unavailable, WrongBytes) as error:
                failed.setdefault(name, error)

    # Connections of its own for each source: none waits for another.
    count = max(1, NUM_CONNECTIONS // max(1, len(asked)))
    with ThreadPoolExecutor(count * max(1, len(asked))) as pool:
        try:
            tasks = []
            for name, source, want in asked:
                left = deque((files[of], run) for of, some in want.items() for run in _runs(some))
                tasks += [pool.submit(drain, name, source, want, left) for _ in range(count)]
            for task in as_completed(tasks):
                task.result()
        except BaseException:
            stop.set()
            for _, source, _ in asked:
                source.stopped.set()
            raise
        finally:
            for file in files.values():
                file.sync()
    return failed


def _require_room(
    files: Mapping[str, PartsFile], asked: Sequence[tuple[str, RangeSource, Wanted]]
) -> None:
    """Raise ModelError unless the disk has room for what is fetched."""
    total = sum(files[name].num_bytes(of) for *_, want in asked for name, of in want.items())
    if not total:
        return
    folder = next(iter(files.values())).path.parent
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
    moved: Callable[[int], object],
) -> None:
    """Fetch neighbouring blocks and record them. Nothing is written outside them."""
    left, data = deque(blocks), bytearray()
    with reported(file.path):
        part = file.place(blocks[0])[0], file.place(blocks[-1])[1]
        for chunk in source.read(file.path.name, part, file.size):
            data += chunk
            while left and len(data) >= (size := file.num_bytes([left[0]])):
                block, found = left.popleft(), bytes(data[:size])
                sha = hashlib.sha256(found).digest()
                if hashes[block] not in (None, sha):
                    raise WrongBytes(f"{source.name} sends wrong bytes of {file.path.name}")
                file.write(block, found, sha)
                del data[:size]
                moved(size)


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
