"""Checks of a config, and of headers against it: by the model's own class (`require_fit`), and
those that it does not make, or makes for plain weights alone."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipespec.engine.checkpoint.checkpoint import StoredFiles
from pipespec.engine.formats.architectures import count_field
from pipespec.engine.formats.safetensors_folder import FOREIGN
from pipespec.engine.formats.safetensors_headers import Tensor
from pipespec.engine.formats.slice_tensors import LAYER
from pipespec.errors import ModelError
from pipespec.limits import MAX_COUNT, fault
from pipespec.system.result_cache import load_cached, store_cached
from pipespec.system.validation import shown

# Whole numbers above 0, and the largest.
_SIZES = dict.fromkeys(
    (
        *("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
        *("intermediate_size", "max_position_embeddings", "original_max_position_embeddings"),
    ),
    MAX_COUNT,
) | {"num_hidden_layers": 10_000}
# Suffixes of names of numbers that cannot be negative, and names of numbers that must be positive.
_NOT_NEGATIVE = (
    *("_size", "_dim", "_heads", "_layers", "_rank", "_eps", "_epsilon", "_experts"),
    *("_per_tok", "_softcapping", "sliding_window"),
)
_POSITIVE = ("rope_theta", "rope_local_base_freq", "rotary_emb_base", "partial_rotary_factor")
# Fields that describe a rotary embedding, suffixes of positive numbers in them with the largest,
# and what are lists of such numbers.
_ROPE = ("rope_parameters", "rope_scaling")
_ROPE_MOST = {"factor": 10_000, "_max_position_embeddings": MAX_COUNT}
_ROPE_LISTS = ("short_factor", "long_factor")
_DEEPEST = 8
_HUGE = 1e300  # products of larger numbers are infinite
# Types with a layer for multi-token prediction (MTP) after the last one, which is not decoded.
_WITH_MTP = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa")
# Masks and position tables of older checkpoints, which are not weights.
_TABLES = re.compile(r"(attention|attn)\.(bias|masked_bias)$|position_ids$|inv_freq$")
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


def check_config(path: Path, raw: Mapping[str, Any]) -> None:
    """Raise ModelError if a number in config.json is out of range, is not finite, or has an
    impossible sign; Transformers checks the types. `quantization_config` is not checked."""
    for why in _faults(raw):
        raise ModelError(f"{path / 'config.json'}: {why}; {FOREIGN}")


def _faults(raw: Mapping[str, Any]) -> Iterator[str]:
    for name, size in _SIZES.items():
        if type(raw.get(name)) in (int, float) and (why := fault(name, raw[name], 1, size)):
            yield why[:-1]
    rest = {name: value for name, value in raw.items() if name != "quantization_config"}
    for name, value in _values("", rest, _DEEPEST):
        last, in_rope = name.rpartition(".")[2], name.startswith(_ROPE)
        ends = _ROPE_MOST.items() if in_rope else ()
        most = next((most for end, most in ends if last.endswith(end)), None)
        wanted = None
        if type(value) not in (int, float):
            is_list = isinstance(value, list) and not any(isinstance(e, list) for e in value)
            if most is not None and value is not None and not (is_list and last in _ROPE_LISTS):
                wanted = "a number"
        elif not -_HUGE < value < _HUGE:
            wanted = "a finite number"
        elif (last in _POSITIVE or most is not None) and value <= 0:
            wanted = "above 0"
        elif most is not None and value > most:
            wanted = f"at most {most}"
        elif last == "partial_rotary_factor" and value > 1:
            wanted = "at most 1"
        elif last.endswith(_NOT_NEGATIVE) and value < 0:
            wanted = "0 or more"
        if wanted is not None:
            yield f"{name} is {shown(value)}, but must be {wanted}"
        if in_rope and isinstance(value, dict):
            lists = [each for key in _ROPE_LISTS if isinstance(each := value.get(key), list)]
            if len({len(each) for each in lists}) > 1:
                yield f"{name} must have as many numbers in long_factor as in short_factor"
    heads, kv_heads = raw.get("num_attention_heads"), raw.get("num_key_value_heads")
    if type(heads) is int and type(kv_heads) is int and heads % kv_heads:
        multiple = f"a multiple of num_key_value_heads, which is {shown(kv_heads)}"
        yield f"num_attention_heads is {shown(heads)}, but must be {multiple}"


def _values(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """A value and all that it holds, with their names; elements of lists have that of the list."""
    yield name, value
    if depth:
        for key, inner in value.items() if isinstance(value, dict) else ():
            yield from _values(f"{name}.{key}" if name else str(key), inner, depth - 1)
        for inner in value if isinstance(value, list) else ():
            yield from _values(name, inner, depth - 1)


def check_eos(path: Path, eos: Iterable[int], usual: int | list[int] | None, rows: int) -> None:
    """Raise ModelError if an eos token is outside the embedding, unless it is `usual`, the default
    of the config's class, which is meant for larger models."""
    for token in eos:
        if not 0 <= token < rows and token not in (usual if isinstance(usual, list) else [usual]):
            raise ModelError(
                f"{path} ends texts with the token {shown(token)} (eos_token_id), but its "
                f"vocabulary has {rows} tokens; correct config.json and generation_config.json, or "
                "fetch the checkpoint again"
            )


def check_floats(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise ModelError if a plain weight is stored as anything but floating-point numbers."""
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS and not _TABLES.search(name):
            raise ModelError(
                f"{path} holds {name} as {tensor.dtype}, but plain weights must be floating-point "
                "numbers (F32, BF16 or F16); fetch the checkpoint again"
            )


def check_count(path: Path, raw: Mapping[str, Any], tensors: Iterable[str], count: int) -> None:
    """Raise ModelError if there are tensors of layers beyond `count`, which would be left out of
    the computation. Layers for multi-token prediction are allowed."""
    field = count_field(str(raw.get("model_type")))
    extra = raw.get("num_nextn_predict_layers")
    if type(extra) is not int:
        extra = raw.get("model_type") in _WITH_MTP
    for name in tensors:
        found = LAYER.search(name)
        if found is not None and int(found[1]) >= count + max(extra, 0):
            raise ModelError(
                f"{path} holds {name}, but {field} in config.json is {shown(count)}, so the model "
                "would be decoded without this layer; correct config.json, or fetch the checkpoint "
                "again"
            )


def require_fit(files: StoredFiles, tensors: Mapping[str, Tensor], *, strict: bool) -> None:
    """Raise ModelError unless the model's own class accepts plain weights with these headers
    (`building.check_fit`). Success is cached, like the config."""
    described = sorted((name, each.shape, each.dtype) for name, each in tensors.items())
    depends = {
        "config": files.raw,
        "headers": hashlib.sha256(repr(described).encode()).hexdigest(),
        "strict": strict,
        "transformers": importlib.metadata.version("transformers"),
    }
    if load_cached("fits", depends) is None:
        from pipespec.engine.checkpoint import building  # torch and Transformers

        building.check_fit(files, tensors, strict=strict)
        store_cached("fits", depends, {})
