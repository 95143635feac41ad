"""Checks of headers against the config: by the model's own class (`require_fit`), and those that it
does not make, or makes for plain weights alone."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipespec.engine.checkpoint.checkpoint import Checkpoint
from pipespec.engine.formats.architectures import count_field
from pipespec.engine.formats.safetensors_headers import Tensor
from pipespec.engine.formats.slice_tensors import LAYER
from pipespec.errors import ModelError
from pipespec.system.result_cache import cached_call
from pipespec.system.validation import shown

REMEDY = "fetch the checkpoint again"
# Types with a layer for multi-token prediction (MTP) after the last one, which is not decoded.
_WITH_MTP = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa")
# Masks and position tables of older checkpoints, which are not weights.
_TABLES = re.compile(r"(attention|attn)\.(bias|masked_bias)$|position_ids$|inv_freq$")
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


def check_heads(path: Path, raw: Mapping[str, Any]) -> None:
    """Raise ModelError unless every KV head has as many query heads as the others."""
    heads, kv_heads = raw.get("num_attention_heads"), raw.get("num_key_value_heads")
    if type(heads) is int and type(kv_heads) is int and heads % kv_heads:
        raise ModelError(
            f"{path / 'config.json'}: num_attention_heads is {shown(heads)}, but must be a "
            f"multiple of num_key_value_heads, which is {shown(kv_heads)}; correct it, or {REMEDY}"
        )


def check_eos(path: Path, eos: Iterable[int], usual: int | list[int] | None, rows: int) -> None:
    """Raise ModelError if an eos token is outside the embedding, unless it is `usual`, the default
    of the config's class, which is meant for larger models."""
    for token in eos:
        if not 0 <= token < rows and token not in (usual if isinstance(usual, list) else [usual]):
            raise ModelError(
                f"{path} ends texts with the token {shown(token)} (eos_token_id), but its "
                f"vocabulary has {rows} tokens; correct config.json and generation_config.json, or "
                f"{REMEDY}"
            )


def check_floats(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise ModelError if a plain weight is stored as anything but floating-point numbers."""
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS and not _TABLES.search(name):
            raise ModelError(
                f"{path} holds {name} as {tensor.dtype}, but plain weights must be floating-point "
                f"numbers (F32, BF16 or F16); {REMEDY}"
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
                f"{path} holds {name}, but {field} in config.json is {shown(count)}, so "
                f"the model would be decoded without this layer; correct config.json, or {REMEDY}"
            )


@dataclass(frozen=True)
class _Fits:
    """The cached result of `require_fit`."""


def require_fit(checkpoint: Checkpoint, tensors: Mapping[str, Tensor], *, strict: bool) -> None:
    """Raise ModelError unless the model's own class accepts plain weights with these headers
    (`building.check_fit`). Success is cached, like the config."""
    described = sorted((name, each.shape, each.dtype) for name, each in tensors.items())
    depends = {
        "config": checkpoint.files.raw,
        "headers": hashlib.sha256(repr(described).encode()).hexdigest(),
        "strict": strict,
        "transformers": importlib.metadata.version("transformers"),
    }

    def make() -> _Fits:
        from pipespec.engine.checkpoint import building  # torch and Transformers

        building.check_fit(checkpoint, tensors, strict=strict)
        return _Fits()

    cached_call("fits", _Fits, depends, make)
