"""Reads a model's config, with the defaults of its class in Transformers."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipespec.engine.architectures import WRAPPERS, count_field
from pipespec.engine.checkpoint.formats import gguf
from pipespec.engine.checkpoint.safetensors_headers import Tensor, read_json
from pipespec.engine.recurrence.state_sizes import (
    RecurrentSizes,
    layers_with_kv,
    layers_with_state,
    recurrent_sizes,
)
from pipespec.engine.tp_divisibility import has_plan
from pipespec.errors import ModelError
from pipespec.limits import MAX_COUNT, fault
from pipespec.system.result_cache import cached_call
from pipespec.system.validation import Unreadable, shown, typed

# Characters of another library's message in an error message.
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
class StoredConfig:
    """The fields of a model's config that we need, with the defaults of its class in Transformers.

    `eos` is `eos_token_id` as it is; see `CheckpointInfo` for the rest.
    """

    heads: int
    kv_heads: int
    has_tp_plan: bool
    tp_plan_splits_kv: bool

    num_layers: int
    hidden_size: int
    context: int
    kv_size: int
    has_kv: tuple[bool, ...]
    has_state: tuple[bool, ...]
    recurrent: RecurrentSizes | None
    tied: bool
    eos: int | list[int] | None


def read_config(path: Path, raw: Mapping[str, Any]) -> StoredConfig:
    """The config as Transformers reads it; cached, as importing Transformers takes seconds."""
    depends = {"config": raw, "transformers": importlib.metadata.version("transformers")}
    return cached_call("configs", StoredConfig, depends, _by_transformers, path)


def _by_transformers(path: Path) -> StoredConfig:
    config = load_config(path)
    heads = max(layer.num_attention_heads for layer in _layers(config))
    plan = config.base_model_tp_plan or {}
    return StoredConfig(
        heads,
        max(heads if _is_latent(layer) else _kv_heads(layer) for layer in _layers(config)),
        has_plan(config),
        any(name.endswith(_KV) and rule == "colwise" for name, rule in plan.items()),
        getattr(config, count_field(config.model_type)),
        config.hidden_size,
        _context(config),
        _kv_size(config),
        layers_with_kv(config),
        layers_with_state(config),
        recurrent_sizes(config),
        bool(config.tie_word_embeddings),
        getattr(config, "eos_token_id", None),
    )


@dataclass(frozen=True)
class Fit:
    """The cached result of `loading.check_fit`: how many tensors the model leaves out."""

    left_out: int


def require_fit(
    path: Path, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], *, strict: bool
) -> None:
    """Raise ModelError unless the model's own class accepts plain weights with these headers
    (`loading.check_fit`). Success is cached, like the config."""
    described = sorted((name, each.shape, each.dtype) for name, each in tensors.items())
    depends = {
        "config": raw,
        "headers": hashlib.sha256(repr(described).encode()).hexdigest(),
        "strict": strict,
        "transformers": importlib.metadata.version("transformers"),
    }

    def make() -> Fit:
        from pipespec.engine import loading  # torch and Transformers

        return Fit(loading.check_fit(path, tensors, strict=strict))

    cached_call("fits", Fit, depends, make)


def load_config(path: Path) -> Any:
    """The config of a checkpoint, or of its text part, as Transformers reads it. Raises
    ModelError."""
    if gguf.is_gguf(path):
        return gguf.load_config(path)
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # model code may raise anything for invalid values
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:LONGEST_REASON]
        raise ModelError(f"{path / 'config.json'} is not valid: {reason}; {FOREIGN}") from error
    config = _text_config(config)
    _require_layers(path, config)
    return config


def _text_config(whole: Any) -> Any:
    """The config of the text part of a multimodal model; that of another model is itself."""
    if whole.model_type not in WRAPPERS:
        return whole
    config = whole.text_config
    config.tie_word_embeddings = whole.tie_word_embeddings
    config.name_or_path = whole.name_or_path
    for name in ("dtype", "eos_token_id", "quantization_config"):
        if getattr(config, name, None) is None and getattr(whole, name, None) is not None:
            setattr(config, name, getattr(whole, name))
    return config


def _require_layers(path: Path, config: Any) -> None:
    """Raise ModelError if layers of a supported architecture are of a kind that is not."""
    wrong = None
    if getattr(config, "hidden_size_per_layer_input", None):
        wrong = "reads embeddings of the tokens in every layer (hidden_size_per_layer_input)"
    elif getattr(config, "num_kv_shared_layers", None):
        wrong = "has layers that attend to K and V of other layers (num_kv_shared_layers)"
    elif getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        wrong = "attends to later tokens (use_bidirectional_attention)"
    if wrong is not None:
        raise ModelError(
            f"{path} {wrong}, which a pipeline of slices cannot compute; take a checkpoint of "
            f"{config.model_type} without it"
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


def _kv_size(config: Any) -> int:
    """The most numbers that K and V of a token have in one layer."""
    return max(map(_kv_size_of_layer, _layers(config)))


def _layers(config: Any) -> Sequence[Any]:
    """The config of each layer if they differ, or that of all."""
    return config.per_layer_config if config.is_heterogeneous else (config,)


def _kv_size_of_layer(config: Any) -> int:
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


def read_eos(path: Path, stored: Any) -> tuple[int, ...]:
    """The token ids that end a text, given the `eos_token_id` of the config. Raises ModelError."""
    if gguf.is_gguf(path):
        return tuple(gguf.header(path).eos)
    generation = path / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.is_file() else None
    if eos is None:
        eos = stored
    if eos is None:
        return ()
    try:
        return typed("eos_token_id", eos if isinstance(eos, list) else [eos], tuple[int, ...])
    except Unreadable as error:
        raise ModelError(f"{path}: {error}; {FOREIGN}") from error
