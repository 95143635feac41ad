"""The files of a checkpoint: its JSON, and the headers of its safetensors. No weight is read."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipespec.errors import ModelError

_INDEX = "model.safetensors.index.json"
_WEIGHTS = "model.safetensors"
# A safetensors header longer than this is refused by the format's own library.
_MAX_HEADER = 100_000_000


@dataclass(frozen=True, slots=True)
class Tensor:
    """What a header says of a tensor."""

    shape: tuple[int, ...]
    num_bytes: int
    dtype: str  # as safetensors names it


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Name, shape and size of every tensor of a checkpoint folder. Raises ModelError."""
    index = path / _INDEX
    if not index.is_file():
        if not (path / _WEIGHTS).is_file():
            raise ModelError(
                f"{path} holds no {_WEIGHTS}; only safetensors checkpoints can be loaded, so "
                "convert it with save_pretrained"
            )
        return _header(path / _WEIGHTS)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{index} has no weight_map; fetch the checkpoint again")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(weight_map.values())):
        if not (path / shard).is_file():
            raise ModelError(f"the shard {shard} named by {index} is missing; fetch it again")
        tensors |= _header(path / shard)
    absent = weight_map.keys() - tensors.keys()
    if absent:
        raise ModelError(
            f"{index} names {len(absent)} tensors that no shard holds, for example "
            f"{min(absent)}; fetch the checkpoint again"
        )
    return tensors


def _header(file: Path) -> dict[str, Tensor]:
    """A safetensors header: 8 bytes of length, JSON, then exactly the bytes that it describes."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER + 1
        if length > min(_MAX_HEADER, size - 8):
            raise _corrupt(file, f"its {size} bytes do not hold a header")
        text = stream.read(length)
    try:
        header = json.loads(text)
        tensors, end = {}, 0
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, stop = entry["data_offsets"]
            tensors[name] = Tensor(tuple(entry["shape"]), stop - start, entry["dtype"])
            end = max(end, stop)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _corrupt(file, "its header cannot be read") from error
    if size != 8 + length + end:
        raise _corrupt(file, f"it has {size} bytes, its header describes {8 + length + end}")
    return tensors


def _corrupt(file: Path, why: str) -> ModelError:
    return ModelError(f"{file} is not a whole safetensors file ({why}); fetch it again")


def read_json(file: Path, remedy: str = "fetch the checkpoint again") -> dict[str, Any]:
    """The JSON object in a file. Raises ModelError, which ends with the remedy."""
    try:
        content = json.loads(file.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{file.parent} holds no {file.name}; {remedy}") from error
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON; {remedy}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} is not a JSON object; {remedy}")
    return content
