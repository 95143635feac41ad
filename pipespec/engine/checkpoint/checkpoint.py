"""The files of a checkpoint, whatever their format."""

from __future__ import annotations

from pathlib import Path

from pipespec.engine.formats.gguf import GgufFiles, is_gguf
from pipespec.engine.formats.safetensors_folder import SafetensorsFolder

StoredFiles = GgufFiles | SafetensorsFolder


def open_files(path: Path) -> StoredFiles:
    """Those of a folder, or of a GGUF file; nothing is read yet."""
    return GgufFiles(path) if is_gguf(path) else SafetensorsFolder(path)
