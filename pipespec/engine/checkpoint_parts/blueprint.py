"""What a host needs to make the folder of a checkpoint without its tensors."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pipespec.engine.checkpoint.formats.gguf import is_gguf
from pipespec.engine.checkpoint.formats.gguf_parts import parts_of
from pipespec.engine.checkpoint.safetensors_headers import WEIGHTS, read_index
from pipespec.engine.checkpoint_parts.hub_client import MOST_FILE_BYTES, HubFile
from pipespec.engine.checkpoint_parts.parts_file import RECORDS, PartsFile, is_partial, reported
from pipespec.engine.checkpoint_parts.repository import (
    SMALL_FILES,
    Repository,
    SharedName,
    cached_commit,
    name_of,
    parts_cache,
    ranges_of,
    read_repository,
    remember,
    unlink_if_dangling,
    write_repository,
)
from pipespec.errors import ModelError
from pipespec.system.atomic_write import write_atomically
from pipespec.system.validation import Unreadable, read_bytes

_COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class Blueprint:
    """A checkpoint without its tensors.

    Attributes:
        name: of its folder in the parts cache of any host, relative to it.
        file: the GGUF file; None: a safetensors checkpoint.
        repository: its commit on the hub, or a name that stands for a folder of another host.
        small: the small files.
        headers: the first bytes of each weight file, up to its first tensor.
    """

    name: str
    file: str | None
    repository: Repository
    small: Mapping[str, bytes]
    headers: Mapping[str, bytes]

    @property
    def shared(self) -> SharedName:
        """What any host calls the checkpoint."""
        return shared_name(self.repository, self.file)

    @property
    def path(self) -> Path:
        """Where the checkpoint is in the parts cache of this host, once `build` has made it. Raises
        ConfigError."""
        folder = parts_cache() / self.name
        return folder if self.file is None else folder / _plain(self.file)

    @classmethod
    def of(cls, path: Path, *, as_folder: bool = False) -> Blueprint:
        """That of a checkpoint here, which has all headers; see `repository_of`. Raises
        ModelError."""
        repository = repository_of(path, as_folder=as_folder)
        headers = {name: _header(folder_of_checkpoint(path) / name) for name in repository.weights}
        small = {} if is_gguf(path) else _small_files(path)
        file = path.name if is_gguf(path) else None
        return cls(folder_name(repository), file, repository, small, headers)

    @classmethod
    def of_other_host(cls, value: Any) -> Blueprint:
        """That of a folder of another host, as JSON, which is built in a folder of its own and
        never in one of the hub. Raises ModelError if it would not be."""
        try:
            found = cls.from_json(value)
            safe = found._has_own_folder()
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ModelError(
                f"what it says about its checkpoint is of no use ({type(error).__name__}); look at "
                "pipespec on that host"
            ) from error
        if not safe:
            raise ModelError(f"{found.name!r} is no folder of one checkpoint; look at that host")
        return found

    def _has_own_folder(self) -> bool:
        """Whether `build` makes a folder that is no commit's of the hub, and nothing elsewhere.
        Raises TypeError, AttributeError: values are of other kinds."""
        found = self.repository
        files = [*self.small, *found.weights, *([] if self.file is None else [self.file])]
        return (
            all(each == os.path.basename(each) and each.strip(".") for each in files)
            and RECORDS not in files
            and not found.on_hub
            and "/" not in found.repo
            and isinstance(found.path, str)
            and self.name == folder_name(found)
            and _COMMIT.fullmatch(found.commit) is not None
            and self.headers.keys() == found.weights.keys()
            and all(len(self.headers[name]) <= each.size for name, each in found.weights.items())
        )

    def build(self) -> Path:
        """Make the folder in the parts cache of this host, unless it is there; the checkpoint's
        path. Raises ModelError."""
        folder = parts_cache() / self.name
        with reported(folder):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, data in self.small.items():
            if not (folder / _plain(name)).exists():
                with reported(folder):
                    write_atomically(folder / name, data)
        for name, header in self.headers.items():
            unlink_if_dangling(folder / _plain(name))
            if not (folder / name).is_symlink():
                PartsFile.create(folder / name, self.repository.weights[name].size, header)
        known = read_repository(folder)
        weights = {**({} if known is None else known.weights), **self.repository.weights}
        write_repository(folder, replace(self.repository, weights=weights))
        if self.repository.on_hub:
            remember(self.repository.repo, self.repository.commit)
        return self.path

    def as_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {
            "name": self.name,
            "file": self.file,
            "repository": self.repository.as_json(),
            "small": {name: _text(data) for name, data in self.small.items()},
            "headers": {name: _text(data) for name, data in self.headers.items()},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Blueprint:
        """The inverse of `as_json`."""
        return cls(
            value["name"],
            value["file"],
            Repository.from_json(value["repository"]),
            {name: base64.b64decode(text) for name, text in value["small"].items()},
            {name: base64.b64decode(text) for name, text in value["headers"].items()},
        )


def folder_of_checkpoint(path: Path) -> Path:
    """The folder of a checkpoint, which is `path` unless that is a GGUF file."""
    return path.parent if is_gguf(path) else path


def shared_name(repository: Repository, file: str | None) -> SharedName:
    """What any host calls a checkpoint, or a GGUF file of it."""
    name = folder_name(repository)
    return SharedName(name, file, repository.on_hub, repository.path)


def folder_name(repository: Repository) -> str:
    """The name of a checkpoint's folder in the parts cache of any host."""
    return f"{name_of(repository.repo, on_hub=repository.on_hub)}/{repository.commit}"


