"""Reads config and headers of a checkpoint, a folder or a GGUF file, as those of plain weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipespec.engine.architectures import require_supported
from pipespec.engine.checkpoint.formats import gguf, packed_checkpoint
from pipespec.engine.checkpoint.formats.packed_checkpoint import KeptLayer
from pipespec.engine.checkpoint.model_config import FOREIGN
from pipespec.engine.checkpoint.partial_checkpoint import absent_tensors
from pipespec.engine.checkpoint.quantization import (
    COMPRESSED_PACKAGE,
    PACKED_METHODS,
    stored_method,
    stored_packing,
)
from pipespec.engine.checkpoint.safetensors_headers import Tensor, read_json, read_tensors
from pipespec.engine.checkpoint.slice_tensors import UNUSED, part_of
from pipespec.engine.checkpoint.text_part import text_config, text_type
from pipespec.engine.draft_kind import refuse_draft_head
from pipespec.errors import ModelError


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """Config and headers of a checkpoint; see `CheckpointInfo`. `tensors` are those of plain
    weights unless `quantization` is set."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    quantization: str | None = None
    dequantized_from: str | None = None
    kept_layers: tuple[KeptLayer, ...] = ()
    kept_format: str | None = None
    package: str | None = None
    ends: tuple[int, int] | None = None

    @property
    def plain(self) -> bool:
        """Whether a model of plain weights is loaded from `tensors`, by name and shape."""
        return self.quantization is None


def read_files(path: Path) -> CheckpointFiles:
    """Config and headers of a checkpoint. Raises ModelError."""
    return _read_gguf(path) if gguf.is_gguf(path) else _read_folder(path)


def _read_gguf(path: Path) -> CheckpointFiles:
    header = gguf.header(path)
    return CheckpointFiles(
        header.settings,
        header.plain,
        dequantized_from=gguf.GGUF,
        kept_layers=header.kept_layers,
        kept_format=gguf.GGUF,
        package=gguf.PACKAGE,
        ends=header.ends,
    )


def _read_folder(path: Path) -> CheckpointFiles:
    whole = read_json(
        path / "config.json", "a model folder holds config.json and safetensors files"
    )
    refuse_draft_head(path, whole)
    raw = text_config(whole)
    stored = raw.get("quantization_config")
    # First, as an unsupported architecture is the more useful error message.
    require_supported(str(raw.get("model_type")), path, text_type(whole))
    try:
        method = stored_method(path, stored)
    except RecursionError as error:
        raise ModelError(f"{path / 'config.json'} is nested too deeply; {FOREIGN}") from error
    tensors = read_tensors(path)
    tensors |= absent_tensors(path, raw, tensors)
    tensors = {name: each for name, each in tensors.items() if part_of(name) != UNUSED}
    packing = stored_packing(path, stored) if method in PACKED_METHODS else None
    if raw is not whole and method is not None and packing is None:
        raise ModelError(
            f"{path} is multimodal and quantised by {method}, which is read of models of text "
            "alone; take plain weights, AWQ, GPTQ, or compressed-tensors packed in 4 or 8 bits"
        )
    if method not in PACKED_METHODS:
        return CheckpointFiles(raw, tensors, quantization=method)
    plain = packed_checkpoint.as_plain(path, tensors, packing)
    if packing is None:
        return CheckpointFiles(raw, plain, dequantized_from=method, package=COMPRESSED_PACKAGE)
    return CheckpointFiles(
        raw,
        plain,
        dequantized_from=method,
        kept_layers=packed_checkpoint.kept_layers(tensors, packing),
        kept_format=packing.format,
    )
