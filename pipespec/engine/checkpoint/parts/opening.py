"""What a checkpoint consists of, and folders of the parts cache that have its small files and the
headers of its weight files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

from pipespec.engine.checkpoint.parts.fetching import fetch_all
from pipespec.engine.checkpoint.parts.folder import (
    Repository,
    StoredFile,
    cached_commit,
    folder_of_checkpoint,
    is_begun,
    make_files,
    read_repository,
    sole_fetcher,
    write_repository,
)
from pipespec.engine.checkpoint.parts.parts_file import PartsFile, reported
from pipespec.engine.checkpoint.parts.range_source import RangeSource
from pipespec.engine.formats.gguf import GgufFiles, is_gguf
from pipespec.engine.formats.gguf_file import header_ends, part_names
from pipespec.engine.formats.safetensors_folder import SafetensorsFolder
from pipespec.engine.formats.safetensors_headers import (
    CONFIG,
    INDEX,
    WEIGHTS,
    header_length,
    stored_index,
)
from pipespec.errors import ModelError

SMALL_FILES = ("*.json", "*.model", "*.jinja", "*.txt")
MOST_FILE_BYTES = 64 * 2**20  # of one of them, such as a tokenizer


def open_repository(source: RangeSource, found: Repository, file: str | None = None) -> Path:
    """The folder of a repository with the small files and headers of a checkpoint, which are
    fetched unless they are there. Raises ModelError.

    Args:
        found: with all files of the repository.
        file: the GGUF file that is wanted; None: a safetensors checkpoint.
    """
    folder = found.folder
    if is_begun(folder, file) and (known := read_repository(folder)) is not None:
        write_repository(known)
        return folder
    small = [] if file else _small_files(found)
    with reported(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with sole_fetcher(folder):
        files = make_files(found, small).values()
        fetch_all(source, {each: each.absent() for each in files})
        weights = part_names(file) if file else _weight_files(found)
        files = make_files(found, weights).values()
        while lacking := {each: rest for each in files if (rest := _rest_of_header(each))}:
            fetch_all(source, lacking)
        write_repository(replace(found, files={e: found.files[e] for e in (*small, *weights)}))
    return folder


def repository_of(path: Path, *, as_folder: bool = False) -> Repository:
    """What a checkpoint here is of: a commit on the hub, unless it is to be described `as_folder`,
    or this host's folder. No header is read. Raises ModelError if it lacks files, so that other
    hosts cannot get theirs from here."""
    folder = folder_of_checkpoint(path)
    files = (GgufFiles if is_gguf(path) else SafetensorsFolder)(path).weight_files()
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise ModelError(
            f"{path} lacks {absent[0]}, so other hosts cannot get their layers from here; copy it "
            "there, or give each host its files"
        )
    small = [] if is_gguf(path) else [e for e in sorted(folder.iterdir()) if _is_small(e.name)]
    found = None if as_folder else cached_commit(folder)
    if found is None:  # its name for other hosts changes with the files
        stats = [(each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files]
        text = repr((str(path.absolute()), stats)).encode()
        commit = hashlib.sha256(text).hexdigest()[:40]
        found = Repository(folder.absolute().name, commit, str(path.absolute()))
    here = filter(Path.is_file, (*small, *files))
    sizes = {e.name: found.files.get(e.name, StoredFile(e.stat().st_size)) for e in here}
    return replace(found, files=sizes)


def _is_small(name: str) -> bool:
    return any(fnmatch(name, each) for each in SMALL_FILES)


def _small_files(found: Repository) -> list[str]:
    """Those of a safetensors checkpoint. Raises ModelError."""
    if CONFIG not in found.files:
        raise ModelError(
            f"{found.repo} holds no {CONFIG}; name a checkpoint of Transformers, or one of its "
            f"GGUF files as {found.repo}/FILE.gguf"
        )
    names = list(filter(_is_small, found.files))
    for name in names:
        if (size := found.files[name].size) > MOST_FILE_BYTES:
            raise ModelError(
                f"{name} of {found.repo} has {size} bytes, where at most {MOST_FILE_BYTES} are "
                "expected; take another checkpoint"
            )
    return names


def _weight_files(found: Repository) -> Iterable[str]:
    """The safetensors files of a checkpoint whose index is here. Raises ModelError."""
    # As Transformers: one file goes before an index.
    if WEIGHTS in found.files:
        return [WEIGHTS]
    if INDEX not in found.files:
        raise ModelError(
            f"{found.repo} holds neither {WEIGHTS} nor {INDEX}; only safetensors checkpoints can "
            "be loaded, so take another, or convert it with save_pretrained"
        )
    names = sorted(set((stored_index(found.folder) or {}).values()))
    absent = [name for name in names if name not in found.files]
    if absent:
        raise ModelError(
            f"{INDEX} of {found.repo} names {absent[0]}, which the repository does not hold; take "
            "another checkpoint"
        )
    return names


def _rest_of_header(file: PartsFile) -> list[int]:
    """The next blocks of the header of a file that are not here; none: all are. Raises
    ModelError."""
    if first := file.absent([(0, min(1, file.size))]):
        return first
    with reported(file.path), file.path.open("rb") as stream:
        prefix = stream.read(8)
        if not is_gguf(file.path):
            return file.absent([(0, 8 + header_length(file.path, prefix, file.size))])
        stop = file.place(0)[1]
        while not (rest := file.absent([(0, min(stop, file.size))])):
            prefix += stream.read(stop - len(prefix))
            if len(prefix) == file.size or header_ends(file.path, prefix, file.size):
                break
            stop *= 2
    return rest
