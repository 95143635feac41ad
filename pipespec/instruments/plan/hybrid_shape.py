"""The sizes of models whose layers differ in how they mix tokens, from their configs alone.

Layers with a running state have no K and V, and other matrices than attention. A plan counts all
layers alike, so it takes the mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Configs that need not list their layers: every so many one attends, the others keep a state.
_INTERVAL = 4
_STATE, _ATTENTION, _BOTH = "linear_attention", "full_attention", "hybrid"
_OLD_NAMES = {"mamba": _STATE, "conv": _STATE, "attention": _ATTENTION}
_EVERY_FEW = ("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
HYBRIDS = (*_EVERY_FEW, "bamba", "falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe")
# Their queries come with as many numbers of a gate.
GATED_QUERIES = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")


def layer_kinds(raw: Mapping[str, Any]) -> list[str]:
    """The kind of each layer of one of HYBRIDS."""
    count, model_type = raw["num_hidden_layers"], raw.get("model_type")
    if model_type == "falcon_h1":
        return [_BOTH] * count
    listed = raw.get("layer_types") or raw.get("layers_block_type")
    if listed:
        return [_OLD_NAMES.get(kind, kind) for kind in listed]
    if model_type in _EVERY_FEW:
        every = raw.get("full_attention_interval") or _INTERVAL
        return [_STATE if (number + 1) % every else _ATTENTION for number in range(count)]
    attending = raw.get("attn_layer_indices") or raw.get("full_attn_idxs") or ()
    return [_ATTENTION if number in attending else _STATE for number in range(count)]


def state_parameters(raw: Mapping[str, Any], hidden: int) -> int:
    """Parameters of the matrices of a layer's running state. Raises KeyError without sizes."""
    model_type = str(raw.get("model_type"))
    if model_type.startswith("lfm2"):
        return 4 * hidden * hidden
    if model_type in _EVERY_FEW:
        heads = raw["linear_num_value_heads"]
        keys = raw["linear_num_key_heads"] * raw["linear_key_head_dim"]
        values = heads * raw["linear_value_head_dim"]
        return int(hidden * (2 * keys + 3 * values + 2 * heads))
    heads = raw["mamba_n_heads"]
    size = raw.get("mamba_d_head", "auto")
    inner = heads * size if size != "auto" else raw.get("mamba_expand", 2) * hidden
    wide = 3 * inner + 2 * raw["mamba_n_groups"] * raw["mamba_d_state"] + heads
    return int(hidden * wide)


def adjusted_inner(raw: Mapping[str, Any], inner: int) -> int:
    """The width of the MLPs of LFM2, which its class derives from `intermediate_size`."""
    if not raw.get("block_auto_adjust_ff_dim", True):
        return inner
    block = raw.get("block_multiple_of", 256)
    inner = int(raw.get("block_ffn_dim_multiplier", 1.0) * (2 * inner // 3))
    return -(-inner // block) * int(block)


def mean_mixer(raw: Mapping[str, Any], hidden: int, attention: int, kv: int) -> tuple[int, int]:
    """The mean over all layers of the parameters that mix tokens, and of the numbers of K and V of
    a token, given those of a layer that attends."""
    kinds = layer_kinds(raw)
    attending = sum(kind in (_ATTENTION, _BOTH) for kind in kinds)
    keeping = sum(kind in (_STATE, _BOTH) for kind in kinds)
    mixers = attending * attention + keeping * state_parameters(raw, hidden)
    return mixers // len(kinds), kv * attending // len(kinds)
