"""The files of a checkpoint: its JSON, and the headers of its safetensors. No weight is read."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipespec.errors import ModelError
from pipespec.system import reading
from pipespec.system.reading import Missing, Unreadable, parse_json, shown

_INDEX = "model.safetensors.index.json"
_WEIGHTS = "model.safetensors"
# A safetensors header longer than this is refused by the format's own library.
_MAX_HEADER = 100_000_000
# No file, tensor or dimension is larger than a signed number of 64 bits.
_LARGEST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Tensor:
    """What a header says of a tensor."""

    shape: tuple[int, ...]
    num_bytes: int
    dtype: str  # as safetensors names it


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Name, shape and size of every tensor of a checkpoint folder. Raises ModelError."""
    return {name: each for held in shards(path).values() for name, each in held.items()}


def shards(path: Path) -> dict[Path, dict[str, Tensor]]:
    """The same, of each file. Raises ModelError."""
    index = path / _INDEX
    if not os.path.isfile(index):
        if not os.path.isfile(path / _WEIGHTS):
            raise ModelError(
                f"{path} holds no {_WEIGHTS}; only safetensors checkpoints can be loaded, so "
                "convert it with save_pretrained"
            )
        return {path / _WEIGHTS: _header(path / _WEIGHTS)}
    shard_of = weight_map(index, read_json(index))
    found: dict[Path, dict[str, Tensor]] = {}
    for shard in sorted(set(shard_of.values())):
        if not os.path.isfile(path / shard):
            raise ModelError(f"the shard {shard} named by {index} is missing; fetch it again")
        found[path / shard] = _header(path / shard)
    absent = shard_of.keys() - {name for held in found.values() for name in held}
    if absent:
        raise ModelError(
            f"{index} names {len(absent)} tensors that no shard holds, for example "
            f"{min(absent)}; fetch the checkpoint again"
        )
    return found


def weight_map(index: Path, content: Any) -> dict[str, str]:
    """The file of each tensor, of the index's own folder. Raises ModelError."""
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict):
        raise ModelError(f"{index} has no weight_map; fetch the checkpoint again")
    for name in found.values():
        # What was downloaded may name no file outside its folder.
        if not isinstance(name, str) or name in ("", ".", "..") or os.sep in name:
            raise ModelError(
                f"{index} names the shard {shown(name)}, which is no file of its folder; fetch "
                "the checkpoint again, from a source that you trust"
            )
    return found


def _header(file: Path) -> dict[str, Tensor]:
    """A safetensors header: 8 bytes of length, JSON, then exactly the bytes that it describes."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER + 1
            if length > min(_MAX_HEADER, size - 8):
                raise _corrupt(file, f"its {size} bytes do not hold a header")
            text = stream.read(length)
    except OSError as error:
        raise ModelError(f"{file} cannot be read ({error.strerror}); make it readable") from error
    try:
        header = parse_json(text)
        tensors, end = {}, 0
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, stop = entry["data_offsets"]
            shape, dtype = tuple(entry["shape"]), entry["dtype"]
            if not _are_sizes(start, stop, *shape) or start > stop or not isinstance(dtype, str):
                raise ValueError
            tensors[name] = Tensor(shape, stop - start, dtype)
            end = max(end, stop)
    except (Unreadable, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _corrupt(file, "its header cannot be read") from error
    if size != 8 + length + end:
        raise _corrupt(file, f"it has {size} bytes, its header describes {8 + length + end}")
    return tensors


def _are_sizes(*numbers: Any) -> bool:
    return all(type(number) is int and 0 <= number <= _LARGEST for number in numbers)


def _corrupt(file: Path, why: str) -> ModelError:
    return ModelError(f"{file} is not a whole safetensors file ({why}); fetch it again")


def read_json(file: Path, remedy: str = "fetch the checkpoint again") -> dict[str, Any]:
    """The JSON object in a file. Raises ModelError, which ends with the remedy."""
    try:
        content = reading.read_json(file)
    except Missing as error:
        raise ModelError(f"{file.parent} holds no {file.name}; {remedy}") from error
    except Unreadable as error:
        raise ModelError(f"{file} cannot be read ({error}); {remedy}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} is not a JSON object; {remedy}")
    return content
