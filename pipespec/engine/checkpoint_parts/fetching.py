"""Fetches tensors into a folder of the parts cache, several pieces at once.

A tensor counts as here once its bytes are on the disk and its SHA-256 is in the file's record. One
process at a time fetches into a folder (`folder_lock`). Memory: one chunk per connection.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipespec.engine.checkpoint_parts.folder_lock import sole_fetcher
from pipespec.engine.checkpoint_parts.hub_client import HubClient, HubFile
from pipespec.engine.checkpoint_parts.parts_file import PartsFile, is_partial, reported
from pipespec.engine.checkpoint_parts.ranges import MAX_GAP_BYTES, Range, RangeSet, pieces
from pipespec.engine.checkpoint_parts.repository import NUM_CONNECTIONS, Repository, ranges_of
from pipespec.errors import ModelError

# Left free on the disk.
SPARE_BYTES = 256 * 2**20
GIB = 2**30
# The hashes of so many bytes are recorded together.
HASHED_BYTES = 256 * 2**20
# Called with how many bytes are here, and of how many that are wanted.
OnProgress = Callable[[int, int], None]
# Called with a file and bytes of it that were written.
OnBytes = Callable[[str, Range], None]


class Source(Protocol):
    """Where bytes of a checkpoint's files come from.

    Attributes:
        name: for messages.
        max_gap: so many bytes between two wanted ranges may be fetched with them; 0 unless the
            source has every byte.
    """

    @property
    def name(self) -> str: ...

    @property
    def max_gap(self) -> int: ...

    def read(self, file: str, part: Range) -> Iterator[bytes]:
        """The bytes of a part of a file, as they come. Raises ModelError."""

    def stop(self) -> None:
        """End what is read, soon."""


@dataclass(frozen=True)
class HubSource:
    """The hub, for one commit of a repository."""

    client: HubClient
    repository: Repository
    max_gap: int = MAX_GAP_BYTES

    @property
    def name(self) -> str:
        return self.client.endpoint

    def read(self, file: str, part: Range) -> Iterator[bytes]:
        size = self.repository.weights[file].size
        return self.client.read(self.repository.commit, file, part, size)

    def stop(self) -> None:
        self.client.stopped.set()


class _Stopped(Exception):
    """Another thread has failed."""


# Names of tensors, by file.
Wanted = Mapping[str, Collection[str]]


@dataclass(frozen=True)
class _File:
    """A file of which tensors are wanted, and where each tensor of the file is."""

    file: PartsFile
    names: Collection[str]
    ranges: Mapping[str, Range]

    @property
    def header(self) -> Range:
        """It is here unless it was found wrong."""
        return 0, min((start for start, _ in self.ranges.values()), default=0)

    @property
    def parts(self) -> list[Range]:
        return [self.header, *(self.ranges[name] for name in self.names)]


def fetch(
    folder: Path,
    sources: Sequence[tuple[Source, Wanted]],
    on_progress: OnProgress = lambda done, total: None,
    on_bytes: OnBytes = lambda file, part: None,
    *,
    locked: bool = False,
) -> int:
    """Fetch tensors, unless they are here, from all their sources at once; the number of bytes
    fetched.

    Args:
        folder: of the parts cache.
        sources: each with the tensors that it is asked for, in this order.
        on_progress, on_bytes: called from several threads.
        locked: whether the caller holds the lock of the folder.

    Raises ModelError: the disk is too small, a source failed, or bytes are wrong.
    """
    with nullcontext() if locked else sole_fetcher(folder):
        wanted: dict[str, list[str]] = {}
        for _, each in sources:
            for name, tensors in each.items():
                wanted.setdefault(name, []).extend(tensors)
        files = {}
        for name, tensors in wanted.items():
            if is_partial(folder / name):
                file, ranges = PartsFile(folder / name), ranges_of(folder / name)
                file.verify(ranges)
                files[name] = _File(file, tensors, ranges)
        _require_room(folder, files.values())
        return _Fetch(files, sources, on_progress, on_bytes).run()


def check_whole(folder: Path, repository: Repository, source: Source) -> None:
    """Compare the files whose tensors are all here with the hashes that the hub states.

    Args:
        source: has every byte; it is asked for those between tensors only where they are neither
            here nor zeros.

    Raises ModelError, and forgets the file, if one differs; ModelError of the source.
    """
    for name, stated in repository.weights.items():
        _check_file(folder / name, stated, source)


def _check_file(path: Path, stated: HubFile, source: Source) -> None:
    if stated.sha256 is None or not is_partial(path):
        return
    file, ranges = PartsFile(path), ranges_of(path)
    if _WHOLE in file.hashes or any(each not in file.here for each in ranges.values()):
        return
    # Hosts send one another no padding between tensors. It is read as zeros, which it should be.
    padding = pieces([(0, stated.size)], file.here, max_gap=0)
    right = file.hash((0, stated.size)) == stated.sha256
    if padding and not right:
        for part in padding:
            _write_piece(source, file, part)
        right = file.hash((0, stated.size)) == stated.sha256
    elif padding:
        with reported(path):
            for part in padding:
                file.commit(part, file.hash(part))
    if not right:
        with reported(path):
            file.forget(ranges.values(), ranges)
        raise ModelError(
            f"{path.name} has another SHA-256 than the hub states, so its bytes are wrong; they "
            "were dropped: start again to fetch them anew, or name another mirror (HF_ENDPOINT)"
        )
    with reported(path):
        file.commit_tensors({_WHOLE: stated.sha256})


# Stands for the whole file among the names of tensors in a record.
_WHOLE = ""


class _Fetch:
    """The fetching of some files."""

    def __init__(
        self,
        files: Mapping[str, _File],
        sources: Sequence[tuple[Source, Wanted]],
        on_progress: OnProgress,
        on_bytes: OnBytes,
    ):
        self._files = files
        self._sources = sources
        self._on_progress, self._on_bytes = on_progress, on_bytes
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._fetched = 0
        self._total = sum(RangeSet(each.parts).num_bytes for each in files.values())
        self._done = self._total - sum(map(_absent_bytes, files.values()))

    def run(self) -> int:
        self._on_progress(self._done, self._total)
        # Connections of its own for each source: none waits for another.
        count = max(1, NUM_CONNECTIONS // max(1, len(self._sources)))
        with ThreadPoolExecutor(count * max(1, len(self._sources))) as pool:
            try:
                _await(
                    [
                        pool.submit(self._drain, source, left)
                        for source, left in self._pieces()
                        for _ in range(count)
                    ]
                )
                _await([pool.submit(self._sum, *task) for task in self._unhashed()])
            except BaseException:
                self._stop.set()
                for source, _ in self._sources:
                    source.stop()
                pool.shutdown(cancel_futures=True)
                raise
        return self._fetched

    def _pieces(self) -> Iterator[tuple[Source, deque[tuple[_File, Range]]]]:
        """What each source is asked for. The header of a file comes from the first one."""
        begun = set[str]()
        for source, wanted in self._sources:
            left: deque[tuple[_File, Range]] = deque()
            for name, tensors in wanted.items():
                if (file := self._files.get(name)) is not None:
                    parts = [file.ranges[tensor] for tensor in tensors]
                    parts += [] if name in begun else [file.header]
                    begun.add(name)
                    here, gap = file.file.here, source.max_gap
                    left += [(file, part) for part in pieces(parts, here, max_gap=gap)]
            yield source, left

    def _drain(self, source: Source, left: deque[tuple[_File, Range]]) -> None:
        """Fetch pieces of a source until none is left."""
        while not self._stop.is_set():
            try:
                file, part = left.popleft()
            except IndexError:
                return
            self._piece(source, file, part)

    def _piece(self, source: Source, wanted: _File, part: Range) -> None:
        """Fetch one piece and record it."""

        def written(chunk: Range) -> None:
            self._on_bytes(wanted.file.path.name, chunk)
            self._moved(chunk[1] - chunk[0])

        _write_piece(source, wanted.file, part, written, self._stop)

    def _moved(self, count: int) -> None:
        with self._lock:
            self._fetched += count
            self._done = min(self._done + count, self._total)
            done = self._done
        self._on_progress(done, self._total)

    def _unhashed(self) -> Iterator[tuple[_File, list[str]]]:
        """Tensors without a hash, some at a time."""
        for wanted in self._files.values():
            some, size = list[str](), 0
            for name in wanted.names:
                if name not in wanted.file.hashes:
                    some.append(name)
                    size += wanted.ranges[name][1] - wanted.ranges[name][0]
                if size > HASHED_BYTES:
                    yield wanted, some
                    some, size = [], 0
            if some:
                yield wanted, some

    def _sum(self, wanted: _File, names: Collection[str]) -> None:
        """Record the hashes of tensors."""
        found = {}
        with reported(wanted.file.path):
            for name in names:
                if self._stop.is_set():
                    raise _Stopped
                found[name] = wanted.file.hash(wanted.ranges[name])
            wanted.file.commit_tensors(found)


def _write_piece(
    source: Source,
    file: PartsFile,
    part: Range,
    on_bytes: Callable[[Range], None] = lambda part: None,
    stop: threading.Event | None = None,
) -> None:
    """Fetch one piece and record it, unless it is to `stop`. Nothing is written outside it: the
    neighbours may be recorded, and would not be looked at again."""
    found = hashlib.sha256()
    at, name = part[0], file.path.name
    with reported(file.path), file.opened() as descriptor:
        for chunk in source.read(name, part):
            if stop is not None and stop.is_set():
                raise _Stopped
            if at + len(chunk) > part[1]:
                raise _wrong_length(source, name, part, "more")
            found.update(chunk)
            os.pwrite(descriptor, chunk, at)
            on_bytes((at, at + len(chunk)))
            at += len(chunk)
        if at < part[1]:
            raise _wrong_length(source, name, part, "fewer")
        file.commit(part, found.hexdigest())


def _await(futures: Collection[Future[None]]) -> None:
    """Wait for all; raise what the first one raised that failed."""
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    errors = [error for each in done if (error := each.exception()) is not None]
    for error in errors:
        if not isinstance(error, _Stopped):
            raise error


def _wrong_length(source: Source, name: str, part: Range, what: str) -> ModelError:
    return ModelError(
        f"{source.name} sends {what} than the {part[1] - part[0]} bytes of {name} that were asked "
        "for; look at pipespec and the disk there, and start again"
    )


def _absent_bytes(wanted: _File) -> int:
    return sum(stop - start for start, stop in wanted.file.absent(RangeSet(wanted.parts)))


def _require_room(folder: Path, files: Collection[_File]) -> None:
    """Raise ModelError unless the disk has room for what is fetched."""
    needed = sum(map(_absent_bytes, files))
    free = shutil.disk_usage(folder).free
    if needed and needed + SPARE_BYTES > free:
        raise ModelError(
            f"{folder} needs {needed / GIB:.2f} GiB for weights, but {free / GIB:.2f} GiB are free "
            "there; make room (`pipespec cache prune`), or set XDG_CACHE_HOME to another disk"
        )
