"""Lists the models that this machine has in caches: those of huggingface_hub, of parts, and of
programs that keep GGUF files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipespec.engine.checkpoint.formats.gguf import is_gguf
from pipespec.engine.checkpoint.formats.gguf_parts import first_part, parts_of
from pipespec.engine.checkpoint.formats.safetensors_folder import is_whole
from pipespec.engine.checkpoint_parts.cache_listing import entries
from pipespec.engine.checkpoint_parts.parts_file import PartsFile, is_partial
from pipespec.engine.checkpoint_parts.repository import MAIN, ranges_of, read_repository
from pipespec.errors import ConfigError, ModelError
from pipespec.system.folders import home

# Where llama.cpp and LM Studio keep the GGUF files that they download, below the home folder.
GGUF_FOLDERS = (".cache/llama.cpp", ".lmstudio/models/*/*")
LLAMA_CACHE = "LLAMA_CACHE"  # llama.cpp's own variable


@dataclass(frozen=True)
class CachedModel:
    """A checkpoint in a cache.

    Attributes:
        name: what `model.target` would be: a hub id, ORG/NAME/FILE.gguf, or a path.
        path: its folder, or GGUF file.
        whole: whether all its weights are on this machine.
    """

    name: str
    path: Path
    whole: bool


def cached_models() -> list[CachedModel]:
    """The checkpoints in all caches, each name once, in the order of their names. Whether they can
    be decoded is not checked. Raises ConfigError."""
    found: dict[str, CachedModel] = {}
    for each in (*_of_parts(), *_of_hub(), *_gguf_files()):
        if each.name not in found or each.whole > found[each.name].whole:
            found[each.name] = each
    return [found[name] for name in sorted(found)]


def _of_hub() -> Iterator[CachedModel]:
    """Those in the cache of huggingface_hub."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return
    for repo in cache.repos:
        if repo.repo_type != "model":
            continue
        for revision in repo.revisions:
            # A hub id means the newest commit of the main branch.
            if MAIN in revision.refs:
                yield from _in_folder(repo.repo_id, revision.snapshot_path)


def _in_folder(name: str, folder: Path) -> Iterator[CachedModel]:
    """The safetensors checkpoint of a repository, if its files are here, and its GGUF files."""
    if (folder / "config.json").is_file() and is_whole(folder):
        yield CachedModel(name, folder, whole=True)
    for file, whole in _ggufs(sorted(folder.iterdir())):
        if whole:
            yield CachedModel(f"{name}/{file.name}", file, whole)


def _of_parts() -> Iterator[CachedModel]:
    """Those in the parts cache, of which parts may be here."""
    for entry in entries():
        repository = read_repository(entry.folder)
        if repository is None or not entry.current:
            continue
        name = repository.repo if repository.on_hub else str(entry.folder)
        files = [entry.folder / each for each in repository.weights]
        for file, whole in _ggufs(files):
            yield CachedModel(f"{name}/{file.name}", file, whole)
        plain = [file for file in files if not is_gguf(file)]
        if plain:
            yield CachedModel(name, entry.folder, all(map(_is_whole, plain)))


def _ggufs(files: Iterable[Path]) -> Iterator[tuple[Path, bool]]:
    """The GGUF files among these, of several the first, and whether all of their tensors are
    here."""
    for file in files:
        if is_gguf(file) and file == first_part(file):
            yield file, all(map(_is_whole, parts_of(file)))


def _is_whole(file: Path) -> bool:
    """Whether all tensors of a weight file are here."""
    try:
        if not is_partial(file):
            return file.is_file()
        return not PartsFile(file).absent(ranges_of(file).values())
    except ModelError:
        return False


def _gguf_files() -> Iterator[CachedModel]:
    """Those that other programs have downloaded."""
    own = os.environ.get(LLAMA_CACHE)
    folders = [Path(own)] if own else []
    with suppress(ConfigError):  # a user may have no home folder
        folders += [each for pattern in GGUF_FOLDERS for each in sorted(home().glob(pattern))]
    for folder in folders:
        for file, whole in _ggufs(sorted(folder.glob("*.gguf"))):
            if whole:
                yield CachedModel(str(file), file, whole)
