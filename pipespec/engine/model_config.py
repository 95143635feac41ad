"""What a model's config says of it, with the defaults of its class in Transformers."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipespec.engine.headers import read_json
from pipespec.engine.stored import gguf
from pipespec.errors import ModelError
from pipespec.limits import MAX_COUNT, fault
from pipespec.system.cache import remembered
from pipespec.system.reading import Unreadable, typed

# Of what another library says of a file a message shows so many characters.
LONGEST_REASON = 400
FOREIGN = "correct it, or fetch the checkpoint again"
_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
_MAX_LAYERS = 10_000
# The matrices of which a tensor-parallel plan cuts KV heads, if it does.
_KV = (".k_proj", ".v_proj", ".kv_b_proj")
# Rotary embeddings whose frequencies change once a sequence outgrows this many positions: K
# computed before and after would disagree, so that is where the usable context ends.
_GROWING_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class StoredConfig:
    """What we need of a model's config, with the defaults of its class in Transformers.

    `eos` is as it stands there; see `CheckpointInfo` for the rest.
    """

    heads: int
    kv_heads: int
    shareable: bool
    cuts_kv: bool

    num_layers: int
    hidden_size: int
    context: int
    kv_size: int
    tied: bool
    eos: int | list[int] | None


def read_config(path: Path, raw: Mapping[str, Any]) -> StoredConfig:
    """Transformers' reading of config.json, which is kept: importing it takes seconds."""
    depends = {"config": raw, "transformers": importlib.metadata.version("transformers")}
    return remembered("configs", StoredConfig, depends, lambda: _by_transformers(path))


def _by_transformers(path: Path) -> StoredConfig:
    config = _load_config(path)
    heads, plan = config.num_attention_heads, config.base_model_tp_plan or {}
    return StoredConfig(
        heads,
        heads if _is_latent(config) else _kv_heads(config),
        bool(plan),
        any(name.endswith(_KV) and rule == "colwise" for name, rule in plan.items()),
        config.num_hidden_layers,
        config.hidden_size,
        _context(config),
        _kv_size(config),
        bool(config.tie_word_embeddings),
        getattr(config, "eos_token_id", None),
    )


def _load_config(path: Path) -> Any:
    if gguf.is_gguf(path):
        return gguf.load_config(path)
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # any class's code meets any values
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:LONGEST_REASON]
        raise ModelError(f"{path / 'config.json'} is not valid: {reason}; {FOREIGN}") from error


def check_sizes(path: Path, raw: Mapping[str, Any]) -> None:
    """Raise ModelError if a size in config.json is out of range; Transformers checks types."""
    for name in _SIZES:
        most = _MAX_LAYERS if name == "num_hidden_layers" else MAX_COUNT
        wrong = fault(name, raw.get(name), 1, most)
        if wrong and type(raw.get(name)) in (int, float):
            raise ModelError(f"{path / 'config.json'}: {wrong[:-1]}; fetch the checkpoint again")


def _kv_size(config: Any) -> int:
    heads = config.num_attention_heads
    if _is_latent(config):
        return int(heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(2 * head_dim * _kv_heads(config))


def _is_latent(config: Any) -> bool:
    """Whether K and V are made of fewer numbers for every query head."""
    return getattr(config, "qk_rope_head_dim", None) is not None


def _kv_heads(config: Any) -> int:
    # A config.json may name what its architecture ignores; the class knows.
    grouped = hasattr(type(config), "num_key_value_heads") and config.num_key_value_heads
    return int(grouped or config.num_attention_heads)


def _context(config: Any) -> int:
    context = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _GROWING_ROPE:
        original = rope.get("original_max_position_embeddings")
        original = original or getattr(config, "original_max_position_embeddings", None)
        context = min(context, int(original or context))
    return context


def read_eos(path: Path, config: StoredConfig) -> tuple[int, ...]:
    """The token ids that end a text. Raises ModelError."""
    if gguf.is_gguf(path):
        return tuple(gguf.header(path).eos)
    generation = path / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.is_file() else None
    if eos is None:
        eos = config.eos
    if eos is None:
        return ()
    try:
        return typed("eos_token_id", eos if isinstance(eos, list) else [eos], tuple[int, ...])
    except Unreadable as error:
        raise ModelError(f"{path}: {error}; {FOREIGN}") from error
