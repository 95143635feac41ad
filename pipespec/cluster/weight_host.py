"""`python -m pipespec.cluster.weight_host`: fetches the weights that a host computes, on that host.

The launcher starts it over SSH, and calls the functions in CALLS one after the other: each call is
a line of JSON on its standard input, and its result one on its standard output, before which there
may be lines with the number of bytes that were fetched. An empty line is a sign of life. The
process ends with its standard input. The launcher's own host is a `WeightHost` of its process.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pipespec.cluster.weight_server import WeightServer, own_address, tls_context
from pipespec.controller.certificate import Certificate
from pipespec.engine.checkpoint.partial_checkpoint import missing, own_path
from pipespec.engine.checkpoint.parts.blueprint import Blueprint, repository_of
from pipespec.engine.checkpoint.parts.fetching import fetch, lacking_blocks, room_for
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

# What the launcher calls.
CALLS = (
    *("hello", "describe", "prepare", "lock", "unlock", "offer", "listen", "fetch", "read"),
    *("put", "check"),
)
# Seconds between two signs of life, and without any after which the other side has ended.
ALIVE_S, SILENCE_S = 5.0, 40.0


@dataclass
class _Model:
    """A model of which this host has, or fetches, parts.

    Attributes:
        own: it is in a folder of its own, and whole for its purpose.
        files: the weight files of which blocks may be absent.
    """

    path: Path
    repository: Repository
    own: bool
    files: dict[str, PartsFile] = field(default_factory=dict)

    def file(self, name: str) -> Path:
        """The weight file of that name. Raises ModelError for any other name."""
        if name not in self.repository.weights:
            raise ModelError(f"{name!r} is no weight file of {self.path}")
        return folder_of_checkpoint(self.path) / name


class WeightHost:
    """What the launcher may ask of a host. `moved` is called with numbers of bytes that were
    fetched."""

    def __init__(self, moved: Callable[[int], object]) -> None:
        self._moved = moved
        self._models: dict[str, _Model] = {}
        self._server: WeightServer | None = None
        self._context: ssl.SSLContext | None = None
        self._locks: list[FolderLock] = []
        self._stopped = threading.Event()

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
        if found is not None and whole and not found.is_relative_to(parts_cache()):
            self._models[kind] = _Model(found, shared, own=True)
        else:
            self._models[kind] = _Model(shared.folder, shared, own=False)
        return whole

    def lock(self, kind: str, run: str, host: str) -> dict[str, Any]:
        """The "owner" that fetches into the folder of a model in this `run`: this `host`, or
        another that shares the file system; None: a process of another run does, which "holder"
        says. Raises ModelError."""
        model = self._models[kind]
        if model.own:
            return {"owner": host}
        self._locks.append(FolderLock(model.path, run, host))
        return {"owner": self._locks[-1].owner, "holder": self._locks[-1].holder}

    def unlock(self) -> None:
        """Let other runs fetch into the folders of this host."""
        while self._locks:
            self._locks.pop().release()

    def offer(
        self, kind: str, blueprint: Mapping[str, Any] | None, parts: Sequence[str]
    ) -> dict[str, Any]:
        """What of a model is here: by file its "records" (null: it is whole), and the blocks that
        it "lacks" of these parts. Raises ModelError."""
        model = self._models[kind]
        if model.own:
            names = model.repository.weights if self._is_same(model) else ()
            here = [name for name in names if model.file(name).is_file()]
            return {"records": dict.fromkeys(here), "lacks": {}}
        assert blueprint is not None, "only folders of their own need none"
        model.path = Blueprint.from_json(blueprint).build()
        _, lacks = lacking_blocks(model.path, parts)
        for name in model.repository.weights:
            if is_partial(model.file(name)):
                model.files[name] = PartsFile(model.file(name))
        whole = [name for name in model.repository.weights if model.file(name).is_file()]
        return {"records": {**dict.fromkeys(whole), **_records(model)}, "lacks": lacks}

    def listen(self, address: str | None, interface: str | None, cert: str, key: str) -> str | None:
        """Let the other hosts of this run read what is here, at an address if it has one, and read
        from them; the URL. Raises ModelError."""
        certificate = Certificate(cert, key)
        self._context = tls_context(certificate, ssl.PROTOCOL_TLS_CLIENT)
        if address is None:
            return None
        try:
            ip = own_address(address, interface)
            self._server = WeightServer(
                ip, certificate, lambda kind, file: self._models[kind].file(file)
            )
        except OSError as error:
            raise ModelError(error.strerror or str(error)) from error
        at = f"[{ip}]" if ":" in ip else ip
        return f"https://{at}:{self._server.address[1]}"

    def fetch(self, kind: str, sources: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Fetch blocks of a model, from all sources at once: the "records" of its files then, and
        in "failed" why each source was given up.

        Args:
            sources: of each its "name", the URLs of its files in "urls" (none: this process has the
                hub's token), whether it is a "host", and "wanted": by file the numbers of blocks,
                each with its hash or null.
        """
        model = self._models[kind]
        asked, total = [], {name: set[int]() for name in model.files}
        for each in sources:
            wanted = {
                name: {number: sha and bytes.fromhex(sha) for number, sha in blocks}
                for name, blocks in each["wanted"].items()
            }
            asked.append((each["name"], self._source(model, each), wanted))
            for name, blocks in wanted.items():
                total[name] |= blocks.keys()
        room_for(model.files, total)
        failed = fetch(model.files, asked, self._moved, self._stopped)
        if self._stopped.is_set():
            raise Unavailable("fetching was stopped")
        why = {
            name: {
                "error": str(error),
                "wrong": not isinstance(error, Unavailable),
                "why": getattr(error, "why", ""),
                "reached": getattr(error, "reached", True),
            }
            for name, error in failed.items()
        }
        return {"records": _records(model), "failed": why}

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

    def check(self, kind: str) -> None:
        """Have what was fetched on the disk. Raises ModelError if a whole file has another hash
        than the hub states."""
        model = self._models[kind]
        for name, file in model.files.items():
            file.sync()
            file.compare(model.repository.weights[name].sha256)

    def stop(self) -> None:
        """End all reading soon, and listen no more. The locks stay, as threads may still write."""
        self._stopped.set()
        if self._server is not None:
            self._server.close()

    def _is_same(self, model: _Model) -> bool:
        """Whether a folder of this host is what the launcher means."""
        if model.repository.on_hub:
            return True
        with suppress(ModelError):
            found = repository_of(model.path, as_folder=True)
            return found.folder_name == model.repository.folder_name
        return False

    def _source(self, model: _Model, of: Mapping[str, Any]) -> RangeSource:
        stopped, found = self._stopped, model.repository
        if not of["urls"]:
            return HubSource(found.repo, found.commit, stopped=stopped)
        context = self._context if of["host"] else None
        return RangeSource(of["name"], of["urls"], context, stopped=stopped)


def url_of(address: str, kind: str, file: str) -> str:
    """Where a host that listens at an address has a weight file of a model."""
    return f"{address}/{kind}/{quote(file, safe='')}"


def _records(model: _Model) -> dict[str, str]:
    return {name: file.record.hex() for name, file in model.files.items()}


def main() -> None:
    """Do what the launcher asks; anything that is printed goes to standard error."""
    writer = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    writing, calls, heard_at = threading.Lock(), queue.SimpleQueue[str](), [time.monotonic()]

    def write(found: Mapping[str, Any] | None) -> None:
        with writing, suppress(BrokenPipeError):
            writer.write(("" if found is None else json.dumps(found)) + "\n")
            writer.flush()

    def read() -> None:
        for line in sys.stdin:
            heard_at[0] = time.monotonic()
            if line.strip():
                calls.put(line)
        os._exit(0)  # threads may still fetch

    def show_life() -> None:
        while time.monotonic() - heard_at[0] < SILENCE_S:
            write(None)
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
