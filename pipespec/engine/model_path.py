"""Resolves the path of a model: a local folder or file, or the cache of the Hugging Face Hub."""

from __future__ import annotations

import os
import re
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


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"there is no model folder {hub_id!r} and the hub could not provide a model of that "
            f"name ({type(error).__name__}); give an existing folder, or check the name, the "
            "network and your access"
        ) from error
