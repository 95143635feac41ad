"""Reads a model's config, with the defaults of its class in Transformers."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipespec.engine.checkpoint.checkpoint import Checkpoint
from pipespec.engine.formats.architectures import count_field
from pipespec.engine.formats.safetensors_folder import FOREIGN
from pipespec.engine.recurrence.state_sizes import (
    RecurrentSizes,
    layers_with_kv,
    layers_with_state,
    recurrent_sizes,
)
from pipespec.engine.tensor_parallel.tp_cuts import has_plan
from pipespec.errors import ModelError
from pipespec.limits import MAX_COUNT, fault
from pipespec.system.result_cache import cached_call
from pipespec.system.validation import shown

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
# Suffixes of names of numbers that cannot be negative, and names of numbers that must be positive.
_NOT_NEGATIVE = (
    *("_size", "_dim", "_heads", "_layers", "_rank", "_eps", "_epsilon", "_experts"),
    *("_per_tok", "_softcapping", "sliding_window"),
)
_POSITIVE = ("rope_theta", "rope_local_base_freq", "rotary_emb_base", "partial_rotary_factor")
# Fields that describe a rotary embedding, and suffixes of positive numbers in them.
_ROPE = ("rope_parameters", "rope_scaling")
_ROPE_POSITIVE = ("factor", "_max_position_embeddings", "attention_factor")
_DEEPEST = 8
_HUGE = 1e300  # products of larger numbers are infinite
# The matrices in which a tensor-parallel plan may divide KV heads.
_KV = (".k_proj", ".v_proj", ".kv_b_proj")
# Rotary embeddings whose frequencies change once a sequence outgrows this many positions: K
# computed before and after would disagree, so that is where the usable context ends.
_GROWING_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model's config, with the defaults of its class in Transformers.

    Attributes:
        context: tokens of the longest sequence.
        kv_size: numbers that K and V of one token have in one layer.
        kv_heads: KV heads of a layer.
        has_kv, has_state: which layers hold K and V, and which keep a running state; empty: all
            hold K and V, none keeps a state.
        recurrent: what a layer with a running state keeps; None: there is none.
        tied: the embedding is the output head too.
        has_tp_plan: Transformers has a tensor-parallel plan for the architecture.
        tp_plan_splits_kv: that plan divides the KV heads.
    """

    num_layers: int
    hidden_size: int
    context: int
    kv_size: int
    kv_heads: int
    has_kv: tuple[bool, ...]
    has_state: tuple[bool, ...]
    recurrent: RecurrentSizes | None
    tied: bool
    has_tp_plan: bool
    tp_plan_splits_kv: bool


@dataclass(frozen=True)
class StoredConfig(ModelFacts):
    """The same with `eos_token_id` as it is, and as the class has it by default."""

    eos: int | list[int] | None
    usual_eos: int | list[int] | None


def read_config(path: Path, raw: Mapping[str, Any]) -> StoredConfig:
    """The config as Transformers reads it; cached, as importing Transformers takes seconds."""
    depends = {"config": raw, "transformers": importlib.metadata.version("transformers")}
    return cached_call("configs", StoredConfig, depends, _by_transformers, path)


def _by_transformers(path: Path) -> StoredConfig:
    config = Checkpoint(path).files.config()
    heads = max(layer.num_attention_heads for layer in _layers(config))
    plan = config.base_model_tp_plan or {}
    return StoredConfig(
        num_layers=getattr(config, count_field(config.model_type)),
        hidden_size=config.hidden_size,
        context=_context(config),
        kv_size=max(map(_kv_size, _layers(config))),
        kv_heads=max(heads if _is_latent(layer) else _kv_heads(layer) for layer in _layers(config)),
        has_kv=layers_with_kv(config),
        has_state=layers_with_state(config),
        recurrent=recurrent_sizes(config),
        tied=bool(config.tie_word_embeddings),
        eos=getattr(config, "eos_token_id", None),
        usual_eos=getattr(type(config)(), "eos_token_id", None),
        has_tp_plan=has_plan(config),
        tp_plan_splits_kv=any(
            name.endswith(_KV) and rule == "colwise" for name, rule in plan.items()
        ),
    )


