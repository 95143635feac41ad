"""`python -m pipespec.cluster.weights.host`: fetches what a host computes, on that host.

The launcher starts it over SSH and calls the functions of `WeightHost` one after the other: a call
is a line of JSON on its standard input, the result one on its standard output, before which come
its version, and numbers of bytes that were fetched. Empty lines are signs of life. The process ends
with its standard input.
"""

from __future__ import annotations

import base64
import json
import os
import select
import ssl
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from pipespec.cluster.weights.plan import Block
from pipespec.cluster.weights.server import WeightServer, tls_context
from pipespec.controller.certificate import Certificate
from pipespec.engine.checkpoint.partial_checkpoint import missing, own_path, repository_of
from pipespec.engine.checkpoint.parts.folder import (
    FolderLock,
    Repository,
    folder_of_checkpoint,
    is_checkpoint,
    make_files,
    parts_cache,
    write_repository,
)
from pipespec.engine.checkpoint.parts.parts_file import PartsFile, reported
from pipespec.engine.checkpoint.parts.sources import (
    HubSource,
    RangeSource,
    WrongBytes,
    fetch,
    host_session,
)
from pipespec.errors import ModelError, PipespecError
from pipespec.system.network_interfaces import interfaces, resolve
from pipespec.system.validation import from_fields, home_expanded
from pipespec.system.versions import own_version

# Seconds between two signs of life, and without any after which the other side has ended.
ALIVE_S, SILENCE_S = 5.0, 40.0


@dataclass
class _Model:
    """A model of which this host has, or fetches, parts; `own`: in a folder of its own, where it
    lacks nothing."""

    path: Path
    repository: Repository
    own: bool
    files: Mapping[str, PartsFile] = field(default_factory=dict)

    def find(self) -> None:
        """Find its files, or make them. Raises ModelError if a folder of its own lacks some; there
        are none if that is not what the launcher means."""
        of = self.repository
        if not self.own:
            self.files = make_files(of, of.files)
        elif of.on_hub or repository_of(self.path, as_folder=True).folder == of.folder:
            paths = {name: folder_of_checkpoint(self.path) / name for name in of.files}
            self.files = {name: PartsFile(path) for name, path in paths.items() if path.is_file()}


