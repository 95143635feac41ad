"""What the parts cache holds, and removing it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipespec.engine.checkpoint_parts.folder_lock import sole_fetcher
from pipespec.engine.checkpoint_parts.parts_file import reported
from pipespec.engine.checkpoint_parts.repository import (
    FOLDERS,
    known_commit,
    parts_cache,
    read_repository,
    record_of_folder,
)


@dataclass(frozen=True)
class CacheEntry:
    """A folder of the parts cache.

    Attributes:
        model: its hub id, or the name of another host's folder.
        commit: on the hub, or the hash of that folder.
        disk_bytes: that it takes on the disk.
        whole_bytes: of all its weight files; 0: it was not finished.
        current: the commit that is used while the hub cannot be reached, or of another host's
            folder the state that was used last.
    """

    folder: Path
    model: str
    commit: str
    disk_bytes: int
    whole_bytes: int
    current: bool


def entries() -> Iterator[CacheEntry]:
    """All folders of the parts cache. Raises ConfigError."""
    cache = parts_cache()
    for folder in sorted([*cache.glob("models--*/*"), *cache.glob(f"{FOLDERS}--*/*")]):
        if folder.name == "refs" or not folder.is_dir():
            continue
        found = read_repository(folder)
        model = "/".join(folder.parent.name.split("--")[1:])
        whole = 0 if found is None else sum(each.size for each in found.weights.values())
        current = found is not None and folder.name == (
            known_commit(model) if found.on_hub else _last_used(folder.parent)
        )
        yield CacheEntry(folder, model, folder.name, _disk_bytes(folder), whole, current)


def _last_used(root: Path) -> str:
    """The name of the folder that was made or offered last."""
    records = [record for each in root.iterdir() if (record := record_of_folder(each)).is_file()]
    return max(records, key=lambda record: record.stat().st_mtime_ns).parent.parent.name


def remove(entry: CacheEntry) -> None:
    """Remove a folder. Ranks that have loaded weights from it go on. Raises ModelError, also where
    a process fetches into it."""
    with reported(entry.folder), sole_fetcher(entry.folder, wait=False):
        shutil.rmtree(entry.folder)
        others = [each for each in entry.folder.parent.iterdir() if each.name != "refs"]
        if not others:
            shutil.rmtree(entry.folder.parent)


def _disk_bytes(folder: Path) -> int:
    """Bytes on the disk: of a file with holes, those that are there. Links do not count."""
    blocks = [each.lstat().st_blocks for each in folder.rglob("*") if not each.is_symlink()]
    return 512 * sum(blocks)
