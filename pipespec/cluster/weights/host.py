"""`python -m pipespec.cluster.weights.host`: fetches what a host computes, on that host.

The launcher starts it over SSH and calls the functions of `WeightHost` one after the other: a call
is a line of JSON on its standard input, the result one on its standard output, before which come
its version, numbers of bytes that were fetched, and warnings. Empty lines are signs of life. The
process ends with its standard input.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import select
import ssl
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from pipespec.cluster.weights.plan import Block
from pipespec.cluster.weights.server import WeightServer, tls_context
from pipespec.controller.certificate import Certificate
from pipespec.engine.checkpoint.partial_checkpoint import missing, own_path, repository_of
from pipespec.engine.checkpoint.parts import folder
from pipespec.engine.checkpoint.parts.folder import Repository, folder_of_checkpoint, sole_fetcher
from pipespec.engine.checkpoint.parts.parts_file import PartsFile, reported
from pipespec.engine.checkpoint.parts.sources import GivenSource, RangeSource, WrongBytes, fetch
from pipespec.errors import ModelError, PipespecError
from pipespec.system.files import lock_file
from pipespec.system.network_interfaces import interfaces, resolve
from pipespec.system.validation import from_fields, home_expanded
from pipespec.system.versions import own_version

# Seconds between two signs of life, and without any after which the other side has ended.
ALIVE_S, SILENCE_S = 5.0, 40.0


class WeightHost:
    """What the launcher may ask of a host, of one model after another. `moved` is called with
    numbers of bytes that were fetched. Raises ModelError, OSError."""

    def __init__(self, moved: Callable[[int], object]) -> None:
        self._moved = moved
        self._shared: Repository | None = None  # that is fetched into the parts cache
        self._files: dict[str, PartsFile] = {}
        self._used: dict[Path, int | None] = {}  # the folders of models, which nobody may remove
        self._context: ssl.SSLContext | None = None  # for other hosts

    def describe(self, path: str) -> dict[str, Any] | None:
        """The "repository" of a checkpoint that this host has whole at `path`, as a folder of this
        host's, wherever it came from, and of a GGUF file its name as "file"."""
        if not folder.is_checkpoint(found := home_expanded(path)):
            return None
        repository = repository_of(found, as_folder=True)
        self._files = _files_here(found, repository)
        file = None if folder_of_checkpoint(found) == found else found.name
        return {"repository": asdict(repository), "file": file}

    def prepare(self, path: str, repository: Mapping[str, Any], parts: Collection[str]) -> bool:
        """Find the folder of a model that the launcher has at `path`: in the parts cache, unless
        another one lacks none of these parts; whether all are here. Others read from that one if it
        is what the launcher means."""
        self._shared = shared = from_fields(Repository, repository)
        found = own_path(Path(path), shared, parts)
        whole = found is not None and not missing(found, parts)
        if found is None or not whole or found.is_relative_to(folder.parts_cache()):
            return whole
        self._shared, self._files = None, {}
        with suppress(ModelError):
            if shared.on_hub or repository_of(found, as_folder=True).folder == shared.folder:
                self._files = _files_here(found, shared)
        return True

    def offer(self, blocks: Sequence[Block]) -> list[Any]:
        """Those of the blocks that are here, with their hashes, or null of a whole file."""
        with self._fetching():
            return self._here(blocks)

    def listen(self, address: str | None, interface: str | None, cert: str, key: str) -> str | None:
        """Let the other hosts of this run read what is here, at an address, or at that of the
        interface if it has another, and read from them; the URL."""
        certificate = Certificate(cert, key)
        self._context = tls_context(certificate, ssl.PROTOCOL_TLS_CLIENT)
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
        each source null, or why it was given up, as a clause, empty if it sent wrong bytes. Of a
        source are given its "name", the "urls" of its files, or the "data" of one block that the
        launcher has read, whether it is a "host", and "wanted": file, number and hash, or null, of
        blocks."""
        asked, blocks = [], []
        with self._fetching():
            for each in sources:
                wanted = defaultdict[PartsFile, Any](dict)
                for name, number, sha in each["wanted"]:
                    blocks.append((name, number))
                    if not (file := self._files[name]).has(number):
                        wanted[file][number] = sha and bytes.fromhex(sha)
                if (data := each.get("data")) is not None:
                    read = base64.b64decode(data)
                    source: RangeSource = GivenSource(each["name"], lambda *_, read=read: read)
                else:
                    context = self._context if each["host"] else None
                    source = RangeSource(each["name"], each["urls"], context)
                asked.append((source, wanted))
            found = fetch(asked, self._moved)
        failed = [error and _why(error) for error in (found.get(source) for source, _ in asked)]
        return {"has": self._here(blocks), "failed": failed}

    def read(self, file: str, start: int, stop: int) -> str:
        """Bytes of a file of this host, in base 64."""
        with self._file(file).open("rb") as stream:
            stream.seek(start)
            return base64.b64encode(stream.read(stop - start)).decode()

    def end(self) -> None:
        """Mark what was fetched as finished. Raises ModelError if a whole file has another hash
        than the hub states."""
        with self._fetching():
            if self._shared is not None:
                for name, file in self._files.items():
                    file.compare(self._shared.files[name].sha256)
                folder.write_repository(self._shared)

    @contextmanager
    def _fetching(self) -> Iterator[None]:
        """Alone fetch into the folder of the model, into which another process may have fetched
        since."""
        if (of := self._shared) is None:
            yield
            return
        with sole_fetcher(of.folder):
            if of.folder not in self._used:
                self._used[of.folder] = lock_file(of.folder / folder.USERS, shared=True)
            self._files = folder.make_files(of, of.files)
            yield

    def _file(self, name: str) -> Path:
        """The path of a file of the model. Raises ModelError for any other name."""
        if name not in self._files:
            raise ModelError(f"{name!r} is no file of a model here")
        return self._files[name].path

    def _here(self, blocks: Iterable[Block]) -> list[Any]:
        found: list[Any] = []
        for name, number in blocks:
            file = self._files.get(name)
            if file is not None and file.has(number):
                sha = file.digest(number)
                found.append((name, number, sha and sha.hex()))
        return found


def _files_here(path: Path, repository: Repository) -> dict[str, PartsFile]:
    """The files of a checkpoint of a folder of its own."""
    paths = (folder_of_checkpoint(path) / name for name in repository.files)
    return {each.name: PartsFile(each) for each in paths if each.is_file()}


def _why(error: ModelError) -> str:
    return "" if isinstance(error, WrongBytes) else str(error.__cause__ or error)


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
            with reported(folder.parts_cache()):
                write(result=getattr(host, asked.pop("do"))(**asked))
        except PipespecError as error:
            write(error=str(error))
        except Exception as error:  # noqa: BLE001 - the launcher reports it
            write(error=f"{type(error).__name__}: {error}")

    class Warner(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            write(warning=record.getMessage())

    write(version=own_version())
    folder.log.addHandler(Warner())
    host, calls = WeightHost(lambda count: write(moved=count)), ThreadPoolExecutor(1)
    threading.Thread(target=show_life, daemon=True).start()
    try:
        for line in lines_of(sys.stdin.buffer):
            calls.submit(answer, json.loads(line))
    finally:
        os._exit(0)  # threads may still fetch


if __name__ == "__main__":
    main()
