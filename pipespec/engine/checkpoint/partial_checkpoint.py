"""What a checkpoint consists of, what of it is on this host, which may have only the weights that
it computes, and how it comes here."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

from pipespec.engine.checkpoint.checkpoint import open_files
from pipespec.engine.checkpoint.parts import folder as cache
from pipespec.engine.checkpoint.parts import parts_file
from pipespec.engine.checkpoint.parts.folder import Repository, StoredFile, folder_of_checkpoint
from pipespec.engine.checkpoint.parts.parts_file import PartsFile, blocks_of, is_partial, ranges_of
from pipespec.engine.checkpoint.parts.sources import HubSource, RangeSource, fetch_all
from pipespec.engine.formats.gguf import is_gguf
from pipespec.engine.formats.gguf_file import header_ends, part_names
from pipespec.engine.formats.safetensors_headers import (
    CONFIG,
    INDEX,
    SHARDS,
    WEIGHTS,
    header_length,
    stored_index,
)
from pipespec.engine.formats.slice_tensors import described, part_of
from pipespec.errors import ModelError

SMALL_FILES = ("*.json", "*.model", "*.jinja", "*.txt")


# --- what is here -----------------------------------------------------------------------------


def missing(path: Path, parts: Collection[str]) -> dict[str, list[str]]:
    """The tensors of these parts (`slice_tensors`) that a checkpoint lacks here, by file. Raises
    ModelError."""
    files = open_files(path)
    if all(file.is_file() and not is_partial(file) for file in files.weight_files()):
        return {}
    found = {}
    for file, names in files.names_by_file(parts).items():
        lacking = list(names)
        if file.is_file():
            own, ranges = PartsFile(file), ranges_of(file)
            lacking = [name for name, stored in names.items() if own.absent([ranges[stored]])]
        if lacking:
            found[file.name] = lacking
    return found


def blocks_needed(path: Path, parts: Collection[str]) -> dict[str, list[int]]:
    """The blocks of each weight file that is here with its header or tensors of these parts, by the
    file's name. Raises ModelError."""
    files = open_files(path)
    found, names = {}, files.names_by_file(parts)
    for file in filter(Path.is_file, files.weight_files()):
        ranges = ranges_of(file)
        header = 0, min((start for start, _ in ranges.values()), default=file.stat().st_size)
        own = map(ranges.__getitem__, names.get(file, {}).values())
        found[file.name] = blocks_of([header, *own])
    return found


def require_parts(path: Path, parts: Collection[str]) -> None:
    """Raise ModelError, which names what is missing, unless a checkpoint holds these parts here."""
    if lacking := missing(path, parts):
        raise ModelError(f"{path} {clause(lacking)}; copy the files there")


def clause(lacking: Mapping[str, Collection[str]]) -> str:
    """What `missing` has found, as "lacks layers 2 and 3 (in a.safetensors and 1 more file)"."""
    files = sorted(lacking)
    more = f" and {len(files) - 1} more file{'s' if len(files) > 2 else ''}" if files[1:] else ""
    parts = {part_of(name) for names in lacking.values() for name in names}
    return f"lacks {described(parts)} (in {files[0]}{more})"


def own_path(path: Path | None, shared: Repository | None, parts: Collection[str]) -> Path | None:
    """Where this host has a checkpoint that hosts call `shared`, or where the launcher has one of
    which it lacks files (`path`): a place with these parts, if there is one; None: nowhere."""
    found = [path]
    if shared is not None:
        on_hub = shared.repo, shared.commit, shared.gguf
        whole = Path(shared.path) if shared.path else cache.cached_model(*on_hub)
        found = [whole, cache.begun(shared.folder, shared.gguf)]
    here = [each for each in found if each is not None and cache.is_checkpoint(each)]
    return next((each for each in here if not missing(each, parts)), here[0] if here else None)