def check_sizes(path: Path, raw: Mapping[str, Any]) -> None:
    """Raise ModelError if a size in config.json is out of range; Transformers checks the types."""
    for name in _SIZES:
        most = _MAX_LAYERS if name == "num_hidden_layers" else MAX_COUNT
        wrong = fault(name, raw.get(name), 1, most)
        if wrong and type(raw.get(name)) in (int, float):
            raise ModelError(f"{path / 'config.json'}: {wrong[:-1]}; fetch the checkpoint again")


def check_numbers(path: Path, raw: Mapping[str, Any]) -> None:
    """Raise ModelError if a number in config.json is not finite, or has an impossible sign.
    `quantization_config` is not checked."""
    rest = {name: value for name, value in raw.items() if name != "quantization_config"}
    for name, value in _numbers("", rest, _DEEPEST):
        last = name.rpartition(".")[2]
        in_rope = name.startswith(_ROPE)
        wanted = None
        if not -_HUGE < value < _HUGE:
            wanted = "a finite number"
        elif last in _POSITIVE or (in_rope and last.endswith(_ROPE_POSITIVE)):
            wanted = "above 0" if value <= 0 else None
        elif last.endswith(_NOT_NEGATIVE):
            wanted = "0 or more" if value < 0 else None
        if last == "partial_rotary_factor" and value > 1:
            wanted = "at most 1"
        if wanted is not None:
            raise ModelError(
                f"{path / 'config.json'}: {name} is {shown(value)}, but must be {wanted}; {FOREIGN}"
            )


def _numbers(prefix: str, value: Any, depth: int) -> Iterator[tuple[str, float]]:
    """Names and values of the numbers in a JSON value, to that depth."""
    if type(value) in (int, float):
        yield prefix, value
    elif depth:
        pairs = value.items() if isinstance(value, dict) else ()
        for name, inner in pairs:
            yield from _numbers(f"{prefix}.{name}" if prefix else str(name), inner, depth - 1)
        for inner in value if isinstance(value, list) else ():
            yield from _numbers(prefix, inner, depth - 1)


def _layers(config: Any) -> Sequence[Any]:
    """The config of each layer if they differ, or that of all."""
    return config.per_layer_config if config.is_heterogeneous else (config,)


def _kv_size(config: Any) -> int:
    """How many numbers K and V of a token have in a layer."""
    heads = config.num_attention_heads
    if config.model_type == "mimo_v2_flash":  # sliding layers have twice the heads
        return int(2 * config.num_key_value_heads * (config.head_dim + config.v_head_dim))
    if _is_latent(config):
        sublayers = 2 if config.model_type == "longcat_flash" else 1
        heads *= sublayers
        return int(heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(2 * head_dim * _kv_heads(config))


def _is_latent(config: Any) -> bool:
    """Whether K and V are computed from a latent vector (MLA)."""
    return getattr(config, "qk_rope_head_dim", None) is not None


def _kv_heads(config: Any) -> int:
    # config.json may contain a field that its architecture ignores; the class knows.
    if config.model_type == "jetmoe":  # it repeats K and V for the experts of its attention
        return int(config.num_attention_heads)
    grouped = hasattr(type(config), "num_key_value_heads") and config.num_key_value_heads
    return int(grouped or config.num_attention_heads)


def _context(config: Any) -> int:
    context = int(config.max_position_embeddings)
    # Sparse attention sees every key as long as there are no more than it selects.
    context = min(context, getattr(config, "index_topk", None) or context)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _GROWING_ROPE:
        original = rope.get("original_max_position_embeddings")
        original = original or getattr(config, "original_max_position_embeddings", None)
        context = min(context, int(original or context))
    return context
