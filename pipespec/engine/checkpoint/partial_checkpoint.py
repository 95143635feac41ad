"""Checkpoints of which a host has only the weights that it computes.

A folder may lack the files of other hosts' layers. Their tensors are named by the index, and have
the shapes of the same tensors in the layers that are here, or those that config.json implies.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipespec.engine.checkpoint.formats import gguf
from pipespec.engine.checkpoint.formats.gguf import is_gguf
from pipespec.engine.checkpoint.formats.gguf_parts import parts_of
from pipespec.engine.checkpoint.formats.lazy import DTYPES
from pipespec.engine.checkpoint.header_checks import expected_sizes
from pipespec.engine.checkpoint.safetensors_headers import (
    INDEX,
    WEIGHTS,
    Tensor,
    read_index,
    read_json,
    stored_index,
    tensor_ranges,
)
from pipespec.engine.checkpoint.slice_tensors import LAYER, described, needed, part_of
from pipespec.engine.checkpoint.text_part import text_names
from pipespec.engine.checkpoint_parts.parts_file import PartsFile, is_partial
from pipespec.engine.checkpoint_parts.repository import ranges_of
from pipespec.engine.precision import ITEM_BYTES
from pipespec.errors import ModelError


def absent_tensors(
    path: Path, raw: Mapping[str, Any], present: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The headers of the tensors in files that a folder does not hold.

    Args:
        raw: config.json.
        present: the headers of the other tensors.

    Raises ModelError if one of them cannot be known.
    """
    shard_of = read_index(path) or {}
    absent = [name for name in shard_of if name not in present]
    if not absent:
        return {}
    alike = {inner: each for name, each in present.items() if (inner := _inner(name)) != name}
    dtype = _usual_dtype(present)
    found = {}
    for name in absent:
        tensor = alike.get(_inner(name)) or _by_config(raw, name, dtype)
        if tensor is None:
            raise ModelError(
                f"{path} does not hold {shard_of[name]}, and the size of its {name} does not show "
                "in the other files; put that file there too"
            )
        found[name] = tensor
    return found


def _inner(name: str) -> str:
    """The name of a tensor within its layer."""
    found = LAYER.search(name)
    return name if found is None else found[2]


def _usual_dtype(present: Mapping[str, Tensor]) -> str:
    """The type of most of the plain numbers."""
    sizes = Counter[str]()
    for each in present.values():
        if each.dtype in DTYPES:
            sizes[each.dtype] += each.num_bytes
    return sizes.most_common(1)[0][0] if sizes else "F16"


def _by_config(raw: Mapping[str, Any], name: str, dtype: str) -> Tensor | None:
    """A tensor with the shape that config.json implies; None: it implies none."""
    sizes = expected_sizes(raw, _inner(name))
    shape = tuple(sizes[axis][0] for axis in sorted(sizes))
    if len(shape) != 2:
        hidden = raw.get("hidden_size")
        if "norm" not in name or type(hidden) is not int:
            return None
        shape = (hidden,)
    count = shape[0] * (shape[1] if len(shape) > 1 else 1)
    return Tensor(shape, count * ITEM_BYTES[DTYPES[dtype]], dtype)


# --- what is missing --------------------------------------------------------------------------


def index_is_met(folder: Path) -> bool:
    """Whether a folder holds all weight files of a safetensors checkpoint."""
    try:
        shard_of = read_index(folder)
    except ModelError:
        return False
    names = {WEIGHTS} if shard_of is None else set(shard_of.values())
    return all(os.path.isfile(folder / name) for name in names)


def tensors_by_file(path: Path, parts: Collection[str]) -> dict[Path, dict[str, str]]:
    """The tensors of these parts (`slice_tensors`) in each weight file of a checkpoint: the names
    in the file by the names that Transformers has. Raises ModelError."""
    found: dict[Path, dict[str, str]] = {}
    if is_gguf(path):
        stored, places = gguf.header(path).stored, gguf.tensor_places(path)
        for name in needed(stored, parts):
            first, *others = stored[name].names
            of_file = found.setdefault(places[first].file, {})
            of_file[name] = first
            for in_file in others:
                found.setdefault(places[in_file].file, {})[f"{name} ({in_file})"] = in_file
        return found
    file_of = stored_index(path)
    if file_of is None:
        file_of = dict.fromkeys(tensor_ranges(path / WEIGHTS), WEIGHTS)
    stored_as = {name: in_file for in_file, name in text_names(file_of).items()}
    for name in needed(stored_as, parts):
        found.setdefault(path / file_of[stored_as[name]], {})[name] = stored_as[name]
    return found


def missing(path: Path, parts: Collection[str]) -> dict[str, list[str]]:
    """The tensors of these parts that a checkpoint lacks here, by file. Raises ModelError."""
    alone = parts_of(path) if is_gguf(path) else (path / WEIGHTS,)
    if all(os.path.isfile(file) and not is_partial(file) for file in alone):
        return {}
    found: dict[str, list[str]] = {}
    for file, names in tensors_by_file(path, parts).items():
        if not os.path.isfile(file):
            lacking = list(names)
        elif is_partial(file):
            here, ranges = PartsFile(file).here, ranges_of(file)
            lacking = [name for name, stored in names.items() if ranges[stored] not in here]
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


@contextmanager
def loadable(path: Path, parts: Collection[str]) -> Iterator[Path]:
    """A folder from which Transformers can load these parts of a checkpoint, which are here.

    It is `path` itself unless files of other parts are missing, which Transformers would open; then
    it is a temporary folder of links with an index of the tensors of these parts.
    """
    shard_of = None if is_gguf(path) else read_index(path)
    if shard_of is None or all(os.path.isfile(path / file) for file in set(shard_of.values())):
        yield path
        return
    index = read_json(path / INDEX)
    names = set(needed(shard_of, parts))
    index["weight_map"] = {name: file for name, file in shard_of.items() if name in names}
    index.setdefault("metadata", {})
    with tempfile.TemporaryDirectory(prefix="pipespec-view-") as view:
        for entry in path.iterdir():
            if entry.name not in (INDEX, WEIGHTS) and entry.is_file():
                os.symlink(entry.absolute(), os.path.join(view, entry.name))
        (Path(view) / INDEX).write_text(json.dumps(index))
        yield Path(view)
