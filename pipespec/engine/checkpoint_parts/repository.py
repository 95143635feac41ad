"""Folders of the parts cache: one for each commit of a repository.

    ~/.cache/pipespec/parts/models--ORG--NAME/refs/main          the commit that was used last
    ~/.cache/pipespec/parts/models--ORG--NAME/COMMIT/            a model folder
    ~/.cache/pipespec/parts/folders--NAME/HASH/                  one that came from another host's
        config.json, tokenizer.json, ...                         small files, whole
        model-00001-of-00004.safetensors, ...                    weight files (`parts_file`)
        .parts/repository.json                                   `Repository`
        .parts/model-00001-of-00004.safetensors.log              the record of a weight file

`open_repository` makes the folder *without tensors*: small files, and of each weight file its size
and header. A weight file that the cache of huggingface_hub holds whole is a link to it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pipespec.engine.checkpoint.formats import gguf
from pipespec.engine.checkpoint.formats.gguf_file import header_ends
from pipespec.engine.checkpoint.formats.gguf_parts import part_names
from pipespec.engine.checkpoint.safetensors_headers import (
    INDEX,
    WEIGHTS,
    header_length,
    tensor_ranges,
    weight_map,
)
from pipespec.engine.checkpoint_parts.hub_client import HubClient, HubFile, Revision
from pipespec.engine.checkpoint_parts.parts_file import RECORDS, PartsFile, reported
from pipespec.engine.checkpoint_parts.ranges import Range
from pipespec.errors import ConfigError, ModelError
from pipespec.system.atomic_write import write_atomically
from pipespec.system.folders import cache_folder
from pipespec.system.validation import Unreadable, parse_json, read_json, read_text

SMALL_FILES = ("*.json", "*.model", "*.jinja", "*.txt")
MAIN = "main"
FOLDERS = "folders"
NUM_CONNECTIONS = 8
# The first bytes of a GGUF file that are read; of a longer header, twice as many each time.
GGUF_PREFIX = 2**18
_RECORD = "repository.json"


@dataclass(frozen=True)
class Repository:
    """The commit of a repository whose folder this is, and its weight files.

    Not `on_hub`: a folder of another host, by its name and a hash, which is at `path` there.
    """

    repo: str
    commit: str
    weights: Mapping[str, HubFile]
    on_hub: bool = True
    path: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Repository:
        """The inverse of `as_json`. Raises KeyError, TypeError, AttributeError."""
        files = {name: HubFile(**each) for name, each in value["weights"].items()}
        return cls(value["repo"], value["commit"], files, value["on_hub"], value.get("path"))


@dataclass(frozen=True)
class SharedName:
    """What any host calls a checkpoint.

    Attributes:
        name: of its folder in the parts cache, relative to that.
        file: its GGUF file.
        on_hub: whether `name` is that of a commit on the hub.
        path: of the checkpoint on the host that has it, if it is a folder or file of a host.
    """

    name: str
    file: str | None
    on_hub: bool
    path: str | None = None


def parts_cache() -> Path:
    """The folder of all repositories. Raises ConfigError."""
    return cache_folder() / "parts"


def folder_of(repo: str, commit: str) -> Path:
    """The folder of a commit. Raises ConfigError."""
    return parts_cache() / name_of(repo) / commit


def record_of_folder(folder: Path) -> Path:
    """The file that says what a folder is of."""
    return folder / RECORDS / _RECORD


def name_of(repo: str, *, on_hub: bool = True) -> str:
    """The name of a repository's folder, as huggingface_hub has it; that of another host's folder
    is never the same."""
    return "--".join(("models" if on_hub else FOLDERS, *repo.split("/")))


def read_repository(folder: Path) -> Repository | None:
    """What a folder of the parts cache is of; None: it is another folder, or not finished."""
    try:
        return Repository.from_json(read_json(record_of_folder(folder)))
    except (Unreadable, KeyError, TypeError, AttributeError):
        return None


def write_repository(folder: Path, found: Repository) -> None:
    """Mark a folder as finished but for tensors. Raises ModelError."""
    with reported(folder):
        (folder / RECORDS).mkdir(exist_ok=True)
        write_atomically(record_of_folder(folder), json.dumps(found.as_json()).encode())


def cached_commit(folder: Path) -> Repository | None:
    """What a folder of the parts cache, or of the cache of huggingface_hub, is of; None: it is
    another folder."""
    found = read_repository(folder)
    if found is not None:
        return found
    snapshots = folder.absolute().parent
    root = snapshots.parent
    if snapshots.name != "snapshots" or not root.name.startswith("models--"):
        return None
    from huggingface_hub import constants  # takes its time, so not for other folders

    if root.parent != Path(constants.HF_HUB_CACHE).absolute():
        return None
    return Repository("/".join(root.name.split("--")[1:]), folder.name, {})


def known_commit(repo: str) -> str | None:
    """The commit that was used last, None if there is none whose folder is finished."""
    try:
        root = parts_cache() / name_of(repo)
        commit = read_text(root / "refs" / MAIN).strip()
        return commit if read_repository(root / commit) is not None else None
    except (ConfigError, Unreadable):
        return None


def ranges_of(file: Path) -> Mapping[str, Range]:
    """Where each tensor of a weight file is, by its name in the file. Raises ModelError."""
    return gguf.tensor_ranges(file) if gguf.is_gguf(file) else tensor_ranges(file)


def open_repository(client: HubClient, revision: Revision, file: str | None = None) -> Path:
    """The folder of a commit without its tensors, made unless it is there.

    Args:
        file: the GGUF file that is wanted; None: a safetensors checkpoint.

    Raises ModelError.
    """
    folder = folder_of(revision.repo, revision.commit)
    known = read_repository(folder)
    if not is_begun(folder, known, file):
        with reported(folder):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _fetch_small_files(client, revision, folder)
        names = list(part_names(file)) if file is not None else _weight_files(revision, folder)
        _at_once(client, lambda name: _begin(client, revision, folder, name), names)
        weights = {} if known is None else dict(known.weights)
        weights |= {name: revision.files[name] for name in names}
        write_repository(folder, Repository(revision.repo, revision.commit, weights))
    remember(revision.repo, revision.commit)
    return folder


def is_begun(folder: Path, known: Repository | None, file: str | None) -> bool:
    """Whether a folder has the weight files of a checkpoint, or a GGUF file, if without tensors.
    Links to what was removed since do not count."""
    if known is None:
        return False
    names = [name for name in known.weights if not gguf.is_gguf(Path(name))]
    wanted = names if file is None else part_names(file)
    return bool(wanted) and all(
        name in known.weights and (folder / name).exists() for name in wanted
    )


def remember(repo: str, commit: str) -> None:
    """Make a commit the one that is used while the hub cannot be reached. Raises ModelError."""
    refs = parts_cache() / name_of(repo) / "refs"
    with reported(refs):
        refs.mkdir(exist_ok=True)
        write_atomically(refs / MAIN, commit.encode())


def _fetch_small_files(client: HubClient, revision: Revision, folder: Path) -> None:
    names = [
        name
        for name in revision.files
        if any(fnmatch(name, pattern) for pattern in SMALL_FILES) and not (folder / name).exists()
    ]

    def fetch(name: str) -> None:
        data = client.read_file(revision.commit, name, revision.files[name].size)
        with reported(folder):
            write_atomically(folder / name, data)

    _at_once(client, fetch, names)


def _at_once(client: HubClient, fetch: Callable[[str], object], names: Sequence[str]) -> None:
    """Fetch files over several connections. A signal ends them soon."""
    with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
        try:
            list(pool.map(fetch, names))
        except BaseException as error:
            if not isinstance(error, ModelError):
                client.stopped.set()
            raise


def _weight_files(revision: Revision, folder: Path) -> list[str]:
    """The safetensors files of a checkpoint. Raises ModelError."""
    if "config.json" not in revision.files:
        raise ModelError(
            f"{revision.repo} holds no config.json; name a checkpoint of Transformers, or one of "
            f"its GGUF files as {revision.repo}/FILE.gguf"
        )
    # As Transformers: one file goes before an index.
    if WEIGHTS in revision.files:
        return [WEIGHTS]
    if INDEX not in revision.files:
        raise ModelError(
            f"{revision.repo} holds neither {WEIGHTS} nor {INDEX}; only safetensors checkpoints "
            "can be loaded, so take another, or convert it with save_pretrained"
        )
    try:
        index = parse_json((folder / INDEX).read_bytes())
    except Unreadable as error:
        raise ModelError(f"{INDEX} of {revision.repo} cannot be read ({error})") from error
    names = sorted(set(weight_map(folder / INDEX, index).values()))
    absent = [name for name in names if name not in revision.files]
    if absent:
        raise ModelError(
            f"{INDEX} of {revision.repo} names {absent[0]}, which the repository does not hold; "
            "take another checkpoint"
        )
    return names


def _begin(client: HubClient, revision: Revision, folder: Path, name: str) -> None:
    """Make a weight file without its tensors."""
    path = folder / name
    unlink_if_dangling(path)
    cached = cached_file(revision.repo, revision.commit, name)
    if cached is not None and not path.exists():
        with reported(path):
            os.symlink(os.path.realpath(cached), path)
    if not path.is_symlink():
        size = revision.files[name].size
        header = _gguf_header if gguf.is_gguf(path) else _safetensors_header
        read: Callable[[int, int], bytes] = lambda start, stop: b"".join(  # noqa: E731
            client.read(revision.commit, name, (start, stop), size)
        )
        PartsFile.create(path, size, header(path, size, read))


def unlink_if_dangling(path: Path) -> None:
    """Remove a link to a file of another cache that is no longer there. Raises ModelError."""
    if path.is_symlink() and not path.exists():
        with reported(path):
            path.unlink(missing_ok=True)


def cached_file(repo: str, commit: str, name: str) -> str | None:
    """The path of a file that the cache of huggingface_hub holds whole, where it has its name, else
    None."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, name, revision=commit)
    return found if isinstance(found, str) else None


def _safetensors_header(path: Path, size: int, read: Callable[[int, int], bytes]) -> bytes:
    prefix = read(0, min(8, size))
    length = header_length(path, prefix, size)
    return prefix + read(8, 8 + length)


def _gguf_header(path: Path, size: int, read: Callable[[int, int], bytes]) -> bytes:
    block_sizes = gguf.block_sizes(path)
    prefix, wanted = b"", min(GGUF_PREFIX, size)
    while True:
        prefix += read(len(prefix), wanted)
        if header_ends(path, prefix, size, block_sizes):
            return prefix
        wanted = min(2 * wanted, size)
