"""Fetches pieces of weight files into a folder of the parts cache, over several connections.

A piece counts as here once its bytes are on the disk and its SHA-256 is in the file's record. One
process at a time fetches into a folder (`folder_lock`). Memory: one chunk per connection.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipespec.engine.checkpoint.partial_checkpoint import clause, missing, tensors_by_file
from pipespec.engine.checkpoint_parts.folder_lock import sole_fetcher
from pipespec.engine.checkpoint_parts.hub_client import HubClient
from pipespec.engine.checkpoint_parts.parts_file import PartsFile, Range, is_partial, reported
from pipespec.engine.checkpoint_parts.repository import (
    NUM_CONNECTIONS,
    Repository,
    folder_of_checkpoint,
    read_repository,
)
from pipespec.errors import ModelError

# Of neighbours that are fetched by one request and recorded together: what each connection of a
# process that is killed loses at most.
REQUEST_BYTES = 16 * 2**20
# Left free on the disk.
SPARE_BYTES = 256 * 2**20
GIB = 2**30
# Called with how many bytes are here, and of how many that are wanted.
OnProgress = Callable[[int, int], None]
# Pieces, by file.
Wanted = Mapping[str, Iterable[Range]]


class Source(Protocol):
    """Where bytes of a checkpoint's files come from; `name` is for messages."""

    @property
    def name(self) -> str: ...

    def read(self, file: str, part: Range) -> Iterator[bytes]:
        """The bytes of a part of a file, as they come. Raises ModelError."""

    def stop(self) -> None:
        """End what is read, soon."""


@dataclass(frozen=True)
class HubSource:
    """The hub, for one commit of a repository."""

    client: HubClient
    repository: Repository

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


def fetch_parts(
    path: Path, parts: Collection[str], on_progress: OnProgress = lambda done, total: None
) -> int:
    """Fetch the parts (`slice_tensors`) that a checkpoint lacks here from the hub; the bytes
    fetched.

    Raises ModelError if it lacks some and is of no repository of the hub, or they cannot be
    fetched.
    """
    lacking = missing(path, parts)
    if not lacking:
        return 0
    folder = folder_of_checkpoint(path)
    repository = read_repository(folder)
    if repository is None or not repository.on_hub:
        raise ModelError(f"{path} {clause(lacking)}; copy the files there")
    with sole_fetcher(folder):
        files, wanted = {}, {}
        for file, names in tensors_by_file(path, parts).items():
            if is_partial(file):
                own = files[file.name] = PartsFile(file)
                own.verify()
                header = own.pieces()[:1]  # it is here unless it was found wrong
                wanted[file.name] = header + own.pieces(own.ranges[each] for each in names.values())
        source = HubSource(HubClient(repository.repo), repository)
        fetched = fetch(files, [(source, wanted)], on_progress)
        for name, own in files.items():
            own.compare(repository.weights[name].sha256)
    return fetched


def fetch(
    files: Mapping[str, PartsFile],
    sources: Sequence[tuple[Source, Wanted]],
    on_progress: OnProgress = lambda done, total: None,
) -> int:
    """Fetch pieces, unless they are here, from all their sources at once; the bytes fetched. The
    caller holds the lock of the folder.

    Args:
        sources: each with the pieces that it is asked for, in this order.
        on_progress: called from several threads.

    Raises ModelError: the disk is too small, a source failed, or it sent too much or too little.
    """
    return _Fetch(files, sources, on_progress).run()


