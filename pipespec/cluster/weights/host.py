"""`python -m pipespec.cluster.weights.host`: fetches what a host computes, on that host, where the
launcher calls the functions of `WeightHost` (`calls`). It is told numbers of bytes that were
fetched, and warnings."""

from __future__ import annotations

import base64
import logging
import ssl
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pipespec.cluster.host_link.calls import Answers
from pipespec.cluster.weights.plan import HUB, Block
from pipespec.cluster.weights.server import WeightServer, tls_context
from pipespec.controller.certificate import Certificate
from pipespec.engine.checkpoint.partial_checkpoint import missing, own_path, repository_of
from pipespec.engine.checkpoint.parts import folder
from pipespec.engine.checkpoint.parts.folder import Repository, folder_of_checkpoint
from pipespec.engine.checkpoint.parts.parts_file import PartsFile, reported
from pipespec.engine.checkpoint.parts.sources import GivenSource, RangeSource, WrongBytes, fetch
from pipespec.errors import ModelError
from pipespec.system.files import lock_file
from pipespec.system.network_interfaces import interfaces, resolve
from pipespec.system.validation import from_fields, home_expanded


class WeightHost:
    """What the launcher may ask of a host, of one model after another. `moved` is called with
    numbers of bytes that were fetched. Raises ModelError, OSError."""

    def __init__(self, moved: Callable[[int], object]) -> None:
        self._moved = moved
        self._shared: Repository | None = None  # that is fetched into the parts cache
        self._files: dict[str, PartsFile] = {}
        self._used: dict[Path, int | None] = {}  # the folders of models, which nobody may remove
        self._context: ssl.SSLContext | None = None  # for other hosts

    def describe(self, path: str) -> Repository | None:
        """A checkpoint that this host has whole at `path`, as a folder of this host's, wherever it
        came from."""
        if not folder.is_checkpoint(found := home_expanded(path)):
            return None
        repository = repository_of(found, as_folder=True)
        self._files = _files_here(found, repository)
        return repository

    def prepare(self, repository: Mapping[str, Any], parts: Collection[str]) -> bool:
        """Find the folder of a model: in the parts cache, unless another one lacks none of these
        parts; whether all are here. Others read from that one if it is what the launcher means."""
        self._shared = shared = from_fields(Repository, repository)
        found = own_path(None, shared, parts)
        if found is None or missing(found, parts):
            return False
        if not found.is_relative_to(folder.parts_cache()):
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
        """Fetch blocks from all sources at once: which of them it "has" then, and in "failed", by
        name, why sources were given up, as a clause, empty if one sent wrong bytes. Of a source are
        given its "name", the "urls" of its files, or the "data" of one block that the launcher has
        read, and "wanted": file, number and hash, or null, of blocks."""
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
                    context = None if each["name"] == HUB else self._context
                    source = RangeSource(each["name"], each["urls"], context)
                asked.append((source, wanted))
            failed = {
                source.name: "" if isinstance(error, WrongBytes) else str(error.__cause__ or error)
                for source, error in fetch(asked, self._moved).items()
            }
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
        with folder.sole_fetcher(of.folder):
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


def main() -> None:
    answers = Answers()
    host = WeightHost(lambda count: answers.note(moved=count))

    class Warner(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            answers.note(warning=record.getMessage())

    def call(do: str, **arguments: Any) -> Any:
        with reported(folder.parts_cache()):
            return getattr(host, do)(**arguments)

    folder.log.addHandler(Warner())
    answers.answer_calls(call)


if __name__ == "__main__":
    main()
