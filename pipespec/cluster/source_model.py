"""The models of a deployment as the launcher has them, for hosts that get theirs from it."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from pathlib import Path

from pipespec.engine.formats.gguf import is_gguf
from pipespec.engine.partial_checkpoint import missing, tensors_by_file
from pipespec.engine.parts.blueprint import (
    Blueprint,
    folder_name,
    folder_of_checkpoint,
    repository_of,
)
from pipespec.engine.parts.hub_client import HubClient
from pipespec.engine.parts.parts_file import PartsFile, is_partial
from pipespec.engine.parts.ranges import RangeSet
from pipespec.engine.parts.repository import SharedName, cached_commit, ranges_of
from pipespec.errors import ModelError

# A tensor: model, file, name in the file.
Key = tuple[str, str, str]


def shared_name_of(path: Path) -> SharedName | None:
    """The name of a checkpoint in the parts cache of other hosts; None: this host lacks files, so
    that others cannot get theirs from here."""
    try:
        found = repository_of(path)
    except ModelError:
        return None
    file = path.name if is_gguf(path) else None
    return SharedName(folder_name(found), file, found.on_hub)


class SourceModel:
    """A model as the launcher has it.

    Attributes:
        client: of its repository on the hub; None: it is a folder of this host.
        fetched: set once all that the launcher fetches of it is here, or `failure` says why not.
    """

    def __init__(self, kind: str, path: Path) -> None:
        self.kind, self.path = kind, path
        self.folder = folder_of_checkpoint(path)
        found = cached_commit(self.folder)
        on_hub = found is not None and found.on_hub
        self.client = HubClient(found.repo) if found is not None and on_hub else None
        self.fetched = threading.Event()
        self.failure: ModelError | None = None

    @cached_property
    def shared(self) -> SharedName | None:
        """See `shared_name_of`."""
        return shared_name_of(self.path)

    @cached_property
    def blueprint(self) -> Blueprint:
        """For hosts without its folder. Raises ModelError."""
        return Blueprint.of(self.path)

    def file(self, name: str) -> Path:
        """The weight file of that name. Raises ModelError for any other name."""
        if name not in self.blueprint.headers:
            raise ModelError(f"{name!r} is no weight file of {self.path}")
        return self.folder / name

    def absent(self, names: Mapping[str, Collection[str]]) -> Iterator[Key]:
        """Those of these tensors, by file, that are not here."""
        for file, tensors in names.items():
            path = self.folder / file
            if path.is_file() and not is_partial(path):
                continue
            ranges = ranges_of(path) if path.is_file() else {}
            here = PartsFile(path).here if ranges else RangeSet()
            for name in tensors:
                if name not in ranges or ranges[name] not in here:
                    yield self.kind, file, name

    def wanted(self, parts: Collection[str]) -> dict[str, list[str]]:
        """The names, in the files, of the tensors of parts of which some are lacking here."""
        if not missing(self.path, parts):
            return {}
        found = tensors_by_file(self.path, parts)
        return {file.name: list(dict.fromkeys(names.values())) for file, names in found.items()}