def repository_of(path: Path, *, as_folder: bool = False) -> Repository:
    """What a checkpoint here is of: a commit on the hub, unless it is to be described `as_folder`,
    or this host's folder. No header is read. Raises ModelError if it lacks files, so that other
    hosts cannot get theirs from here."""
    folder, files = folder_of_checkpoint(path), open_files(path).weight_files()
    if absent := [file.name for file in files if not file.is_file()]:
        raise ModelError(
            f"{path} lacks {absent[0]}, so other hosts cannot get their layers from here; copy it "
            "there"
        )
    small = [] if is_gguf(path) else [e for e in sorted(folder.iterdir()) if _is_small(e.name)]
    found = None if as_folder else cache.read_repository(folder) or _cached_commit(folder)
    if found is None:  # its name for other hosts changes with the files
        stats = [(each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files]
        text = repr((str(path.absolute()), stats)).encode()
        commit = hashlib.sha256(text).hexdigest()[:40]
        found = Repository(folder.absolute().name, commit, str(path.absolute()))
    here = filter(Path.is_file, (*small, *files))
    sizes = {e.name: found.files.get(e.name, StoredFile(e.stat().st_size)) for e in here}
    return replace(found, files=sizes)


def _cached_commit(folder: Path) -> Repository | None:
    """What a folder of the cache of huggingface_hub is of; None: it is another folder."""
    if (snapshots := folder.absolute().parent).name == "snapshots":
        from huggingface_hub import constants  # takes its time, so not for other folders

        kind, *repo = snapshots.parent.name.split("--")
        if kind == "models" and snapshots.parents[1] == Path(constants.HF_HUB_CACHE).absolute():
            return Repository("/".join(repo), folder.name)
    return None


# --- how it comes here ------------------------------------------------------------------------


def fetch_parts(path: Path, parts: Collection[str]) -> None:
    """Fetch the parts (`slice_tensors`) that a checkpoint of the hub lacks here; of another one,
    a load says what is lacking. Raises ModelError if they cannot be fetched."""
    folder = folder_of_checkpoint(path)
    repository = cache.read_repository(folder)
    if repository is not None and repository.on_hub and missing(path, parts):
        with cache.sole_fetcher(folder):
            needed = blocks_needed(path, parts)
            files = cache.make_files(repository, needed)
            wanted = [(of, b) for name, of in files.items() for b in needed[name] if not of.has(b)]
            fetch_all(HubSource(repository.repo, repository.commit), wanted)
            cache.make_files(repository, needed)  # which compares those that are whole now


def open_repository(source: RangeSource, found: Repository, file: str | None = None) -> Path:
    """A checkpoint, or GGUF `file`, of a repository, whose small files and headers are fetched
    unless they are here. `found` has all files of the repository. Raises ModelError."""
    folder = found.folder
    if here := cache.begun(folder, file):
        with parts_file.reported(folder):
            os.utime(folder / cache.REPOSITORY)  # it was used last
        return here
    small = [] if file else _required(found, {CONFIG, *filter(_is_small, found.files)})
    with cache.sole_fetcher(folder):
        files = cache.make_files(found, small).values()
        fetch_all(source, [(each, block) for each in files for block in each.absent()])
        # As Transformers: one file goes before an index.
        index = {} if WEIGHTS in found.files else stored_index(folder) or {}
        alone = WEIGHTS in found.files or not any(fnmatch(each, SHARDS) for each in found.files)
        names = {*index.values()} or {WEIGHTS if alone else INDEX}
        weights = _required(found, part_names(file) if file else names)
        files = cache.make_files(found, weights).values()
        while lacking := [(each, block) for each in files for block in _rest_of_header(each)]:
            fetch_all(source, lacking)
        used = {each: found.files[each] for each in (*small, *weights)}
        cache.write_repository(replace(found, files=used))
    return folder / (part_names(file)[0] if file else "")


def _is_small(name: str) -> bool:
    return any(fnmatch(name, each) for each in SMALL_FILES)


def _required(found: Repository, names: Iterable[str]) -> list[str]:
    """These files of a repository. Raises ModelError if it lacks one."""
    for name in sorted(names):
        if name not in found.files:
            raise ModelError(
                f"{found.repo} holds no {name}; name a checkpoint of Transformers with safetensors "
                f"files, or one of its GGUF files as {found.repo}/FILE.gguf"
            )
    return sorted(names)


def _rest_of_header(file: PartsFile) -> list[int]:
    """The next blocks of the header of a file that are not here; none: all are. Raises
    ModelError."""
    stop, ends = file.place(0)[1], False
    while not (rest := file.absent([(0, stop)])) and not ends:
        with file.path.open("rb") as stream:
            prefix = stream.read(stop)
        if is_gguf(file.path):
            ends = stop == file.size or header_ends(file.path, prefix, file.size)
            stop = stop if ends else min(2 * stop, file.size)
        else:
            ends, stop = True, 8 + header_length(file.path, prefix[:8], file.size)
    return rest
