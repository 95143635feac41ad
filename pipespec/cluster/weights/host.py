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
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipespec.cluster.weights.server import WeightServer, own_address, tls_context
from pipespec.controller.certificate import Certificate
from pipespec.engine.checkpoint.fetching import fetch, lacking_blocks
from pipespec.engine.checkpoint.partial_checkpoint import missing, own_path
from pipespec.engine.checkpoint.parts.blueprint import Blueprint, repository_of
from pipespec.engine.checkpoint.parts.folder import (
    FolderLock,
    Repository,
    folder_of_checkpoint,
    is_checkpoint,
    parts_cache,
)
from pipespec.engine.checkpoint.parts.parts_file import PartsFile, is_partial, reported
from pipespec.engine.checkpoint.parts.range_source import HubSource, RangeSource, Unavailable
from pipespec.errors import ModelError, PipespecError
from pipespec.system.validation import home_expanded
from pipespec.system.versions import own_version

# Seconds between two signs of life, and without any after which the other side has ended.
ALIVE_S, SILENCE_S = 5.0, 40.0


@dataclass
class _Model:
    """A model of which this host has, or fetches, parts; `own`: in a folder of its own, and whole
    for its purpose. `files` are those of which blocks may be absent."""

    path: Path
    repository: Repository
    own: bool
    files: dict[str, PartsFile] = field(default_factory=dict)

    def file(self, name: str) -> Path:
        """The weight file of that name. Raises ModelError for any other name."""
        if name not in self.repository.weights:
            raise ModelError(f"{name!r} is no weight file of {self.path}")
        return folder_of_checkpoint(self.path) / name

    def records(self) -> dict[str, str | None]:
        """The record of each file that is here; None: it is whole."""
        here = [name for name in self.repository.weights if self.file(name).is_file()]
        return {**dict.fromkeys(here), **{n: each.record.hex() for n, each in self.files.items()}}


class WeightHost:
    """What the launcher may ask of a host. `moved` is called with numbers of bytes that were
    fetched."""

    def __init__(self, moved: Callable[[int], object]) -> None:
        self._moved = moved
        self._models: dict[str, _Model] = {}
        self._context: ssl.SSLContext | None = None
        self._locks: list[FolderLock] = []

    def hello(self) -> str:
        """The version of pipespec."""
        return own_version()

    def describe(self, path: str) -> dict[str, Any] | None:
        """The blueprint of a checkpoint that this host has whole at `path`, as a folder of this
        host's, wherever it came from. Raises ModelError."""
        found = home_expanded(path)
        return Blueprint.of(found, as_folder=True).as_json() if is_checkpoint(found) else None

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
        owners = {kind: host for kind, model in self._models.items() if model.own}
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

    def offer(self, kind: str, blueprint: Mapping[str, Any], parts: Sequence[str]) -> Any:
        """The "records" of the files of a model that are here, and the blocks that it "lacks" of
        these parts. Raises ModelError."""
        model = self._models[kind]
        if model.own:
            return {"records": model.records() if _is_same(model) else {}, "lacks": {}}
        model.path = Blueprint.from_json(blueprint).build()
        _, lacks = lacking_blocks(model.path, parts)
        for path in map(model.file, model.repository.weights):
            if is_partial(path):
                model.files[path.name] = PartsFile(path)
        return {"records": model.records(), "lacks": lacks}

    def listen(self, address: str | None, interface: str | None, cert: str, key: str) -> str | None:
        """Let the other hosts of this run read what is here, at an address if it has one, and read
        from them; the URL. Raises ModelError."""
        certificate = Certificate(cert, key)
        self._context = tls_context(certificate, ssl.PROTOCOL_TLS_CLIENT)
        if address is None:
            return None
        try:
            ip = own_address(address, interface)
            return WeightServer(ip, certificate, lambda of, file: self._models[of].file(file)).url
        except OSError as error:
            raise ModelError(error.strerror or str(error)) from error

    def fetch(self, kind: str, sources: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Fetch blocks of a model, from all sources at once: the "records" of its files then, and
        in "failed" why each source was given up.

        Args:
            sources: of each its "name", the "urls" of its files (none: this process has the hub's
                token), whether it is a "host", and "wanted": by file the numbers of blocks, each
                with its hash or null.
        """
        model, asked = self._models[kind], []
        for each in sources:
            source: RangeSource = HubSource(model.repository.repo, model.repository.commit)
            if each["urls"]:
                context = self._context if each["host"] else None
                source = RangeSource(each["name"], each["urls"], context)
            wanted = {
                name: {number: sha and bytes.fromhex(sha) for number, sha in blocks}
                for name, blocks in each["wanted"].items()
            }
            asked.append((each["name"], source, wanted))
        failed = {}
        errors = fetch(model.files, asked, self._moved)
        for _, source, _ in asked:
            source.close()
        for name, error in errors.items():
            why = (error.why, error.reached) if isinstance(error, Unavailable) else None
            failed[name] = {"error": str(error), "why": why}  # none: it sends wrong bytes
        return {"records": model.records(), "failed": failed}

    def read(self, kind: str, file: str, start: int, stop: int) -> str:
        """Bytes of a file of this host, in base 64. Raises ModelError."""
        path = self._models[kind].file(file)
        with reported(path), path.open("rb") as stream:
            stream.seek(start)
            return base64.b64encode(stream.read(stop - start)).decode()

    def put(self, kind: str, file: str, number: int, data: str) -> None:
        """Write a block that the launcher has read for this host. Raises ModelError."""
        own, block = self._models[kind].files[file], base64.b64decode(data)
        with reported(own.path):
            own.write(number, block)
        self._moved(len(block))

    def end(self) -> None:
        """What was fetched is on the disk, and no longer locked. Raises ModelError if a whole file
        has another hash than the hub states."""
        for model in self._models.values():
            for name, file in model.files.items():
                file.sync()
                file.compare(model.repository.weights[name].sha256)
        self.unlock()


def lines_of(stream: Any, hears: Callable[[], object]) -> Iterator[bytes]:
    """The lines of a binary stream; `hears` is called with every part of one, as a line with the
    small files of a model may take longer than a sign of life."""
    line = bytearray()
    while chunk := stream.read1(2**16):
        hears()
        *ended, rest = chunk.split(b"\n")
        for each in ended:
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
    writing, calls, heard_at = threading.Lock(), queue.SimpleQueue[bytes](), [time.monotonic()]

    def write(found: Mapping[str, Any] | None = None) -> None:
        with writing, suppress(BrokenPipeError):
            writer.write(("" if found is None else json.dumps(found)) + "\n")
            writer.flush()

    def hears() -> None:
        heard_at[0] = time.monotonic()

    def read() -> None:
        for line in lines_of(sys.stdin.buffer, hears):
            if line.strip():
                calls.put(line)
        os._exit(0)  # threads may still fetch

    def show_life() -> None:
        while time.monotonic() - heard_at[0] < SILENCE_S:
            write()
            time.sleep(ALIVE_S)
        os._exit(1)

    host = WeightHost(lambda count: write({"moved": count}))
    for each in (read, show_life):
        threading.Thread(target=each, daemon=True).start()
    while True:
        asked = json.loads(calls.get())
        try:
            write({"result": getattr(host, asked.pop("do"))(**asked)})
        except PipespecError as error:
            write({"error": str(error)})
        except Exception as error:  # noqa: BLE001 - the launcher reports it
            write({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
