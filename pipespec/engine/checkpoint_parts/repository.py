"""Folders of the parts cache: one for each commit of a repository.

    ~/.cache/pipespec/parts/models--ORG--NAME/refs/main          the commit that was used last
    ~/.cache/pipespec/parts/models--ORG--NAME/COMMIT/            a model folder
    ~/.cache/pipespec/parts/folders--NAME/HASH/                  one that came from another host's
        config.json, tokenizer.json, ...                         small files, whole
        model-00001-of-00004.safetensors, ...                    weight files (`parts_file`)
        .parts/repository.json                                   `Repository`
        .parts/model-00001-of-00004.safetensors.log              the record of a weight file

`blueprint` makes them without tensors: small files, and of each weight file its size and header. A
weight file that the cache of huggingface_hub holds whole is a link to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipespec.engine.checkpoint.formats.gguf import is_gguf
from pipespec.engine.checkpoint.formats.gguf_parts import part_names
from pipespec.engine.checkpoint_parts.hub_client import HubFile
from pipespec.engine.checkpoint_parts.parts_file import RECORDS, reported
from pipespec.errors import ConfigError
from pipespec.system.atomic_write import write_atomically
from pipespec.system.folders import cache_folder
from pipespec.system.validation import Unreadable, read_json, read_text

MAIN = "main"
FOLDERS = "folders"
NUM_CONNECTIONS = 8


@dataclass(frozen=True)
class Repository:
    """What any host calls a checkpoint: a commit on the hub, or a folder of a host.

    Attributes:
        repo, commit: on the hub; of a host's folder its name, and a hash that changes with it.
        path: of the checkpoint on the host that has it; None: it is on the hub.
        weights: the weight files.
    """

    repo: str
    commit: str
    path: str | None = None
    weights: Mapping[str, HubFile] = field(default_factory=dict)

    @property
    def on_hub(self) -> bool:
        return self.path is None

    @property
    def folder_name(self) -> str:
        """Of its folder in the parts cache of any host, relative to that."""
        return f"{name_of(self.repo, on_hub=self.on_hub)}/{self.commit}"

    @property
    def folder(self) -> Path:
        """Its folder in the parts cache of this host. Raises ConfigError."""
        return parts_cache() / self.folder_name

    def as_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Repository:
        """The inverse of `as_json`. Raises KeyError, TypeError, AttributeError."""
        files = {name: HubFile(**each) for name, each in value["weights"].items()}
        return cls(value["repo"], value["commit"], value["path"], files)


def parts_cache() -> Path:
    """The folder of all repositories. Raises ConfigError."""
    return cache_folder() / "parts"


def folder_of_checkpoint(path: Path) -> Path:
    """The folder of a checkpoint, which is `path` unless that is a GGUF file."""
    return path.parent if is_gguf(path) else path


def record_of_folder(folder: Path) -> Path:
    """The file that says what a folder is of."""
    return folder / RECORDS / "repository.json"


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
    """Mark a folder as finished but for tensors. Of a commit on the hub it is the one that is used
    while the hub cannot be reached. Raises ModelError."""
    with reported(folder):
        record_of_folder(folder).parent.mkdir(exist_ok=True)
        write_atomically(record_of_folder(folder), json.dumps(found.as_json()).encode())
        if found.on_hub:
            refs = folder.parent / "refs"
            refs.mkdir(exist_ok=True)
            write_atomically(refs / MAIN, found.commit.encode())


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
    return Repository("/".join(root.name.split("--")[1:]), folder.name)


def known_commit(repo: str) -> str | None:
    """The commit that was used last, None if there is none whose folder is finished."""
    try:
        root = parts_cache() / name_of(repo)
        commit = read_text(root / "refs" / MAIN).strip()
        return commit if read_repository(root / commit) is not None else None
    except (ConfigError, Unreadable):
        return None


def is_begun(folder: Path, file: str | None) -> bool:
    """Whether a folder has the weight files of a checkpoint, or a GGUF file, if without tensors.
    Links to what was removed since do not count."""
    known = read_repository(folder)
    if known is None:
        return False
    names = [name for name in known.weights if not is_gguf(Path(name))]
    wanted = names if file is None else part_names(file)
    return bool(wanted) and all(
        name in known.weights and (folder / name).exists() for name in wanted
    )


def cached_file(repo: str, commit: str, name: str) -> str | None:
    """The path of a file that the cache of huggingface_hub holds whole, where it has its name, else
    None."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, name, revision=commit)
    return found if isinstance(found, str) else None
