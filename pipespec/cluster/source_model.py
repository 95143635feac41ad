"""The models of a deployment as the launcher has them, for hosts that get theirs from it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from pipespec.engine.checkpoint.formats.gguf import is_gguf
from pipespec.engine.checkpoint_parts.blueprint import (
    Blueprint,
    folder_of_checkpoint,
    repository_of,
    shared_name,
)
from pipespec.engine.checkpoint_parts.hub_client import HubClient
from pipespec.engine.checkpoint_parts.ranges import Range
from pipespec.engine.checkpoint_parts.repository import (
    SharedName,
    cached_commit,
    ranges_of,
    read_repository,
)
from pipespec.errors import ModelError


def shared_name_of(path: Path) -> SharedName | None:
    """The name of a checkpoint in the parts cache of other hosts; None: this host lacks files, so
    that others cannot get theirs from here."""
    try:
        found = repository_of(path)
    except ModelError:
        return None
    return shared_name(found, path.name if is_gguf(path) else None)


class SourceModel:
    """A model as the launcher has it.

    Attributes:
        client: of its repository on the hub; None: it is a folder of a host.
    """

    def __init__(self, kind: str, path: Path) -> None:
        self.kind, self.path = kind, path
        self.folder = folder_of_checkpoint(path)
        found = cached_commit(self.folder)
        on_hub = found is not None and found.on_hub
        self.client = HubClient(found.repo) if found is not None and on_hub else None
        self._known_ranges: dict[str, Mapping[str, Range]] = {}

    @cached_property
    def shared(self) -> SharedName | None:
        """See `shared_name_of`."""
        return shared_name_of(self.path)

    @cached_property
    def blueprint(self) -> Blueprint:
        """For hosts without its folder. Raises ModelError."""
        return Blueprint.of(self.path)

    @property
    def elsewhere_at(self) -> str | None:
        """Where another host has it, if it is a folder or file of that host."""
        found = read_repository(self.folder)
        return None if found is None else found.path

    def num_bytes(self, file: str, name: str) -> int:
        """The size of a tensor of a weight file. Raises ModelError."""
        start, stop = self._ranges(file)[name]
        return stop - start

    def _ranges(self, file: str) -> Mapping[str, Range]:
        if file not in self._known_ranges:
            self._known_ranges[file] = ranges_of(self.folder / file)
        return self._known_ranges[file]
