"""Reads the JSON files of a checkpoint and the headers of its safetensors files; no weights.

Of a multimodal checkpoint only the text part is there, by its names (`architectures`).
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from pipespec.engine.formats.architectures import text_names
from pipespec.errors import ModelError
from pipespec.system import validation
from pipespec.system.validation import Missing, Unreadable, parse_json, reason, shown

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
SHARDS = "*-of-*.safetensors"  # which need the index
CONFIG = "config.json"
# The safetensors library refuses longer headers.
_MAX_HEADER = 100_000_000
# Bytes of a number of the types of plain weights.
ITEM = {"F32": 4, "BF16": 2, "F16": 2}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as described by a header."""

    shape: tuple[int, ...]
    num_bytes: int
    dtype: str  # as safetensors names it
    file: Path | None = None
    stored_as: str = ""  # its name in the file
    place: tuple[int, int] = (0, 0)  # where it begins and ends there

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: str) -> Tensor:
        """A tensor that is in no file."""
        return cls(shape, math.prod(shape) * ITEM[dtype], dtype)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The header of every tensor of the text part of a checkpoint folder, by its name in it. Raises
    ModelError."""
    shard_of = stored_index(path)
    if shard_of is None:
        if not os.path.isfile(path / WEIGHTS):
            if shards := sorted(each.name for each in path.glob(SHARDS)):
                raise ModelError(
                    f"{path} holds {shards[0]} and no {INDEX}, which names the file of each "
                    "tensor; put it there too"
                )
            raise ModelError(
                f"{path} holds no {WEIGHTS}; only safetensors checkpoints can be loaded, so "
                "convert it with save_pretrained"
            )
        held = _header(path / WEIGHTS)
        return {name: held[stored] for stored, name in text_names(held).items()}
    renamed = text_names(shard_of)
    files = sorted({shard_of[stored] for stored in renamed})
    if absent := [name for name in files if not os.path.isfile(path / name)]:
        raise ModelError(
            f"{path} lacks {len(absent)} of the {len(files)} files that its {INDEX} names, for "
            f"example {absent[0]}; put there all of them"
        )
    found: dict[str, Tensor] = {}
    for file in files:
        found |= _header(path / file)
    if lost := renamed.keys() - found.keys():
        raise ModelError(
            f"{path / INDEX} names {len(lost)} tensors that no shard holds, for example "
            f"{min(lost)}; fetch the checkpoint again"
        )
    return {name: found[stored] for stored, name in renamed.items()}


def stored_index(path: Path) -> dict[str, str] | None:
    """The file of each tensor by the index of a folder, all by their names in the files; None: all
    are in one file, which goes before an index, as in Transformers. Raises ModelError."""
    index = path / INDEX
    if os.path.isfile(path / WEIGHTS) or not os.path.isfile(index):
        return None
    return weight_map(index, read_json(index))


def weight_map(index: Path, content: Any) -> dict[str, str]:
    """The file of each tensor, by the parsed index; always in the index's folder. Raises
    ModelError."""
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict):
        raise ModelError(f"{index} has no weight_map; fetch the checkpoint again")
    for name in found.values():
        # A downloaded index must not name a file outside its folder.
        if not isinstance(name, str) or name in ("", ".", "..") or os.sep in name:
            raise ModelError(
                f"{index} names the shard {shown(name)}, which is no file of its folder; fetch "
                "the checkpoint again, from a source that you trust"
            )
    return found


def tensor_ranges(file: Path) -> dict[str, tuple[int, int]]:
    """Where each tensor of a safetensors file begins and ends, in bytes of the file. Raises
    ModelError."""
    return {name: each.place for name, each in _header(file).items()}


def header_length(file: Path, prefix: bytes, size: int) -> int:
    """Bytes of the header that follows the first 8 bytes (`prefix`) of a safetensors file of `size`
    bytes. Raises ModelError."""
    length: int = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER + 1
    if length > min(_MAX_HEADER, size - 8):
        raise _corrupt(file, f"its {size} bytes do not hold a header")
    return length


def _header(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file: 8 bytes of length, then JSON. After it the file must have
    exactly the bytes that it describes, each of one tensor, which the library checks."""
    try:
        with file.open("rb") as stream:
            length = header_length(file, stream.read(8), file.stat().st_size)
            header = parse_json(stream.read(length))
        with safe_open(file, framework="np"):
            header.pop("__metadata__", None)
    except OSError as error:
        raise ModelError(f"{file} cannot be read ({error.strerror}); make it readable") from error
    except Unreadable as error:
        raise _corrupt(file, "its header cannot be read") from error
    except SafetensorError as error:
        raise _corrupt(file, reason(error, named=False)) from error
    found = {}
    for name, entry in header.items():
        shape, (start, stop) = tuple(entry["shape"]), entry["data_offsets"]
        place = 8 + length + start, 8 + length + stop
        found[name] = Tensor(shape, stop - start, entry["dtype"], file, name, place)
    return found


def _corrupt(file: Path, why: str) -> ModelError:
    return ModelError(f"{file} is not a whole safetensors file ({why}); fetch it again")


def read_json(file: Path, remedy: str = "fetch the checkpoint again") -> dict[str, Any]:
    """The JSON object in a file. Raises ModelError, which ends with the remedy."""
    try:
        content = validation.read_json(file)
    except Missing as error:
        raise ModelError(f"{file.parent} holds no {file.name}; {remedy}") from error
    except Unreadable as error:
        raise ModelError(f"{file} cannot be read ({error}); {remedy}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} is not a JSON object; {remedy}")
    return content
