"""Checkpoints without their tensors: what a host needs to make the folder of one.

That of a repository is fetched from the hub, that of a folder is made by the host that has it.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pipespec.engine.checkpoint.parts.folder import (
    Repository,
    StoredFile,
    cached_commit,
    cached_file,
    folder_of_checkpoint,
    is_begun,
    read_repository,
    write_repository,
)
from pipespec.engine.checkpoint.parts.parts_file import RECORDS, PartsFile, reported
from pipespec.engine.checkpoint.parts.range_source import COMMIT, HubSource
from pipespec.engine.formats.gguf import GgufFiles, is_gguf
from pipespec.engine.formats.gguf_file import header_ends
from pipespec.engine.formats.gguf_parts import part_names
from pipespec.engine.formats.safetensors_folder import SafetensorsFolder
from pipespec.engine.formats.safetensors_headers import (
    CONFIG,
    INDEX,
    WEIGHTS,
    header_length,
    weight_map,
)
from pipespec.errors import ModelError
from pipespec.system.atomic_write import write_atomically
from pipespec.system.validation import Unreadable, parse_json

SMALL_FILES = ("*.json", "*.model", "*.jinja", "*.txt")
# Of one of them, such as a tokenizer; and those that are read at once.
MOST_FILE_BYTES, AT_ONCE = 64 * 2**20, 8
# The first bytes of a GGUF file that are read; of a longer header, twice as many each time. Its
# first tensor is aligned, which takes fewer bytes than these.
GGUF_PREFIX, ALIGNING = 2**18, 2**10


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

    @classmethod
    def of(cls, path: Path, *, as_folder: bool = False) -> Blueprint:
        """That of a checkpoint here, which has all headers; see `repository_of`. Raises
        ModelError."""
        found, folder = repository_of(path, as_folder=as_folder), folder_of_checkpoint(path)

        def read(name: str, start: int, stop: int) -> bytes:
            try:
                with (folder / name).open("rb") as stream:
                    stream.seek(start)
                    return stream.read(stop - start)
            except OSError as error:
                raise ModelError(f"{folder / name} cannot be read ({error.strerror})") from error

        here = [each for each in sorted(folder.iterdir()) if each.is_file()]
        files = {each.name: StoredFile(each.stat().st_size) for each in here} | dict(found.weights)
        return cls._read(replace(found, weights=files), path.name if folder != path else None, read)

    @classmethod
    def of_hub(cls, source: HubSource, found: Repository, file: str | None) -> Blueprint:
        """That of a commit on the hub with all its files, or of a GGUF `file` of it. Raises
        ModelError."""

        def read(name: str, start: int, stop: int) -> bytes:
            return b"".join(source.read(name, (start, stop), found.weights[name].size))

        try:
            return cls._read(found, file, read)
        except BaseException:
            source.stopped.set()  # a signal ends the threads soon
            raise

    @classmethod
    def _read(
        cls, found: Repository, file: str | None, read: Callable[[str, int, int], bytes]
    ) -> Blueprint:
        """`found` has all files of the folder."""
        files = found.weights

        def whole(name: str) -> bytes:
            if (size := files[name].size) > MOST_FILE_BYTES:
                raise ModelError(
                    f"{name} of {found.repo} has {size} bytes, where at most {MOST_FILE_BYTES} "
                    "are expected; take another checkpoint"
                )
            return read(name, 0, size)

        def header(name: str) -> bytes:
            path, size = Path(found.repo, name), files[name].size
            return _header(path, size, lambda start, stop: read(name, start, min(stop, size)))

        names = [] if file else [e for e in files if any(fnmatch(e, each) for each in SMALL_FILES)]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            small = dict(zip(names, pool.map(whole, names), strict=True))
            weights = part_names(file) if file else _weight_files(found, small.get(INDEX))
            headers = dict(zip(weights, pool.map(header, weights), strict=True))
        return cls(replace(found, weights={e: files[e] for e in weights}), file, small, headers)

    @classmethod
    def of_other_host(cls, value: Any, host: str) -> Blueprint:
        """That of a folder of another host, as JSON, which is built in a folder of its own and
        never in one of the hub, nor elsewhere. Raises ModelError if it would not be."""
        try:
            found = cls.from_json(value)
            of, headers = found.repository, found.headers
            files = [*found.small, *headers, *filter(None, [found.file])]
            safe = (
                all(each == os.path.basename(each) and each.strip(".") for each in files)
                and RECORDS not in files
                and "/" not in of.repo
                and isinstance(of.path, str)
                and COMMIT.fullmatch(of.commit) is not None
                and headers.keys() == of.weights.keys()
                and all(len(headers[name]) <= each.size for name, each in of.weights.items())
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ModelError(
                f"{host}: what it says about its checkpoint is of no use ({type(error).__name__}); "
                "look at pipespec there"
            ) from error
        if not safe:
            raise ModelError(f"{host}: {of.repo!r} is no folder of one checkpoint; look there")
        return found

    def build(self) -> Path:
        """Make the folder in the parts cache of this host, unless it is there; the checkpoint's
        path. Raises ModelError."""
        found, folder = self.repository, self.repository.folder
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
        return folder / (self.file or "")

    def as_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        encoded = {
            key: {name: base64.b64encode(data).decode() for name, data in files.items()}
            for key, files in (("small", self.small), ("headers", self.headers))
        }
        return {"repository": self.repository.as_json(), "file": self.file, **encoded}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Blueprint:
        """The inverse of `as_json`. Raises KeyError, TypeError, AttributeError, ValueError."""
        small, headers = (
            {name: base64.b64decode(text) for name, text in value[key].items()}
            for key in ("small", "headers")
        )
        return cls(Repository.from_json(value["repository"]), value["file"], small, headers)


def open_repository(source: HubSource, found: Repository, file: str | None = None) -> Path:
    """The folder without its tensors of a commit with all its files, made unless it is there.
    `file`: the GGUF file that is wanted; None: a safetensors checkpoint. Raises ModelError."""
    known = read_repository(found.folder)
    if known is not None and is_begun(found.folder, file):
        write_repository(found.folder, known)
    else:
        Blueprint.of_hub(source, found, file).build()
    return found.folder


def repository_of(path: Path, *, as_folder: bool = False) -> Repository:
    """What a checkpoint here is of: a commit on the hub, unless it is to be described `as_folder`,
    or this host's folder. No header is read. Raises ModelError if it lacks files, so that other
    hosts cannot get theirs from here."""
    files = (GgufFiles if is_gguf(path) else SafetensorsFolder)(path).weight_files()
    folder = folder_of_checkpoint(path)
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise ModelError(
            f"{path} lacks {absent[0]}, so other hosts cannot get their layers from here; copy it "
            "there, or give each host its files"
        )
    found = None if as_folder else cached_commit(folder)
    if found is None:  # its name for other hosts changes with the files
        stats = [(each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files]
        text = repr((str(path.absolute()), stats)).encode()
        commit = hashlib.sha256(text).hexdigest()[:40]
        found = Repository(folder.absolute().name, commit, str(path.absolute()))
    sizes = {e.name: found.weights.get(e.name, StoredFile(e.stat().st_size)) for e in files}
    return replace(found, weights=sizes)


def _weight_files(found: Repository, index: bytes | None) -> list[str]:
    """The safetensors files of a checkpoint on the hub. Raises ModelError."""
    files = found.weights
    if CONFIG not in files:
        raise ModelError(
            f"{found.repo} holds no {CONFIG}; name a checkpoint of Transformers, or one of its "
            f"GGUF files as {found.repo}/FILE.gguf"
        )
    # As Transformers: one file goes before an index.
    if WEIGHTS in files:
        return [WEIGHTS]
    if index is None:
        raise ModelError(
            f"{found.repo} holds neither {WEIGHTS} nor {INDEX}; only safetensors checkpoints can "
            "be loaded, so take another, or convert it with save_pretrained"
        )
    try:
        content = parse_json(index)
    except Unreadable as error:
        raise ModelError(f"{INDEX} of {found.repo} cannot be read ({error})") from error
    names = sorted(set(weight_map(Path(found.repo) / INDEX, content).values()))
    absent = [name for name in names if name not in files]
    if absent:
        raise ModelError(
            f"{INDEX} of {found.repo} names {absent[0]}, which the repository does not hold; take "
            "another checkpoint"
        )
    return names


def _header(path: Path, size: int, read: Callable[[int, int], bytes]) -> bytes:
    """The first bytes of a weight file, with its whole header. Raises ModelError."""
    if not is_gguf(path):
        prefix = read(0, 8)
        return prefix + read(8, 8 + header_length(path, prefix, size))
    prefix = read(0, GGUF_PREFIX)
    while len(prefix) < size and not header_ends(path, prefix[:-ALIGNING], size):
        prefix += read(len(prefix), 2 * len(prefix))
    return prefix