class WeightHost:
    """What the launcher may ask of a host. `moved` is called with numbers of bytes that were
    fetched. Raises ModelError, OSError."""

    def __init__(self, moved: Callable[[int], object]) -> None:
        self._moved = moved
        self._models: dict[str, _Model] = {}
        self._session: Any = None  # for other hosts
        self._locks: list[FolderLock] = []

    def describe(self, kind: str, path: str) -> dict[str, Any] | None:
        """The "repository" of a checkpoint that this host has whole at `path`, as a folder of this
        host's, wherever it came from, and of a GGUF file its name as "file"."""
        if not is_checkpoint(found := home_expanded(path)):
            return None
        self._models[kind] = model = _Model(found, repository_of(found, as_folder=True), own=True)
        model.find()
        file = None if folder_of_checkpoint(found) == found else found.name
        return {"repository": asdict(model.repository), "file": file}

    def prepare(
        self, kind: str, path: str, repository: Mapping[str, Any], parts: Collection[str]
    ) -> bool:
        """Find the folder of a model that the launcher has at `path`: in the parts cache, unless
        another one lacks none of these parts; whether all are here."""
        shared = from_fields(Repository, repository)
        found = own_path(Path(path), shared, parts)
        whole = found is not None and not missing(found, parts)
        own = found is not None and whole and not found.is_relative_to(parts_cache())
        self._models[kind] = _Model(found if found and own else shared.folder, shared, own)
        return whole

    def lock(self, owner: str) -> dict[str, tuple[str, str]]:
        """Who fetches each model into its folder here: the owner, and the process as a clause."""
        found = {}
        for kind, model in self._models.items():
            if not model.own:
                self._locks.append(lock := FolderLock(model.path, owner))
                found[kind] = lock.owner, lock.holder
        return found

    def unlock(self) -> None:
        """Let others fetch into the folders of this host."""
        while self._locks:
            self._locks.pop().release()

    def offer(self, kinds: Sequence[str], blocks: Sequence[Block]) -> dict[str, Any]:
        """Take part with these models alone: which of the blocks it "has", and the models that lack
        none ("own")."""
        self._models = {kind: self._models[kind] for kind in kinds}
        for model in self._models.values():
            with suppress(ModelError):
                model.find()
        own = [kind for kind, model in self._models.items() if model.own]
        return {"has": self._here(blocks), "own": own}

    def listen(self, address: str | None, interface: str | None, cert: str, key: str) -> str | None:
        """Let the other hosts of this run read what is here, at an address, or at that of the
        interface if it has another, and read from them; the URL."""
        certificate = Certificate(cert, key)
        self._session = host_session(tls_context(certificate, ssl.PROTOCOL_TLS_CLIENT))
        if address is None:
            return None
        try:
            found = next((each.addresses for each in interfaces() if each.name == interface), ())
            address = resolve(address)  # which perhaps this host alone can
            address = address if address in found or not found else found[0]
            return WeightServer(address, certificate, self._file).url
        except OSError as error:
            raise ModelError(error.strerror or str(error)) from error

    def fetch(self, sources: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Fetch blocks from all sources at once: which of them it "has" then, and in "failed" for
        each source null, or the error why it was given up, and a clause, or null if it sent wrong
        bytes. Of a source are given the "kind" of model, its "name", the "urls" of its files (none:
        this process has the hub's token), whether it is a "host", and "wanted": file, number and
        hash, or null, of blocks."""
        asked, blocks = [], []
        for each in sources:
            model, wanted = self._models[each["kind"]], defaultdict[PartsFile, Any](dict)
            for name, number, sha in each["wanted"]:
                wanted[model.files[name]][number] = sha and bytes.fromhex(sha)
                blocks.append((each["kind"], name, number))
            source: RangeSource = HubSource(model.repository.repo, model.repository.commit)
            if each["urls"]:
                session = self._session if each["host"] else None
                source = RangeSource(each["name"], each["urls"], session)
            asked.append((source, wanted))
        found, failed = fetch(asked, self._moved), list[Any]()
        for source, _ in asked:
            if (error := found.get(source)) is not None:
                why = None if isinstance(error, WrongBytes) else str(error.__cause__ or error)
            failed.append(error and (str(error), why))
        return {"has": self._here(blocks), "failed": failed}

    def read(self, kind: str, file: str, start: int, stop: int) -> str:
        """Bytes of a file of this host, in base 64."""
        with self._file(kind, file).open("rb") as stream:
            stream.seek(start)
            return base64.b64encode(stream.read(stop - start)).decode()

    def put(self, kind: str, file: str, number: int, data: str) -> list[Any]:
        """Write a block that the launcher has read for this host."""
        self._models[kind].files[file].write(number, block := base64.b64decode(data))
        self._moved(len(block))
        return self._here([(kind, file, number)])

    def end(self) -> None:
        """What was fetched is on the disk, and no longer locked. Raises ModelError if a whole file
        has another hash than the hub states."""
        for model in self._models.values():
            if not model.own:
                for name, file in model.files.items():
                    file.sync()
                    file.compare(model.repository.files[name].sha256)
                write_repository(model.repository)
        self.unlock()

    def _file(self, kind: str, name: str) -> Path:
        """The path of a file of a model. Raises ModelError for any other name."""
        model = self._models.get(kind)
        if model is None or name not in model.files:
            raise ModelError(f"{name!r} is no file of a model here")
        return model.files[name].path

    def _here(self, blocks: Iterable[Block]) -> list[Any]:
        """Those of the blocks that are here, with their hashes, or null of a whole file."""
        found: list[Any] = []
        for kind, name, number in blocks:
            file = kind in self._models and self._models[kind].files.get(name)
            if file and file.has(number):
                sha = file.digest(number)
                found.append((kind, name, number, sha and sha.hex()))
        return found


def lines_of(stream: IO[bytes]) -> Iterator[bytes]:
    """The lines of a pipe that are not empty, until it ends or is silent for too long. Every part
    of a line is a sign of life."""
    line, readable = bytearray(), select.poll()  # as `select.select` takes no descriptor above 1023
    readable.register(stream, select.POLLIN)
    while readable.poll(SILENCE_S * 1e3):
        if not (chunk := os.read(stream.fileno(), 2**16)):
            return
        *ended, rest = chunk.split(b"\n")
        for each in ended:
            if line + each:
                yield bytes(line + each)
            line.clear()
        line += rest


def main() -> None:
    """Do what the launcher asks; anything that is printed goes to standard error."""
    writer = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    writing = threading.Lock()

    def write(**said: Any) -> None:
        with writing, suppress(BrokenPipeError):
            writer.write(f"{json.dumps(said)}\n" if said else "\n")
            writer.flush()

    def show_life() -> None:
        while True:
            write()
            time.sleep(ALIVE_S)

    def answer(asked: dict[str, Any]) -> None:
        try:
            with reported(parts_cache()):
                write(result=getattr(host, asked.pop("do"))(**asked))
        except PipespecError as error:
            write(error=str(error))
        except Exception as error:  # noqa: BLE001 - the launcher reports it
            write(error=f"{type(error).__name__}: {error}")

    host, calls = WeightHost(lambda count: write(moved=count)), ThreadPoolExecutor(1)
    threading.Thread(target=show_life, daemon=True).start()
    write(version=own_version())
    try:
        for line in lines_of(sys.stdin.buffer):
            calls.submit(answer, json.loads(line))
    finally:
        os._exit(0)  # threads may still fetch


if __name__ == "__main__":
    main()
