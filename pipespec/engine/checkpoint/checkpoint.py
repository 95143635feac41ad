"""A checkpoint, whatever the format of its files."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipespec.engine.checkpoint.model_path import resolve
from pipespec.engine.checkpoint.partial_checkpoint import StoredFiles, stored_files
from pipespec.engine.formats.safetensors_folder import view

if TYPE_CHECKING:  # headers are read without it
    import torch


class Checkpoint:
    """A checkpoint on this machine.

    Attributes:
        path: its folder, or GGUF file.
        files: its files, in their format.
    """

    def __init__(self, path: Path):
        self.path = path
        self.files: StoredFiles = stored_files(path)

    @classmethod
    def open(cls, model: str | Path) -> Checkpoint:
        """That of a folder, a GGUF file, or the id of a model on the Hugging Face Hub. Raises
        ModelError."""
        return cls(resolve(model))

    @contextmanager
    def source(
        self, parts: Collection[str], dtype: torch.dtype
    ) -> Iterator[tuple[Path | None, dict[str, Any] | None]]:
        """What `from_pretrained` loads these parts (`slice_tensors`) from: a state dict whose
        tensors are read lazily, or the folder that a package of Transformers reads."""
        if self.files.by_package:
            with view(self.path, parts) as folder:
                yield folder, None
        else:
            yield None, {name: self.files.tensor(name, dtype) for name in self.files.headers(parts)}
