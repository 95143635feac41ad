"""Checkpoints without their tensors: what a host needs to make the folder of one.

That of a repository is fetched from the hub, that of a folder is made by the host that has it.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pipespec.engine.checkpoint.formats import gguf
from pipespec.engine.checkpoint.formats.gguf import is_gguf
from pipespec.engine.checkpoint.formats.gguf_file import header_ends
from pipespec.engine.checkpoint.formats.gguf_parts import part_names, parts_of
from pipespec.engine.checkpoint.safetensors_headers import (
    INDEX,
    WEIGHTS,
    header_length,
    read_index,
    weight_map,
)
from pipespec.engine.checkpoint_parts.hub_client import (
    MOST_FILE_BYTES,
    HubClient,
    HubFile,
    Revision,
)
from pipespec.engine.checkpoint_parts.parts_file import (
    RECORDS,
    PartsFile,
    cuts,
    is_partial,
    pieces,
    reported,
)
from pipespec.engine.checkpoint_parts.repository import (
    NUM_CONNECTIONS,
    Repository,
    cached_commit,
    cached_file,
    folder_of_checkpoint,
    is_begun,
    read_repository,
    write_repository,
)
from pipespec.errors import ModelError
from pipespec.system.atomic_write import write_atomically
from pipespec.system.validation import Unreadable, parse_json, read_bytes

SMALL_FILES = ("*.json", "*.model", "*.jinja", "*.txt")
# The first bytes of a GGUF file that are read; of a longer header, twice as many each time. Its
# first tensor is aligned, which takes fewer bytes than these.
GGUF_PREFIX, ALIGNING = 2**18, 2**10
_COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class Blueprint:
    """A checkpoint without its tensors.

    Attributes:
        file: the GGUF file; None: a safetensors checkpoint.
        small: the small files.
        headers: the first bytes of each weight file, at least up to its first tensor.
    """

    repository: Repository
    file: str | None
    small: Mapping[str, bytes]
    headers: Mapping[str, bytes]

    @property
    def path(self) -> Path:
        """Where the checkpoint is in the parts cache of this host, once `build` has made it. Raises
        ConfigError."""
        folder = self.repository.folder
        return folder if self.file is None else folder / self.file

    @classmethod
    def of(cls, path: Path, *, as_folder: bool = False) -> Blueprint:
        """That of a checkpoint here, which has all headers; see `repository_of`. Raises
        ModelError."""
        found = repository_of(path, as_folder=as_folder)
        headers = {name: _header(folder_of_checkpoint(path) / name) for name in found.weights}
        gguf_file = path.name if is_gguf(path) else None
        return cls(found, gguf_file, {} if gguf_file else _small_files(path), headers)

    @classmethod
    def of_hub(cls, client: HubClient, revision: Revision, file: str | None) -> Blueprint:
        """That of a commit on the hub, or of a GGUF `file` of it. Raises ModelError."""
        sizes = {name: each.size for name, each in revision.files.items()}
        names = [name for name in sizes if _is_small(name)]
        with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:  # a signal ends them soon
            try:
                read = client.read_file
                data = pool.map(lambda name: read(revision.commit, name, sizes[name]), names)
                small = dict(zip(names, data, strict=True))
                weights = part_names(file) if file else _weight_files(revision, small.get(INDEX))
                headers = pool.map(lambda name: _hub_header(client, revision, name), weights)
                found = dict(zip(weights, headers, strict=True))
            except BaseException as error:
                if not isinstance(error, ModelError):
                    client.stopped.set()
                raise
        files = {name: revision.files[name] for name in weights}
        return cls(Repository(revision.repo, revision.commit, None, files), file, small, found)

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
            raise ModelError(
                f"{found.repository.repo!r} is no folder of one checkpoint; look at that host"
            )
        return found

    def _has_own_folder(self) -> bool:
        """Whether `build` makes a folder that is no commit's of the hub, and nothing elsewhere.
        Raises TypeError, AttributeError: values are of other kinds."""
        found = self.repository
        files = [*self.small, *found.weights, *([] if self.file is None else [self.file])]
        return (
            all(each == os.path.basename(each) and each.strip(".") for each in files)
            and RECORDS not in files
            and "/" not in found.repo
            and isinstance(found.path, str)
            and _COMMIT.fullmatch(found.commit) is not None
            and self.headers.keys() == found.weights.keys()
            and all(len(self.headers[name]) <= each.size for name, each in found.weights.items())
        )

    def build(self) -> Path:
        """Make the folder in the parts cache of this host, unless it is there; the checkpoint's
        path. Raises ModelError."""
        found = self.repository
        folder = found.folder
        with reported(folder):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for name, data in self.small.items():
                if not (folder / name).exists():
                    write_atomically(folder / name, data)
            for name, header in self.headers.items():
                path = folder / name
                if path.is_symlink() and not path.exists():  # to a cache that has lost it
                    path.unlink(missing_ok=True)
                whole = cached_file(found.repo, found.commit, name) if found.on_hub else None
                if whole is not None and not path.exists():
                    os.symlink(os.path.realpath(whole), path)
                if not path.is_symlink():
                    PartsFile.create(path, found.weights[name].size, header)
        known = read_repository(folder)
        weights = {**({} if known is None else known.weights), **found.weights}
        write_repository(folder, replace(found, weights=weights))
        return self.path

    def as_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        encoded = {
            key: {name: base64.b64encode(data).decode() for name, data in files.items()}
            for key, files in (("small", self.small), ("headers", self.headers))
        }
        return {"repository": self.repository.as_json(), "file": self.file, **encoded}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Blueprint:
        """The inverse of `as_json`."""
        small, headers = (
            {name: base64.b64decode(text) for name, text in value[key].items()}
            for key in ("small", "headers")
        )
        return cls(Repository.from_json(value["repository"]), value["file"], small, headers)


def open_repository(client: HubClient, revision: Revision, file: str | None = None) -> Path:
    """The folder of a commit without its tensors, made unless it is there.

    Args:
        file: the GGUF file that is wanted; None: a safetensors checkpoint.

    Raises ModelError.
    """
    folder = Repository(revision.repo, revision.commit).folder
    known = read_repository(folder)
    if known is not None and is_begun(folder, file):
        write_repository(folder, known)
    else:
        Blueprint.of_hub(client, revision, file).build()
    return folder


def repository_of(path: Path, *, as_folder: bool = False) -> Repository:
    """What a checkpoint here is of: a commit on the hub, unless it is to be described `as_folder`,
    or this host's folder. No header is read. Raises ModelError if it lacks files, so that other
    hosts cannot get theirs from here."""
    files = _files_of(path)
    found = None if as_folder else cached_commit(folder_of_checkpoint(path))
    if found is None:  # its name for other hosts changes with the files
        stats = [(each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files]
        text = repr((str(path.absolute()), stats)).encode()
        name = folder_of_checkpoint(path).absolute().name
        commit = hashlib.sha256(text).hexdigest()[:40]
        found = Repository(name, commit, str(path.absolute()))
    sizes = {e.name: found.weights.get(e.name, HubFile(e.stat().st_size)) for e in files}
    return replace(found, weights=sizes)


def holdings(
    folder: Path, files: Collection[str]
) -> Iterable[tuple[str, list[tuple[int, int, str | None]]]]:
    """The pieces that are here, by weight file, with their hashes; None: that of a file that is
    here as a whole, which has no record. Raises ModelError."""
    for path in (folder / name for name in files):
        if is_partial(path):
            own = PartsFile(path)
            here = [each for each in own.pieces() if each in own.hashes]
            yield path.name, [(*each, own.hashes[each]) for each in here]
        elif path.is_file():
            yield path.name, [(*each, None) for each in pieces(cuts(path))]


def _is_small(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in SMALL_FILES)


def _small_files(folder: Path) -> dict[str, bytes]:
    found = {}
    for each in sorted(folder.iterdir()):
        if each.is_file() and _is_small(each.name):
            try:
                found[each.name] = read_bytes(each, most=MOST_FILE_BYTES)
            except Unreadable as error:
                raise ModelError(f"{each} cannot be read ({error})") from error
    return found


def _files_of(path: Path) -> list[Path]:
    """The weight files of a checkpoint here. Raises ModelError if it lacks one."""
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
    begin = pieces(cuts(file))[0][1]
    with file.open("rb") as stream:
        return stream.read(begin)


# --- repositories of the hub ----------------------------------------------------------------------


def _weight_files(revision: Revision, index: bytes | None) -> list[str]:
    """The safetensors files of a checkpoint. Raises ModelError."""
    if "config.json" not in revision.files:
        raise ModelError(
            f"{revision.repo} holds no config.json; name a checkpoint of Transformers, or one of "
            f"its GGUF files as {revision.repo}/FILE.gguf"
        )
    # As Transformers: one file goes before an index.
    if WEIGHTS in revision.files:
        return [WEIGHTS]
    if index is None:
        raise ModelError(
            f"{revision.repo} holds neither {WEIGHTS} nor {INDEX}; only safetensors checkpoints "
            "can be loaded, so take another, or convert it with save_pretrained"
        )
    try:
        content = parse_json(index)
    except Unreadable as error:
        raise ModelError(f"{INDEX} of {revision.repo} cannot be read ({error})") from error
    names = sorted(set(weight_map(Path(revision.repo) / INDEX, content).values()))
    absent = [name for name in names if name not in revision.files]
    if absent:
        raise ModelError(
            f"{INDEX} of {revision.repo} names {absent[0]}, which the repository does not hold; "
            "take another checkpoint"
        )
    return names


def _hub_header(client: HubClient, revision: Revision, name: str) -> bytes:
    """The first bytes of a weight file, with its whole header. Raises ModelError."""
    cached = cached_file(revision.repo, revision.commit, name)
    if cached is not None:
        return _header(Path(cached))
    path, size = Path(revision.repo, name), revision.files[name].size

    def read(start: int, stop: int) -> bytes:
        return b"".join(client.read(revision.commit, name, (start, min(stop, size)), size))

    return (_gguf_header if is_gguf(path) else _safetensors_header)(path, size, read)


def _safetensors_header(path: Path, size: int, read: Callable[[int, int], bytes]) -> bytes:
    prefix = read(0, 8)
    return prefix + read(8, 8 + header_length(path, prefix, size))


def _gguf_header(path: Path, size: int, read: Callable[[int, int], bytes]) -> bytes:
    block_sizes, prefix = gguf.block_sizes(path), read(0, GGUF_PREFIX)
    while len(prefix) < size and not header_ends(path, prefix[:-ALIGNING], size, block_sizes):
        prefix += read(len(prefix), 2 * len(prefix))
    return prefix
