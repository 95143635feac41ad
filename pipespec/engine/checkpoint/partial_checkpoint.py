"""What a checkpoint lacks on this host, which may have only the weights that it computes."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from pipespec.engine.checkpoint.checkpoint import Checkpoint
from pipespec.engine.checkpoint.slice_tensors import described, part_of
from pipespec.engine.checkpoint_parts.parts_file import PartsFile, is_partial
from pipespec.errors import ModelError


def tensors_by_file(path: Path, parts: Collection[str]) -> dict[Path, dict[str, str]]:
    """The tensors of these parts (`slice_tensors`) in each weight file of a checkpoint: the names
    in the file by the names that Transformers has. Raises ModelError."""
    return Checkpoint(path).files.names_by_file(parts)


def missing(path: Path, parts: Collection[str]) -> dict[str, list[str]]:
    """The tensors of these parts that a checkpoint lacks here, by file. Raises ModelError."""
    files = Checkpoint(path).files
    if all(os.path.isfile(file) and not is_partial(file) for file in files.weight_files()):
        return {}
    found: dict[str, list[str]] = {}
    for file, names in files.names_by_file(parts).items():
        if not os.path.isfile(file):
            lacking = list(names)
        elif is_partial(file):
            own = PartsFile(file)
            lacking = [name for name, stored in names.items() if own.absent([own.ranges[stored]])]
        else:
            continue
        if lacking:
            found[file.name] = lacking
    return found


def layers_here(path: Path, num_layers: int) -> range:
    """The longest run of layers that a checkpoint holds here. Raises ModelError if there is
    none."""
    best = run = range(0)
    for layer in range(num_layers):
        if missing(path, {str(layer)}):
            continue
        run = range(run.start if run.stop == layer else layer, layer + 1)
        best = max(best, run, key=len)
    if not best:
        raise ModelError(f"{path} holds no whole layer; copy its files there")
    return best


def require_parts(path: Path, parts: Collection[str]) -> None:
    """Raise ModelError, which names what is missing, unless a checkpoint holds these parts here."""
    lacking = missing(path, parts)
    if lacking:
        raise ModelError(f"{path} {clause(lacking)}; copy the files there")


def clause(lacking: Mapping[str, Collection[str]]) -> str:
    """What `missing` has found, as "lacks layers 2 and 3 (in a.safetensors and 1 more file)"."""
    files = sorted(lacking)
    more = f" and {len(files) - 1} more file{'s' if len(files) > 2 else ''}" if files[1:] else ""
    parts = {part_of(name) for names in lacking.values() for name in names}
    return f"lacks {described(parts)} (in {files[0]}{more})"
