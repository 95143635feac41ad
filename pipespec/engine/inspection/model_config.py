"""Reads a model's config, with the defaults of its class in Transformers. As a program, for
`read_config` alone, it caches that of the model at a path, without importing torch."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipespec.engine.checkpoint.checkpoint import StoredFiles, open_files
from pipespec.engine.formats.architectures import count_field
from pipespec.engine.formats.rotary import reach
from pipespec.engine.formats.safetensors_headers import read_json
from pipespec.engine.recurrence.state_sizes import (
    RecurrentSizes,
    layers_with_kv,
    layers_with_state,
    recurrent_sizes,
)
from pipespec.engine.tensor_parallel.tp_cuts import has_plan
from pipespec.errors import ModelError
from pipespec.system.result_cache import cached_call, load_cached

# The version of cached facts: increase it when `_by_transformers` changes its result.
FORM = 3
# The matrices in which a tensor-parallel plan may divide KV heads.
_KV = (".k_proj", ".v_proj", ".kv_b_proj")


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model's config, with the defaults of its class in Transformers.

    Attributes:
        context: tokens of the longest sequence.
        unscaled: a context of more tokens has other rotary frequencies, from the first token on;
            None: they do not depend on it.
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
    unscaled: int | None
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


def read_config(files: StoredFiles, raw: Mapping[str, Any]) -> StoredConfig:
    """The config as Transformers reads it from `raw`; cached, as importing Transformers takes
    seconds. Most of them are torch's, which configs do not need, so that a process without torch
    has another one read it."""
    settings = files.path / "tokenizer_config.json"
    claimed = None
    if '"linear"' in json.dumps(raw) and settings.is_file():  # else it changes nothing
        found = read_json(settings).get("model_max_length")
        claimed = found if type(found) is int else None
    depends = {
        "config": raw,
        "claimed": claimed,
        "transformers": importlib.metadata.version("transformers"),
        "form": FORM,
    }
    if "torch" not in sys.modules and load_cached("configs", depends) is None:
        words = [sys.executable, "-m", __name__, str(files.path)]
        ended = subprocess.run(words, capture_output=True, encoding="utf-8", errors="replace")
        if ended.returncode == ModelError.exit_code:
            raise ModelError(ended.stdout)
    return cached_call("configs", StoredConfig, depends, _by_transformers, files, claimed)


def _by_transformers(files: StoredFiles, claimed: int | None) -> StoredConfig:
    config = files.config()
    heads = max(layer.num_attention_heads for layer in _layers(config))
    plan = config.base_model_tp_plan or {}
    context, unscaled = reach(config, claimed)
    # Sparse attention sees every key as long as there are no more than it selects.
    context = min(context, getattr(config, "index_topk", None) or context)
    return StoredConfig(
        num_layers=getattr(config, count_field(config.model_type)),
        hidden_size=config.hidden_size,
        context=context,
        unscaled=unscaled,
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


def _layers(config: Any) -> Sequence[Any]:
    """The config of each layer if they differ, or that of all."""
    return config.per_layer_config if config.is_heterogeneous else (config,)


def _kv_size(config: Any) -> int:
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
    return getattr(config, "qk_nope_head_dim", None) is not None


def _kv_heads(config: Any) -> int:
    # config.json may contain a field that its architecture ignores; the class knows.
    if config.model_type == "jetmoe":  # it repeats K and V for the experts of its attention
        return int(config.num_attention_heads)
    grouped = hasattr(type(config), "num_key_value_heads") and config.num_key_value_heads
    return int(grouped or config.num_attention_heads)


def main() -> int:
    """Cache the config of the model at the path in `sys.argv`; a refusal goes to stdout."""
    sys.modules["torch"] = None  # type: ignore[assignment] # as if it were not installed
    files = open_files(Path(sys.argv[1]))
    try:
        read_config(files, files.raw)
    except ModelError as error:
        sys.stdout.write(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
