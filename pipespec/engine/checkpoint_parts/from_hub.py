"""Fetches the parts of a checkpoint that a host needs from the hub."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from pipespec.engine.checkpoint.formats.gguf import is_gguf
from pipespec.engine.checkpoint.partial_checkpoint import clause, missing, tensors_by_file
from pipespec.engine.checkpoint_parts.fetching import HubSource, OnProgress, check_whole, fetch
from pipespec.engine.checkpoint_parts.hub_client import HubClient
from pipespec.engine.checkpoint_parts.repository import read_repository
from pipespec.errors import ModelError


def fetch_parts(
    path: Path, parts: Collection[str], on_progress: OnProgress = lambda done, total: None
) -> int:
    """Fetch the parts (`slice_tensors`) that a checkpoint lacks here; the bytes fetched.

    Raises ModelError if it lacks some and is of no repository of the hub, or they cannot be
    fetched.
    """
    lacking = missing(path, parts)
    if not lacking:
        return 0
    folder = path.parent if is_gguf(path) else path
    repository = read_repository(folder)
    if repository is None or not repository.on_hub:
        raise ModelError(f"{path} {clause(lacking)}; copy the files there")
    wanted = {
        file.name: list(dict.fromkeys(names.values()))
        for file, names in tensors_by_file(path, parts).items()
    }
    source = HubSource(HubClient(repository.repo), repository)
    fetched = fetch(folder, [(source, wanted)], on_progress)
    check_whole(folder, repository, source)
    return fetched
