"""What a checkpoint lacks on this host, which may have only the weights that it computes, and how
it comes here from the hub."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from pipespec.engine.checkpoint.checkpoint import open_files
from pipespec.engine.checkpoint.model_path import cached_model
from pipespec.engine.checkpoint.parts.fetching import fetch_all
from pipespec.engine.checkpoint.parts.folder import (
    Repository,
    folder_of_checkpoint,
    is_begun,
    is_checkpoint,
    read_repository,
    sole_fetcher,
)
from pipespec.engine.checkpoint.parts.parts_file import PartsFile, blocks_of, is_partial, ranges_of
from pipespec.engine.checkpoint.parts.range_source import HubSource
from pipespec.engine.formats.slice_tensors import described, part_of
from pipespec.errors import ModelError


def missing(path: Path, parts: Collection[str]) -> dict[str, list[str]]:
    """The tensors of these parts (`slice_tensors`) that a checkpoint lacks here, by file. Raises
    ModelError."""
    files = open_files(path)
    if all(os.path.isfile(file) and not is_partial(file) for file in files.weight_files()):
        return {}
    found: dict[str, list[str]] = {}
    for file, names in files.names_by_file(parts).items():
        if not os.path.isfile(file):
            lacking = list(names)
        elif is_partial(file):
            own = PartsFile(file)
            lacking = [name for name, stored in names.items() if own.absent([own.ranges[stored]])]
        else:
            continue
        if lacking:
            found[file.name] = lacking
    return found


def blocks_needed(path: Path, parts: Collection[str]) -> dict[Path, list[int]]:
    """The blocks of each weight file that is here with its header or tensors of these parts. Raises
    ModelError."""
    files = open_files(path)
    found, names = {}, files.names_by_file(parts)
    for file in filter(Path.is_file, files.weight_files()):
        ranges = ranges_of(file)
        header = 0, min((start for start, _ in ranges.values()), default=file.stat().st_size)
        found[file] = blocks_of([header, *map(ranges.__getitem__, names.get(file, {}).values())])
    return found


def fetch_parts(path: Path, parts: Collection[str]) -> int:
    """Fetch the parts (`slice_tensors`) that a checkpoint lacks here from the hub; the bytes
    fetched. Raises ModelError if it lacks some and is of no repository of the hub, or they cannot
    be fetched."""
    lacking = missing(path, parts)
    if not lacking:
        return 0
    folder = folder_of_checkpoint(path)
    repository = read_repository(folder)
    if repository is None or not repository.on_hub:
        raise ModelError(f"{path} {clause(lacking)}; copy the files there")

    with sole_fetcher(folder):
        needed = blocks_needed(path, parts)
        files = {PartsFile(each): of for each, of in needed.items() if is_partial(each)}
        wanted = {each: [b for b in of if not each.has(b)] for each, of in files.items()}
        fetch_all(HubSource(repository.repo, repository.commit), wanted)
        for each in files:
            each.compare(repository.files[each.path.name].sha256)
    return sum(each.num_bytes(blocks) for each, blocks in wanted.items())


def layers_here(path: Path, num_layers: int) -> range:
    """The longest run of layers that a checkpoint holds here. Raises ModelError if there is
    none."""
    best = run = range(0)
    for layer in range(num_layers):
        if missing(path, {str(layer)}):
            continue
        run = range(run.start if run.stop == layer else layer, layer + 1)
        best = max(best, run, key=len)
    if not best:
        raise ModelError(f"{path} holds no whole layer; copy its files there")
    return best


def own_path(
    path: Path, given: str | None, shared: Repository | None, parts: Collection[str]
) -> Path | None:
    """Where a host has a checkpoint of the launcher's; None: nowhere. Called on that host.

    Args:
        path: where the launcher has it.
        given: what the hosts file says for this host.
        shared: what other hosts call it.
        parts: what the host computes of it.
    """
    if given:
        return Path(given).expanduser()
    found = [path] if shared is None else []
    if shared is not None:
        found += [] if shared.path is None else [Path(shared.path)]
        file = None if folder_of_checkpoint(path) == path else path.name
        if shared.on_hub:
            cached = cached_model(shared.repo, shared.commit, file)
            found += [] if cached is None else [cached]
        if is_begun(shared.folder, file):
            found.append(shared.folder / (file or ""))
    here = list(filter(is_checkpoint, found))
    return next((each for each in here if not missing(each, parts)), here[0] if here else None)


def require_parts(path: Path, parts: Collection[str]) -> None:
    """Raise ModelError, which names what is missing, unless a checkpoint holds these parts here."""
    lacking = missing(path, parts)
    if lacking:
        raise ModelError(f"{path} {clause(lacking)}; copy the files there")


def clause(lacking: Mapping[str, Collection[str]]) -> str:
    """What `missing` has found, as "lacks layers 2 and 3 (in a.safetensors and 1 more file)"."""
    files = sorted(lacking)
    more = f" and {len(files) - 1} more file{'s' if len(files) > 2 else ''}" if files[1:] else ""
    parts = {part_of(name) for names in lacking.values() for name in names}
    return f"lacks {described(parts)} (in {files[0]}{more})"
