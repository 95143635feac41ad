"""Folders of the parts cache: one for each commit of a repository.

    ~/.cache/pipespec/weights/models--ORG--NAME/COMMIT/          a model folder
    ~/.cache/pipespec/weights/folders--NAME/HASH/                one that came from another host's
        config.json, tokenizer.json, ...                         small files
        model-00001-of-00004.safetensors, ...                    weight files
        .parts/repository.json                                   `Repository`
        .parts/model-00001-of-00004.safetensors.blocks           the record of a file (`parts_file`)
        .parts/lock                                              locked by what changes it

A file that the cache of huggingface_hub holds whole is a link to it. Of a repository's folders that
one is used while the hub cannot be reached whose `repository.json` was written last.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pipespec.engine.checkpoint.parts.parts_file import RECORDS, PartsFile, is_partial, reported
from pipespec.engine.formats.gguf import is_gguf
from pipespec.engine.formats.gguf_file import part_names
from pipespec.engine.formats.safetensors_folder import is_whole
from pipespec.errors import ConfigError
from pipespec.system.files import lock_file, write_atomically
from pipespec.system.folders import cache_folder
from pipespec.system.validation import Unreadable, from_fields, read_json

log = logging.getLogger(__name__)
FOLDERS = "folders"
REPOSITORY = f"{RECORDS}/repository.json"


@dataclass(frozen=True)
class StoredFile:
    """A file of a repository: bytes, and the SHA-256 that the hub states for large files."""

    size: int
    sha256: str | None = None


@dataclass(frozen=True)
class Repository:
    """What any host calls a checkpoint: a commit on the hub, or a folder of a host, whose `commit`
    is a hash that changes with it. `path`: of the checkpoint on the host that has it; None: it is
    on the hub. `files`: what is used of it, small files and weight files."""

    repo: str
    commit: str
    path: str | None = None
    files: Mapping[str, StoredFile] = field(default_factory=dict)

    @property
    def on_hub(self) -> bool:
        return self.path is None

    @property
    def gguf(self) -> str | None:
        """The GGUF file that the checkpoint is, of several the first; None: it is a folder."""
        return next(filter(is_gguf, sorted(self.files)), None)

    @property
    def folder(self) -> Path:
        """In the parts cache here; a commit's is never that of a host's folder. Raises
        ConfigError."""
        kind = "models" if self.on_hub else FOLDERS
        return parts_cache() / "--".join((kind, *self.repo.split("/"))) / self.commit


def parts_cache() -> Path:
    """The folder of all repositories. Raises ConfigError."""
    return cache_folder() / "weights"


def folder_of_checkpoint(path: Path) -> Path:
    """The folder of a checkpoint, which is `path` unless that is a GGUF file."""
    return path.parent if is_gguf(path) else path


def is_checkpoint(path: Path) -> bool:
    """Whether there is a folder, or a GGUF file, of that name."""
    return path.is_dir() or (is_gguf(path) and path.is_file())


def read_repository(folder: Path) -> Repository | None:
    """What a folder of the parts cache is of; None: it is another folder, or not finished."""
    with suppress(Unreadable):
        return from_fields(Repository, read_json(folder / REPOSITORY))
    return None


def write_repository(found: Repository) -> None:
    """Mark the folder of a repository as finished but for tensors of these files too, and as that
    of its model which was used last. Raises OSError."""
    known = read_repository(found.folder)
    both = replace(found, files={**({} if known is None else known.files), **found.files})
    write_atomically(found.folder / REPOSITORY, json.dumps(asdict(both)).encode())


def make_files(found: Repository, names: Iterable[str]) -> dict[str, PartsFile]:
    """Files of a repository in its folder here, of which blocks may be absent, made unless they are
    there. Those that the cache of huggingface_hub holds become links to them. Raises OSError;
    ModelError if a whole file has another hash than the hub states."""
    made = {}
    for name in names:
        path = found.folder / name
        if path.is_symlink() and not path.exists():  # to a cache that has lost it
            path.unlink(missing_ok=True)
        whole = cached_file(found.repo, found.commit, name) if found.on_hub else None
        if whole is not None and not path.exists():
            os.symlink(os.path.realpath(whole), path)
        made[name] = PartsFile.create(path, found.files[name].size)
        made[name].compare(found.files[name].sha256)
    return made


def known_model(repo: str, file: str | None = None) -> Path | None:
    """A model of the hub, or GGUF file, that is here: whole, or begun in the folder that was used
    last."""
    with suppress(ConfigError):
        folder = _last_used(Repository(repo, "any").folder.parent)
        return cached_model(repo, "main", file) or (folder and begun(folder, file))
    return None


def begun(folder: Path, file: str | None) -> Path | None:
    """A checkpoint, or GGUF file, of which a folder has all files, if without tensors. Links to
    what was removed since do not count."""
    known = read_repository(folder)
    files = {} if known is None else known.files
    names = part_names(file) if file else [each for each in files if not is_gguf(each)]
    here = all(each in files and (folder / each).exists() for each in names)
    return folder / (names[0] if file else "") if names and here else None


def cached_file(repo: str, commit: str, name: str) -> str | None:
    """The path of a file that the cache of huggingface_hub holds whole, else None."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, name, revision=commit)
    return found if isinstance(found, str) else None