def repository_of(path: Path, *, as_folder: bool = False) -> Repository:
    """What a checkpoint here is of: a commit on the hub, unless it is to be described `as_folder`,
    or this host's folder. No header is read. Raises ModelError if it lacks files, so that other
    hosts cannot get theirs from here."""
    files = _weight_files(path)
    known = None if as_folder else cached_commit(folder_of_checkpoint(path))
    found = _of_folder(path, files) if known is None else known
    weights = {
        each.name: found.weights.get(each.name, HubFile(each.stat().st_size)) for each in files
    }
    return replace(found, weights=weights)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _plain(name: str) -> str:
    """The name of a file, which must not lead out of its folder."""
    assert name not in ("", ".", "..") and os.sep not in name, name
    return name


def _weight_files(path: Path) -> list[Path]:
    if is_gguf(path):
        return list(parts_of(path))
    shard_of = read_index(path)
    if shard_of is None or os.path.isfile(path / WEIGHTS):
        return [path / WEIGHTS]
    files = [path / name for name in sorted(set(shard_of.values()))]
    absent = [file for file in files if not os.path.isfile(file)]
    if absent:
        raise ModelError(
            f"{path} lacks {absent[0].name}, so other hosts cannot get their layers from here; "
            "copy it there, or give each host its files"
        )
    return files


def _header(file: Path) -> bytes:
    """The bytes of a weight file before its first tensor. Raises ModelError."""
    ranges = ranges_of(file)
    begin = min((start for start, _ in ranges.values()), default=file.stat().st_size)
    with file.open("rb") as stream:
        return stream.read(begin)


def _small_files(folder: Path) -> dict[str, bytes]:
    found = {}
    for each in sorted(folder.iterdir()):
        if each.is_file() and any(fnmatch(each.name, pattern) for pattern in SMALL_FILES):
            try:
                found[each.name] = read_bytes(each, most=MOST_FILE_BYTES)
            except Unreadable as error:
                raise ModelError(f"{each} cannot be read ({error})") from error
    return found


def _of_folder(path: Path, files: list[Path]) -> Repository:
    """The name of a local checkpoint for other hosts: it changes with the files."""
    stats = [(each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files]
    text = repr((str(path.absolute()), stats)).encode()
    folder = folder_of_checkpoint(path)
    commit = hashlib.sha256(text).hexdigest()[:40]
    return Repository(folder.absolute().name, commit, {}, False, str(path.absolute()))


def holdings(folder: Path, files: Collection[str]) -> dict[str, dict[str, str | None]]:
    """The tensors that are here, by weight file, with their hashes; None: that of a file that is
    here as a whole, which has no record. Raises ModelError."""
    found: dict[str, dict[str, str | None]] = {}
    for name in files:
        path = folder / name
        if is_partial(path):
            found[name] = {tensor: sha for tensor, sha in PartsFile(path).hashes.items() if tensor}
        elif path.is_file():
            found[name] = dict.fromkeys(ranges_of(path))
    return found
