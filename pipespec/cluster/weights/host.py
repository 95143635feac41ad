"""`python -m pipespec.cluster.weights.host`: fetches what a host computes, on that host, where the
launcher calls the functions of `WeightHost` (`calls`). It is told numbers of bytes that were
fetched, and warnings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pipespec.cluster.host_link.calls import Answers
from pipespec.cluster.weights.plan import HUB, Block
from pipespec.cluster.weights.server import WeightServer, tls_context
from pipespec.controller.certificate import Certificate
from pipespec.engine.checkpoint import parts
from pipespec.engine.checkpoint.partial_checkpoint import missing, own_path, repository_of
from pipespec.engine.checkpoint.parts import folder
from pipespec.engine.checkpoint.parts.folder import Repository, folder_of_checkpoint
from pipespec.engine.checkpoint.parts.parts_file import PartsFile, reported
from pipespec.engine.checkpoint.parts.sources import RangeSource, Wanted, fetch
from pipespec.errors import ModelError
from pipespec.system.network_interfaces import interfaces, resolve
from pipespec.system.validation import from_fields, home_expanded


class WeightHost:
    """What the launcher may ask of a host, of one model after another. `moved` is called with
    numbers of bytes that were fetched. Raises ModelError, OSError."""

    def __init__(self, moved: Callable[[int], object]) -> None:
        self._moved = moved
        self._shared: Repository | None = None  # that is fetched into the parts cache
        self._files: dict[str, PartsFile] = {}

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

    def offer(self, wanted: Sequence[Block], own: Sequence[Block]) -> list[Block]:
        """Those of the blocks `wanted` that are here. Once all of its `own` are, which are among
        them, its folder is finished. Raises ModelError if a whole file has another hash than the
        hub states."""
        with self._fetching():
            if (shared := self._shared) is not None and all(map(self._has, own)):
                folder.write_repository(shared)
            return [*filter(self._has, wanted)]

    def listen(self, address: str, interface: str | None, certificate: Mapping[str, str]) -> str:
        """Let the other hosts of this run, which have its certificate, read what is here, at an
        address, or at that of the interface if it has another; the URL."""
        found = next((each.addresses for each in interfaces() if each.name == interface), ())
        try:
            ip = resolve(address)  # which perhaps this host alone can
            ip = ip if ip in found or not found else found[0]
            made = Certificate(**certificate)
            return WeightServer(ip, made, lambda name: self._files.get(name)).url
        except OSError as error:
            raise ModelError(
                f"this host cannot listen at {address} ({error.strerror or error}), where others "
                "read its weights; correct its address or interface in the hosts file"
            ) from error

    def fetch(
        self,
        sources: Mapping[str, tuple[Mapping[str, str], Sequence[Block]]],
        certificate: Mapping[str, str],
    ) -> dict[str, str]:
        """Fetch blocks from all sources at once, by name; why some of these were given up. Of a
        source are given the URLs of its files, and the blocks that it is to send. Other hosts have
        the certificate of this run."""
        trusted = tls_context(Certificate(**certificate), server=False)
        asked = dict[RangeSource, Wanted]()
        with self._fetching():
            for name, (urls, wanted) in sources.items():
                lacked = [
                    (self._files[block[0]], block[1]) for block in wanted if not self._has(block)
                ]
                asked[RangeSource(name, urls, None if name == HUB else trusted)] = lacked
            return {of.name: str(why) for of, why in fetch(asked, self._moved).items()}

    @contextmanager
    def _fetching(self) -> Iterator[None]:
        """Alone fetch into the folder of the model, into which another process may have fetched
        since."""
        if (of := self._shared) is None:
            yield
            return
        with folder.sole_fetcher(of.folder):
            self._files = folder.make_files(of, of.files)
            yield

    def _has(self, block: Block) -> bool:
        return block[0] in self._files and self._files[block[0]].has(block[1])


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

    logging.getLogger(parts.__name__).addHandler(Warner())
    answers.answer_calls(call)


if __name__ == "__main__":
    main()
