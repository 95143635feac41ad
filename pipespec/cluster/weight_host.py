"""`python -m pipespec.cluster.weight_host`: fetches the weights that a host computes, on that host.

The launcher starts it over SSH and talks to it through its standard input and output
(`byte_channel`); the launcher's own host is a `WeightHost` of its process. It calls the functions
in CALLS, in their order, and answers, to this process:

    locate(kind, file, fresh)                          where the hub has a file, as a signed URL
    read(kind, source, file, start, stop)              a stream of bytes, of `source`
    progress(done, total)
    unreachable(source, why, reached)                  it reads from that host no more

The process ends with its standard input. The token of the hub stays with the launcher.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pipespec.cluster.byte_channel import CHUNK_BYTES, ByteChannel
from pipespec.cluster.host_weights import own_path
from pipespec.cluster.weight_links import WeightLink, WeightServer, own_address
from pipespec.cluster.weight_plan import HUB
from pipespec.cluster.weight_sources import Channel, LinkedSource, RelayedSource
from pipespec.controller.certificate import Certificate
from pipespec.engine.checkpoint.formats.gguf import is_gguf
from pipespec.engine.checkpoint.partial_checkpoint import missing, tensors_by_file
from pipespec.engine.checkpoint_parts.blueprint import Blueprint, holdings, repository_of
from pipespec.engine.checkpoint_parts.fetching import HubSource, Source, fetch
from pipespec.engine.checkpoint_parts.folder_lock import FolderLock
from pipespec.engine.checkpoint_parts.hub_client import HubClient
from pipespec.engine.checkpoint_parts.parts_file import PartsFile, Range, is_partial, reported
from pipespec.engine.checkpoint_parts.repository import (
    Repository,
    folder_of_checkpoint,
    parts_cache,
)
from pipespec.errors import ModelError
from pipespec.system.validation import home_expanded
from pipespec.system.versions import own_version

LAUNCHER_NAME = "the launcher"
# Seconds between two reports of progress, and between two signs of life to a host that waits.
PROGRESS_S, WAIT_S = 0.2, 5.0


# What the launcher calls.
CALLS = (
    *("hello", "describe", "holds", "prepare", "lock", "unlock", "offer"),
    *("listen", "fetch", "forget", "check", "read"),
)
# Pieces with what else is known of them, by file.
Pieces = Mapping[str, Sequence[Sequence[Any]]]


@dataclass(frozen=True)
class _Model:
    """A model of which this host has, or fetches, parts; `own`: in a folder of its own, and whole
    for its purpose."""

    path: Path
    blueprint: Blueprint
    own: bool

    @property
    def folder(self) -> Path:
        return folder_of_checkpoint(self.path)

    def file(self, name: str) -> Path:
        """The weight file of that name. Raises ModelError for any other name."""
        if name not in self.blueprint.headers:
            raise ModelError(f"{name!r} is no weight file of {self.path}")
        return self.folder / name


class WeightHost:
    """What the launcher may ask of a host."""

    def __init__(self, channel: Channel | None = None) -> None:
        self.channel = channel
        self._models: dict[str, _Model] = {}
        self._files: dict[Path, PartsFile] = {}  # of two models it may be the same
        self._server: WeightServer | None = None
        self._certificate: Certificate | None = None
        self._sources: list[RelayedSource] = []
        self._locks: list[FolderLock] = []
        self._before = 0  # bytes of the fetches that are done
        self._reported_at = 0.0

    def handlers(self) -> dict[str, Any]:
        """The functions that the launcher calls."""
        return {name: getattr(self, name) for name in CALLS}

    def hello(self) -> str:
        """The version of pipespec."""
        return own_version()

    def describe(self, path: str) -> dict[str, Any] | None:
        """The blueprint of a checkpoint that this host has whole at `path`, as a folder of this
        host's, wherever it came from. Raises ModelError."""
        found = home_expanded(path)
        if not (found.is_dir() or (is_gguf(found) and found.is_file())):
            return None
        return Blueprint.of(found, as_folder=True).as_json()

    def holds(self, path: str, shared: Mapping[str, Any], parts: Sequence[str]) -> bool:
        """Whether parts of a model are here, which the launcher has at `path`."""
        own = own_path(Path(path), None, Repository.from_json(shared), parts)
        return own is not None and not missing(own, parts)

    def prepare(
        self, kind: str, path: str, blueprint: Mapping[str, Any], parts: Sequence[str]
    ) -> None:
        """Find the folder of a model: in the parts cache, unless the host has another that lacks
        none of these parts. Raises ModelError."""
        plan = Blueprint.from_json(blueprint)
        own = own_path(Path(path), None, plan.repository, parts)
        if own is not None and not missing(own, parts) and not own.is_relative_to(parts_cache()):
            self._models[kind] = _Model(own, plan, own=True)
        else:
            self._models[kind] = _Model(plan.path, plan, own=False)

    def lock(self, kind: str, run: str, host: str) -> dict[str, Any]:
        """The "owner" that fetches into the folder of a model in this `run`: this `host`, or
        another that shares the file system; None: a process of another run does, which "holder"
        says. Raises ModelError."""
        model = self._model(kind)
        if model.own:
            return {"owner": host}
        self._locks.append(FolderLock(model.folder, run, host))
        return {"owner": self._locks[-1].owner, "holder": self._locks[-1].holder}

    def unlock(self) -> None:
        """Let other runs fetch into the folders of this host."""
        while self._locks:
            self._locks.pop().release()

    def offer(self, kind: str, parts: Sequence[str]) -> dict[str, Any]:
        """What of a model is here: its pieces with their hashes, and those of these parts that are
        lacking, by file. Raises ModelError."""
        model = self._model(kind)
        plan = model.blueprint
        if model.own:
            same = plan.repository.on_hub or _name_of(model.path) == plan.repository.folder_name
            return {"has": dict(holdings(model.folder, plan.headers)) if same else {}, "lacks": {}}
        plan.build()
        for path in (model.file(name) for name in plan.headers):
            if is_partial(path) and path not in self._files:
                self._files[path] = PartsFile(path)
                self._files[path].verify()
        lacks = {}
        for path, names in tensors_by_file(model.path, parts).items():
            if (file := self._files.get(path)) is not None:
                lacks[path.name] = file.absent(file.ranges[each] for each in names.values())
                file.expect(lacks[path.name])
        return {"has": dict(holdings(model.folder, plan.headers)), "lacks": lacks}

    def listen(
        self, address: str | None, interface: str | None, cert: str, key: str
    ) -> Sequence[Any] | None:
        """Let the other hosts of this run read what is here, at an address if it has one, and read
        from them. Raises ModelError."""
        self._certificate = Certificate(cert, key)
        if address is None:
            return None
        try:
            ip = own_address(address, interface)
            self._server = WeightServer(ip, self._certificate, self.read)
        except OSError as error:
            raise ModelError(error.strerror or str(error)) from error
        return self._server.address

    def fetch(self, kind: str, sources: Sequence[Mapping[str, Any]]) -> Pieces:
        """Fetch pieces, from all sources at once; the same with their hashes.

        Args:
            sources: of each "from", its address in "at" (or null), and "wanted" (pieces by file).
        """
        model = self._model(kind)
        files = {
            name: file for name in model.blueprint.headers if (file := self._file(model, name))
        }
        asked = [
            (self._source(kind, each["from"], each["at"]), _ranges(each["wanted"]))
            for each in sources
        ]
        self._sources += [source for source, _ in asked]
        try:
            self._before += fetch(files, asked, self._moved)
        finally:
            for source, _ in asked:
                source.stop()
                self._sources.remove(source)
        return {
            name: [
                (*each, file.hashes[each]) for _, wanted in asked for each in wanted.get(name, ())
            ]
            for name, file in files.items()
        }

    def forget(self, kind: str, wrong: Pieces) -> None:
        """Drop pieces whose bytes are wrong, which will be fetched again."""
        for name, pieces in _ranges(wrong).items():
            file = self._files[self._model(kind).file(name)]
            with reported(file.path):
                file.forget(pieces)
            file.expect(pieces)

    def check(self, kind: str) -> None:
        """Raise ModelError if a whole file has another hash than the hub states."""
        model = self._model(kind)
        for name, stated in model.blueprint.repository.weights.items():
            if (file := self._file(model, name)) is not None:
                file.compare(stated.sha256)

    def read(self, kind: str, file: str, start: int, stop: int) -> Iterator[bytes]:
        """The bytes of a part of a file of this host, which waits for those that it fetches itself
        and then yields empty chunks. Raises ModelError, also for bytes that do not come."""
        path = self._model(kind).file(file)
        own = self._files.get(path)
        # Without a buffer, which might hold bytes from before they came.
        with reported(path), path.open("rb", buffering=0) as stream:
            stream.seek(start)
            while start < stop:
                part = start, min(start + CHUNK_BYTES, stop)
                while own is not None and not own.wait_for(part, WAIT_S):
                    yield b""
                chunk = stream.read(part[1] - start)
                if not chunk:
                    raise ModelError(f"{path} ends at byte {start}; fetch it again")
                start += len(chunk)
                yield chunk

    def stop(self) -> None:
        """End all reading soon, and listen no more. The locks stay, as threads may still write."""
        for source in list(self._sources):
            source.stop()
        if self._server is not None:
            self._server.close()

    @property
    def _launcher(self) -> Channel:
        assert self.channel is not None
        return self.channel

    def _model(self, kind: str) -> _Model:
        if kind not in self._models:
            raise ModelError(f"{kind!r} is no model of this start")
        return self._models[kind]

    def _file(self, model: _Model, name: str) -> PartsFile | None:
        return self._files.get(model.file(name))

    def _source(self, kind: str, name: str, at: Sequence[Any] | None) -> RelayedSource:
        direct: Source | None = None
        # The launcher's own host has nothing to gain from a URL.
        if name == HUB and isinstance(self.channel, ByteChannel):
            found = self._model(kind).blueprint.repository
            ask = partial(self.channel.call, "locate", kind=kind)
            direct = HubSource(HubClient(found.repo, locate=ask), found)
        elif at is not None:
            assert self._certificate is not None, "`listen` comes before `fetch`"
            direct = LinkedSource(WeightLink((at[0], at[1]), self._certificate), kind, name)
        return RelayedSource(self._launcher, kind, name, direct)

    def _moved(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done == total or now - self._reported_at > PROGRESS_S:
            self._reported_at = now
            self._launcher.call("progress", done=self._before + done, total=self._before + total)


def _ranges(pieces: Pieces) -> dict[str, list[Range]]:
    """Pieces as they come from JSON."""
    return {name: [(start, stop) for start, stop in each] for name, each in pieces.items()}


def _name_of(path: Path) -> str | None:
    """The name of a folder of this host in the parts cache of others."""
    with suppress(ModelError):
        return repository_of(path, as_folder=True).folder_name
    return None


def main() -> None:
    """Do what the launcher asks; anything that is printed goes to standard error."""
    writer = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    host = WeightHost()
    ready = threading.Event()

    def when_ready(function: Any) -> Any:
        def run(**arguments: Any) -> Any:
            ready.wait()
            return function(**arguments)

        return run

    handlers = {name: when_ready(each) for name, each in host.handlers().items()}
    host.channel = ByteChannel(LAUNCHER_NAME, sys.stdin.buffer, writer, handlers)
    ready.set()
    host.channel.join()
    os._exit(0)  # threads may still fetch


if __name__ == "__main__":
    main()