class _Fetch:
    """The fetching of some files."""

    def __init__(
        self,
        files: Mapping[str, PartsFile],
        sources: Sequence[tuple[Source, Wanted]],
        on_progress: OnProgress,
    ):
        self._files, self._on_progress = files, on_progress
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._fetched = self._here = 0
        self._work: list[tuple[Source, deque[tuple[str, list[Range]]]]] = []
        for source, wanted in sources:
            left = deque[tuple[str, list[Range]]]()
            for name, pieces in wanted.items():
                absent = sorted(each for each in pieces if each not in files[name].hashes)
                self._here += sum(b - a for a, b in pieces if (a, b) in files[name].hashes)
                left.extend((name, each) for each in _requests(absent))
            self._work.append((source, left))
        self._absent = sum(e[-1][1] - e[0][0] for _, left in self._work for _, e in left)

    def run(self) -> int:
        self._require_room()
        self._on_progress(self._here, self._here + self._absent)
        # Connections of its own for each source: none waits for another.
        count = max(1, NUM_CONNECTIONS // max(1, len(self._work)))
        with ThreadPoolExecutor(count * max(1, len(self._work))) as pool:
            try:
                tasks = [pool.submit(self._drain, *work) for work in self._work * count]
                done, _ = wait(tasks, return_when=FIRST_EXCEPTION)
                errors = [error for each in done if (error := each.exception()) is not None]
                for error in errors:
                    if not isinstance(error, _Stopped):
                        raise error
            except BaseException:
                self._stop.set()
                for source, _ in self._work:
                    source.stop()
                raise
        for file in self._files.values():
            with reported(file.path):
                file.end_fetch()
        return self._fetched

    def _require_room(self) -> None:
        """Raise ModelError unless the disk has room for what is fetched."""
        if not self._absent:
            return
        folder = next(iter(self._files.values())).path.parent
        free = shutil.disk_usage(folder).free
        if self._absent + SPARE_BYTES > free:
            raise ModelError(
                f"{folder} needs {self._absent / GIB:.2f} GiB for weights, but {free / GIB:.2f} "
                "GiB are free there; make room (`pipespec cache prune`), or set XDG_CACHE_HOME to "
                "another disk"
            )

    def _drain(self, source: Source, left: deque[tuple[str, list[Range]]]) -> None:
        """Fetch from a source until nothing is left."""
        while not self._stop.is_set():
            try:
                name, request = left.popleft()
            except IndexError:
                return
            self._get(source, self._files[name], request)

    def _get(self, source: Source, file: PartsFile, request: list[Range]) -> None:
        """Fetch neighbouring pieces and record them. Nothing is written outside them."""
        at, stop = request[0][0], request[-1][1]
        hashes: dict[Range, str] = {}
        left, found = deque(request), hashlib.sha256()
        with reported(file.path), file.opened() as descriptor:
            for chunk in source.read(file.path.name, (at, stop)):
                if self._stop.is_set():
                    raise _Stopped
                if at + len(chunk) > stop:
                    raise _wrong_length(source, file, request, "more")
                os.pwrite(descriptor, chunk, at)
                rest = memoryview(chunk)
                while rest:
                    part = rest[: left[0][1] - at]
                    found.update(part)
                    at, rest = at + len(part), rest[len(part) :]
                    if at == left[0][1]:
                        hashes[left[0]], found = found.hexdigest(), hashlib.sha256()
                        file.arrived(left.popleft())
                self._moved(len(chunk))
            if left:
                raise _wrong_length(source, file, request, "fewer")
            file.commit(hashes)

    def _moved(self, count: int) -> None:
        with self._lock:
            self._fetched += count
            done = self._here + self._fetched
        self._on_progress(done, self._here + self._absent)


def _requests(pieces: Iterable[Range]) -> list[list[Range]]:
    """Neighbours that are fetched together."""
    found: list[list[Range]] = []
    for piece in pieces:
        last = found[-1] if found else [(-1, -1)]
        if last[-1][1] == piece[0] and piece[1] - last[0][0] <= REQUEST_BYTES:
            last.append(piece)
        else:
            found.append([piece])
    return found


def _wrong_length(source: Source, file: PartsFile, request: list[Range], what: str) -> ModelError:
    return ModelError(
        f"{source.name} sends {what} than the {request[-1][1] - request[0][0]} bytes of "
        f"{file.path.name} that were asked for; look at pipespec and the disk there, and start "
        "again"
    )
