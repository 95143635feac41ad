"""Resolves the path of a model: a local folder or file, or the cache of the Hugging Face Hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pipespec.engine.checkpoint.partial_checkpoint import open_repository
from pipespec.engine.checkpoint.parts import folder as parts_folder
from pipespec.engine.checkpoint.parts.folder import Repository
from pipespec.engine.checkpoint.parts.sources import HubSource, Unavailable
from pipespec.engine.formats.gguf import is_gguf
from pipespec.engine.formats.gguf_file import parts_of
from pipespec.engine.formats.safetensors_folder import is_whole
from pipespec.errors import ModelError
from pipespec.system.validation import home_expanded, is_folder

# NAME, ORG/NAME, or a file as ORG/NAME/FILE.gguf.
LONGEST_REPO = 96  # characters, as the hub allows
_ON_HUB = re.compile(r"(?!\.{1,2}$)([\w.-]+(?:/[\w.-]+)?)|([\w.-]+/[\w.-]+)/([\w.-]+\.gguf)")


def resolve(model: str | Path) -> Path:
    """The local folder of a model, or its GGUF file, of several the first.

    That of a hub id, or of ORG/NAME/FILE.gguf on the hub, is in the cache of huggingface_hub if
    that holds all of it; else it is in the parts cache, with small files and headers, and with
    those tensors that were fetched (`pipespec.engine.checkpoint.parts`). Raises ModelError.
    """
    path = home_expanded(model)
    if is_folder(path):
        return path
    if is_gguf(path) and path.is_file():
        return parts_of(path)[0]
    if os.path.lexists(path):
        raise ModelError(
            f"{path} is a file; give the folder that holds config.json, or a GGUF file"
        )
    if (named := _hub_name(model)) is None:
        raise ModelError(f"there is no model {path}; give a model folder, a GGUF file or a hub id")
    return _on_hub(*named)


def _hub_name(model: str | Path) -> tuple[str, str | None] | None:
    """The repository of the hub, and the GGUF file in it, that a model may be called by."""
    found = None if isinstance(model, Path) else _ON_HUB.fullmatch(model)
    if found is None or len(repo := found[1] or found[2]) > LONGEST_REPO:
        return None
    return (
        None if {repo[0], repo[-1]} & {*"-."} or re.search(r"--|\.\.", repo) else (repo, found[3])
    )


def can_be_fetched(model: str) -> bool:
    """Whether hosts without a model get their layers when a cluster starts: this host has all of
    its files, or it is on the hub, as far as its name tells."""
    path = home_expanded(model)
    if os.path.lexists(path):
        if is_gguf(path):
            return all(part.is_file() for part in parts_of(path))
        return is_whole(path)
    return _hub_name(model) is not None


def known_model(model: str) -> Path | None:
    """The checkpoint of a hub id that is here, whole or in parts; nothing is fetched."""
    named = _hub_name(model)
    return None if named is None else parts_folder.known_model(*named)


def resolve_config(model: str | Path) -> Path:
    """The config.json of a model: in its folder, or fetched alone from the hub. Raises
    ModelError."""
    path = home_expanded(model)
    if is_folder(path) and (path / "config.json").is_file():
        return path / "config.json"
    if os.path.lexists(path):
        raise ModelError(f"{path} has no config.json; give the folder that holds it, or a hub id")
    named = _hub_name(model)
    if named is None or named[1] is not None:
        raise ModelError(f"there is no model {path}; give a model folder, a GGUF file or a hub id")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    cached = parts_folder.cached_file(named[0], "main", "config.json")
    revision = _revision(HubSource(named[0]), None if cached is None else Path(cached))
    if isinstance(revision, Path):
        return revision
    try:
        return Path(hf_hub_download(named[0], "config.json", revision=revision.commit))
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"the hub did not send the config.json of {model!r} ({type(error).__name__}); check "
            "the name and the network, or give an existing folder"
        ) from error


def _on_hub(hub_id: str, file: str | None = None) -> Path:
    """The folder, or GGUF file, of a hub id. Raises ModelError."""
    source = HubSource(hub_id)
    revision = _revision(source, parts_folder.known_model(hub_id, file))
    if isinstance(revision, Path):
        return revision
    cached = parts_folder.cached_model(hub_id, revision.commit, file)
    return cached or open_repository(source, revision, file)


def _revision(source: HubSource, here: Path | None) -> Repository | Path:
    """What the hub has of a model, or the copy that is `here` if the hub cannot be asked. Raises
    ModelError."""
    try:
        # Somebody waits, perhaps with a wrong name; with a copy here, one try is enough.
        return source.revision(max_tries=2 if here is None else 1)
    except Unavailable as error:
        if here is not None:
            return here
        raise ModelError(
            f"there is no model {source.repo!r} here, and the hub could not be asked for it: "
            f"{error}; or correct the name"
        ) from error