def cached_model(repo: str, revision: str, file: str | None = None) -> Path | None:
    """A model, or GGUF file, that the cache of huggingface_hub holds whole, None if it does not."""
    names = part_names(file) if file else ("config.json",)
    found = [cached_file(repo, revision, name) for name in names]
    if found[0] is None or None in found:
        return None
    path = Path(found[0])
    return path if file else path.parent if is_whole(path.parent) else None


def _last_used(root: Path) -> Path | None:
    records = [each for each in root.glob(f"*/{REPOSITORY}") if each.is_file()]
    latest = max(records, key=lambda each: each.stat().st_mtime_ns, default=None)
    return None if latest is None else latest.parent.parent


@contextmanager
def sole_fetcher(folder: Path) -> Iterator[None]:
    """Be the only process that changes a folder, after any other. The process is named in the file
    of the lock while it holds it: what one that was killed has left is compared with its hashes.
    Raises ModelError if the folder cannot be written."""
    path = folder / RECORDS / "lock"
    with ExitStack() as held, reported(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.parent.mkdir(exist_ok=True)
        if (lock := lock_file(path)) is None:
            holder = path.read_text() or "another process"
            log.warning("%s fetches into %s; waiting until it has ended", holder, folder)
            lock = lock_file(path, wait=True)
        assert lock is not None
        held.callback(os.close, lock)
        for each in filter(is_partial, folder.iterdir()) if path.stat().st_size else ():
            PartsFile(each).verify()
        os.truncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} of {socket.gethostname()}".encode(), 0)
        os.fsync(lock)  # so that a loss of power is noticed too, and `.parts` outlasts it
        held.callback(os.truncate, lock, 0)
        yield


@dataclass(frozen=True)
class CacheEntry:
    """A folder of the parts cache: of a `model` (a hub id, or the name of another host's folder),
    with its bytes on the disk, and those of its files (0: it was not finished). `current`:
    of the folders of its model it was used last."""

    folder: Path
    model: str
    commit: str
    disk_bytes: int
    whole_bytes: int
    current: bool


def entries() -> Iterator[CacheEntry]:
    """All folders of the parts cache. Raises ConfigError."""
    cache = parts_cache()
    for folder in sorted([*cache.glob("models--*/*/"), *cache.glob(f"{FOLDERS}--*/*/")]):
        found = read_repository(folder)
        model = "/".join(folder.parent.name.split("--")[1:])
        whole = 0 if found is None else sum(each.size for each in found.files.values())
        files = [each.lstat() for each in folder.rglob("*") if not each.is_symlink()]
        on_disk = 512 * sum(each.st_blocks for each in files)  # of a file with holes, those here
        current = folder == _last_used(folder.parent)
        yield CacheEntry(folder, model, folder.name, on_disk, whole, current)


def remove(entry: CacheEntry) -> None:
    """Remove a folder, once no process fetches into it. Ranks that have loaded weights from it go
    on. Raises ModelError."""
    with sole_fetcher(entry.folder):
        shutil.rmtree(entry.folder)
        if not any(entry.folder.parent.iterdir()):
            entry.folder.parent.rmdir()
