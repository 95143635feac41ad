"""Resolves the path of a model: a local folder or file, or the cache of the Hugging Face Hub."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from pipespec.engine.formats.gguf import is_gguf
from pipespec.errors import ModelError
from pipespec.system.validation import home_expanded, is_folder

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


def resolve(model: str | Path) -> Path:
    """The local folder of a model, or its GGUF file; a hub id is downloaded unless it is in the
    hub's cache. Raises ModelError."""
    path = home_expanded(model)
    if is_folder(path):
        return path
    if is_gguf(path) and path.is_file():
        return path
    if os.path.lexists(path):
        raise ModelError(
            f"{path} is a file; give the folder that holds config.json, or a GGUF file"
        )
    if isinstance(model, Path) or not _HUB_ID.fullmatch(model) or model in (".", ".."):
        raise ModelError(f"there is no model folder {path}; give an existing folder or a hub id")
    return _download(model)


def resolve_config(model: str | Path) -> Path:
    """The config.json of a model: in its folder, or fetched alone from the hub. Raises
    ModelError."""
    path = home_expanded(model)
    if is_folder(path) and (path / "config.json").is_file():
        return path / "config.json"
    if os.path.lexists(path):
        raise ModelError(f"{path} has no config.json; give the folder that holds it, or a hub id")
    if isinstance(model, Path) or not _HUB_ID.fullmatch(model) or model in (".", ".."):
        raise ModelError(f"there is no model folder {path}; give an existing folder or a hub id")
    from huggingface_hub import hf_hub_download

    return _from_hub(model, lambda: hf_hub_download(model, "config.json"))


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    return _from_hub(hub_id, lambda: snapshot_download(hub_id, allow_patterns=_HUB_FILES))


def _from_hub(hub_id: str, fetch: Callable[[], str]) -> Path:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(fetch())
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"there is no model folder {hub_id!r} and the hub could not provide a model of that "
            f"name ({type(error).__name__}); give an existing folder, or check the name, the "
            "network and your access"
        ) from error
