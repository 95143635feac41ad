"""`python -m pipespec.cluster.weights.host`: fetches what a host computes, on that host.

The launcher starts it over SSH and calls the functions of `WeightHost` one after the other: a call
is a line of JSON on its standard input, the result one on its standard output, before which come
lines with numbers of bytes that were fetched. Empty lines are signs of life. The process ends with
its standard input.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import select
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from pipespec.cluster.weights.server import WeightServer, own_address, tls_context
from pipespec.controller.certificate import Certificate
from pipespec.engine.checkpoint.partial_checkpoint import missing, own_path
from pipespec.engine.checkpoint.parts.fetching import fetch
from pipespec.engine.checkpoint.parts.folder import (
    FolderLock,
    Repository,
    folder_of_checkpoint,
    is_checkpoint,
    make_files,
    parts_cache,
    write_repository,
)
from pipespec.engine.checkpoint.parts.opening import repository_of
from pipespec.engine.checkpoint.parts.parts_file import PartsFile, reported
from pipespec.engine.checkpoint.parts.range_source import (
    HubSource,
    RangeSource,
    Unavailable,
    host_session,
)
from pipespec.errors import ModelError, PipespecError
from pipespec.system.validation import home_expanded
from pipespec.system.versions import own_version

# Model, file and number.
_Block = tuple[str, str, int]
# Seconds between two signs of life, and without any after which the other side has ended.
ALIVE_S, SILENCE_S = 5.0, 40.0


@dataclass
class _Model:
    """A model of which this host has, or fetches, parts; `own`: in a folder of its own, where it
    lacks nothing. `files` are those of which blocks may be absent."""

    path: Path
    repository: Repository
    own: bool
    files: Mapping[str, PartsFile] = field(default_factory=dict)


class WeightHost:
    """What the launcher may ask of a host. `moved` is called with numbers of bytes that were
    fetched."""

    def __init__(self, moved: Callable[[int], object]) -> None:
        self._moved = moved
        self._models: dict[str, _Model] = {}
        self._session: Any = None  # for other hosts
        self._locks: list[FolderLock] = []

    def hello(self) -> str:
        """The version of pipespec."""
        return own_version()

    def describe(self, kind: str, path: str) -> dict[str, Any] | None:
        """The "repository" of a checkpoint that this host has whole at `path`, as a folder of this
        host's, wherever it came from, and of a GGUF file its name as "file". Raises ModelError."""
        found = home_expanded(path)
        if not is_checkpoint(found):
            return None
        own = repository_of(found, as_folder=True)
        self._models[kind] = _Model(found, own, own=True)
        file = None if folder_of_checkpoint(found) == found else found.name
        return {"repository": asdict(own), "file": file}

    def prepare(
        self, kind: str, path: str, repository: Mapping[str, Any], parts: Sequence[str]
    ) -> bool:
        """Find the folder of a model that the launcher has at `path`: in the parts cache, unless
        the host has another that lacks none of these parts; whether all are here."""
        shared = Repository.from_json(repository)
        found = own_path(Path(path), None, shared, parts)
        whole = found is not None and not missing(found, parts)
        own = found is not None and whole and not found.is_relative_to(parts_cache())
        self._models[kind] = _Model(found if found and own else shared.folder, shared, own)
        return whole

    def lock(self, run: str, host: str) -> dict[str, Any]:
        """Which of the hosts of this `run` fetches each model in "owners": this `host`, or another
        that shares the file system; or the process of another run that does, in "holder"."""
        owners = dict.fromkeys(self._models, host)
        for kind, model in self._models.items():
            if not model.own:
                self._locks.append(FolderLock(model.path, run, host))
                if self._locks[-1].owner is None:
                    return {"holder": self._locks[-1].holder}
                owners[kind] = self._locks[-1].owner
        return {"owners": owners}

    def unlock(self) -> None:
        """Let other runs fetch into the folders of this host."""
        while self._locks:
            self._locks.pop().release()

    def offer(self, kinds: Sequence[str], blocks: Sequence[_Block]) -> dict[str, Any]:
        """Take part with these models alone: which of the blocks it "has", and the models that lack
        nothing ("own"). Raises ModelError."""
        self._models = {kind: self._models[kind] for kind in kinds}
        for model in self._models.values():
            if not model.own:
                model.files = make_files(model.repository, model.repository.files)
            elif not _is_same(model):
                model.repository = replace(model.repository, files={})
        own = [kind for kind, model in self._models.items() if model.own]
        return {"has": self._here(blocks), "own": own}

    def listen(self, address: str | None, interface: str | None, cert: str, key: str) -> str | None:
        """Let the other hosts of this run read what is here, at an address if it has one, and read
        from them; the URL. Raises ModelError."""
        certificate = Certificate(cert, key)
        self._session = host_session(tls_context(certificate, ssl.PROTOCOL_TLS_CLIENT))
        if address is None:
            return None
        try:
            return WeightServer(own_address(address, interface), certificate, self._file).url
        except OSError as error:
            raise ModelError(error.strerror or str(error)) from error

    def fetch(self, sources: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Fetch blocks from all sources at once: which of them it "has" then, and in "failed" the
        numbers of sources that were given up, with the "error", and "why" as a clause, or null if
        one sent wrong bytes.

        Args:
            sources: of each the "kind" of model, its "name", the "urls" of its files (none: this
                process has the hub's token), whether it is a "host", and "wanted": by file the
                numbers of blocks, each with its hash or null.
        """
        asked, blocks = [], []
        for each in sources:
            kind, model = each["kind"], self._models[each["kind"]]
            source: RangeSource = HubSource(model.repository.repo, model.repository.commit)
            if each["urls"]:
                session = self._session if each["host"] else None
                source = RangeSource(each["name"], each["urls"], session)
            wanted = {
                model.files[name]: {number: sha and bytes.fromhex(sha) for number, sha in some}
                for name, some in each["wanted"].items()
            }
            asked.append((source, wanted))
            blocks += [(kind, file.path.name, each) for file in wanted for each in wanted[file]]
        errors, failed = fetch(asked, self._moved), {}
        for number, (source, _) in enumerate(asked):
            if (error := errors.get(source)) is not None:
                why = error.why if isinstance(error, Unavailable) else None
                failed[number] = {"error": str(error), "why": why}
        return {"has": self._here(blocks), "failed": failed}

    def read(self, kind: str, file: str, start: int, stop: int) -> str:
        """Bytes of a file of this host, in base 64. Raises ModelError."""
        path = self._file(kind, file)
        with reported(path), path.open("rb") as stream:
            stream.seek(start)
            return base64.b64encode(stream.read(stop - start)).decode()

    def put(self, kind: str, file: str, number: int, data: str) -> list[Any]:
        """Write a block that the launcher has read for this host. Raises ModelError."""
        own, block = self._models[kind].files[file], base64.b64decode(data)
        with reported(own.path):
            own.write(number, block)
        self._moved(len(block))
        return self._here([(kind, file, number)])

    def end(self) -> None:
        """What was fetched is on the disk, and no longer locked. Raises ModelError if a whole file
        has another hash than the hub states."""
        for model in self._models.values():
            for name, file in model.files.items():
                file.sync()
                file.compare(model.repository.files[name].sha256)
            if model.files:
                write_repository(model.repository)
        self.unlock()

    def _file(self, kind: str, name: str) -> Path:
        """The path of a file of a model. Raises ModelError for any other name."""
        model = self._models.get(kind)
        if model is None or name not in model.repository.files:
            raise ModelError(f"{name!r} is no file of a model here")
        return folder_of_checkpoint(model.path) / name

    def _here(self, blocks: Iterable[_Block]) -> list[Any]:
        """Those of the blocks that are here, with their hashes, or null of a whole file."""
        found: list[Any] = []
        for kind, name, number in blocks:
            model = self._models.get(kind)
            if model is None or name not in model.repository.files:
                continue
            if (file := model.files.get(name)) is None:
                if self._file(kind, name).is_file():
                    found.append((kind, name, number, None))
            elif file.has(number):
                found.append((kind, name, number, file.digest(number).hex()))
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


def _is_same(model: _Model) -> bool:
    """Whether a folder of this host is what the launcher means."""
    if model.repository.on_hub:
        return True
    with suppress(ModelError):
        found = repository_of(model.path, as_folder=True)
        return found.folder_name == model.repository.folder_name
    return False


def main() -> None:
    """Do what the launcher asks; anything that is printed goes to standard error."""
    writer = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    writing, calls = threading.Lock(), queue.SimpleQueue[bytes]()

    def write(line: str = "") -> None:
        with writing, suppress(BrokenPipeError):
            writer.write(line + "\n")
            writer.flush()

    def read() -> None:
        for line in lines_of(sys.stdin.buffer):
            calls.put(line)
        os._exit(0)  # threads may still fetch

    def show_life() -> None:
        while True:
            write()
            time.sleep(ALIVE_S)

    host = WeightHost(lambda count: write(json.dumps({"moved": count})))
    for each in (read, show_life):
        threading.Thread(target=each, daemon=True).start()
    while True:
        asked = json.loads(calls.get())
        try:
            found = {"result": getattr(host, asked.pop("do"))(**asked)}
        except PipespecError as error:
            found = {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - the launcher reports it
            found = {"error": f"{type(error).__name__}: {error}"}
        write(json.dumps(found))


if __name__ == "__main__":
    main()
