"""Reads the JSON files of a checkpoint and the headers of its safetensors files; no weights. The
headers of files that are not here are those of other layers, or what config.json implies.

Of a multimodal checkpoint only the text part is there, by its names (`architectures`).
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from pipespec.engine.formats.architectures import text_names
from pipespec.engine.formats.slice_tensors import (
    EMBEDDING_NAME,
    LAYER,
    OUTPUT_HEADS,
    UNUSED,
    part_of,
)
from pipespec.errors import ModelError
from pipespec.system import validation
from pipespec.system.validation import Missing, Unreadable, parse_json, reason, shown

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
CONFIG = "config.json"
# The safetensors library refuses longer headers.
_MAX_HEADER = 100_000_000
# Bytes of a number of the types of plain weights.
ITEM = {"F32": 4, "BF16": 2, "F16": 2}
# Types whose queries come with as many numbers of a gate.
_GATED_QUERIES = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
# Types whose layers differ in the number or size of their heads, or that ignore `head_dim`.
_HEADS_VARY = (
    *("dots3_note_text", "gemma4_text", "gemma4_unified_text", "laguna", "mimo_v2_flash"),
    "stablelm",
)


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
    """The header of every tensor in the files that a checkpoint folder holds; its index may name
    others. Raises ModelError."""
    shard_of = stored_index(path)
    if shard_of is None:
        if not os.path.isfile(path / WEIGHTS):
            if shards := sorted(each.name for each in path.glob("*-of-*.safetensors")):
                raise ModelError(
                    f"{path} holds {shards[0]} and no {INDEX}, which names the file of each "
                    "tensor; put it there too"
                )
            raise ModelError(
                f"{path} holds no {WEIGHTS}; only safetensors checkpoints can be loaded, so "
                "convert it with save_pretrained"
            )
        return _text_part(_header(path / WEIGHTS))
    files = [path / name for name in sorted(set(shard_of.values())) if os.path.isfile(path / name)]
    if not files:
        raise ModelError(
            f"{path} holds none of the files that its {INDEX} names, such as "
            f"{min(shard_of.values(), default='any')}; put there those that hold its layers"
        )
    found: dict[str, Tensor] = {}
    for file in files:
        held = _header(file)
        for name in held:
            if path / shard_of.get(name, file.name) not in files:
                raise ModelError(
                    f"{path / INDEX} names {shard_of[name]} as the file of {shown(name)}, which is "
                    f"in {file.name}; fetch the index again"
                )
        found |= held
    absent = {name for name, shard in shard_of.items() if path / shard in files} - found.keys()
    if absent:
        raise ModelError(
            f"{path / INDEX} names {len(absent)} tensors that no shard holds, for example "
            f"{min(absent)}; fetch the checkpoint again"
        )
    return _text_part(found, shard_of)


def _text_part(held: Mapping[str, Tensor], others: Iterable[str] = ()) -> dict[str, Tensor]:
    """The tensors of the text part, by their names in it; `others`: those of all files."""
    renamed = text_names({*others, *held})
    return {renamed[name]: each for name, each in held.items() if name in renamed}


def read_index(path: Path) -> dict[str, str] | None:
    """The file of each tensor by the index of a folder; None: all tensors are in one file, which
    goes before an index, as in Transformers. Raises ModelError."""
    shard_of = stored_index(path)
    if shard_of is None:
        return None
    return {name: shard_of[stored] for stored, name in text_names(shard_of).items()}


def stored_index(path: Path) -> dict[str, str] | None:
    """The same by the names in the files, and of all tensors. Raises ModelError."""
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


def absent_tensors(
    path: Path, raw: Mapping[str, Any], present: Mapping[str, Tensor], dtype: str
) -> dict[str, Tensor]:
    """The headers of the tensors in files that a folder does not hold: they have the shapes of the
    same tensors in the layers that are here, or, in `dtype`, those that config.json (`raw`)
    implies. Raises ModelError if one of them cannot be known."""
    shard_of = read_index(path) or {}
    absent = [name for name in shard_of if name not in present and part_of(name) != UNUSED]
    alike = {inner: each for name, each in present.items() if (inner := _inner(name)) != name}
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
    found = LAYER.search(name)
    return name if found is None else found[2]


def _by_config(raw: Mapping[str, Any], name: str, dtype: str) -> Tensor | None:
    """A tensor with the shape that config.json implies; None: it implies none."""

    def size(field: str) -> int:
        return value if type(value := raw.get(field)) is int else 0

    hidden, inner, head_dim = map(size, ("hidden_size", "intermediate_size", "head_dim"))
    if raw.get("model_type") in _HEADS_VARY or raw.get("qk_rope_head_dim") is not None:
        head_dim = 0
    queries = size("num_attention_heads") * head_dim
    kv = size("num_key_value_heads") * head_dim
    gated = raw.get("model_type") in _GATED_QUERIES
    shape: tuple[int, ...] = {
        "self_attn.q_proj.weight": (2 * queries if gated else queries, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }.get(_inner(name), (hidden,) if "norm" in name else ())
    if EMBEDDING_NAME.search(name) or name.endswith(OUTPUT_HEADS):
        shape = size("vocab_size"), hidden
    return Tensor.of(shape, dtype) if shape and all(shape) else None


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
