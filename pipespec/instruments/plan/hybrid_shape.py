"""The sizes of models whose layers differ in how they mix tokens, from their configs alone.

Layers with a running state have no K and V, and other matrices than attention; of Nemotron H a
layer mixes tokens or has an MLP or experts. A plan counts all layers alike, so it takes the mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

from pipespec.engine.recurrence.state_sizes import RecurrentSizes, recurrent_sizes

# Configs that need not list their layers: every so many one attends, the others keep a state.
_INTERVAL = 4
_STATE, _ATTENTION, _BOTH = "linear_attention", "full_attention", "hybrid"
_MLP, _EXPERTS = "mlp", "moe"
_OLD_NAMES = {"mamba": _STATE, "conv": _STATE, "attention": _ATTENTION}
_PATTERN = {"M": _STATE, "*": _ATTENTION, "-": _MLP, "E": _EXPERTS}
_EVERY_FEW = ("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
HYBRIDS = (
    *_EVERY_FEW,
    *("bamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "lfm2_moe", "nemotron_h"),
)
# Their queries come with as many numbers of a gate.
GATED_QUERIES = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
# What the class of a config takes for a field that it does not have.
_DENSE_LAYERS = {"kimi_linear": ("first_k_dense_replace", 1), "lfm2_moe": ("num_dense_layers", 2)}


class MeanLayer(NamedTuple):
    """The mean over all layers: parameters that mix tokens, numbers of K and V of a token, shares
    of the layers with an MLP, with experts and with a running state."""

    mixer: int
    kv: int
    mlps: float
    experts: float
    states: float


def layer_kinds(raw: Mapping[str, Any]) -> list[str]:
    """The kind of each layer of one of HYBRIDS. Raises KeyError or TypeError without them."""
    model_type = raw.get("model_type")
    if model_type == "nemotron_h":
        pattern = raw.get("hybrid_override_pattern")
        listed = raw.get("layers_block_type") or raw.get("layer_types")
        listed = listed or [_PATTERN[each] for each in pattern]  # type: ignore[union-attr]
        return [_OLD_NAMES.get(kind, kind) for kind in listed]
    count = raw["num_hidden_layers"]
    if model_type == "falcon_h1":
        return [_BOTH] * count
    listed = raw.get("layer_types") or raw.get("layers_block_type")
    if listed:
        return [_OLD_NAMES.get(kind, kind) for kind in listed]
    if model_type in _EVERY_FEW:
        every = raw.get("full_attention_interval") or _INTERVAL
        return [_STATE if (number + 1) % every else _ATTENTION for number in range(count)]
    if model_type == "kimi_linear":
        kept = (raw.get("linear_attn_config") or {}).get("full_attn_layers")
        every = range(_INTERVAL, count, _INTERVAL)
        attending = list(every) if kept is None else [number - 1 for number in kept]
    else:
        attending = list(raw.get("attn_layer_indices") or raw.get("full_attn_idxs") or ())
    return [_ATTENTION if number in attending else _STATE for number in range(count)]


def kept_sizes(raw: Mapping[str, Any], hidden: int) -> RecurrentSizes:
    """What a layer with a running state keeps. Raises ModelError, KeyError or AttributeError
    without sizes."""
    model_type = str(raw.get("model_type"))
    kind = "conv" if model_type.startswith("lfm2") else _STATE
    values = {**raw, "hidden_size": hidden, "layer_types": [kind]}
    if model_type == "kimi_linear":
        values |= _kimi(raw)
    elif raw.get("mamba_d_head", "auto") == "auto" and "mamba_n_heads" in raw:
        values["mamba_d_head"] = raw.get("mamba_expand", 2) * hidden // raw["mamba_n_heads"]
    found = recurrent_sizes(SimpleNamespace(**values))
    assert found is not None  # there is a layer of such a kind
    return found


def _kimi(raw: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of Kimi's delta attention, which published configs have in a section."""
    section = raw.get("linear_attn_config")
    if section is None:
        section = {
            "num_heads": raw["linear_num_heads"],
            "head_dim": raw["linear_head_dim"],
            "short_conv_kernel_size": raw["linear_conv_kernel_dim"],
        }
    return {
        "linear_num_heads": section["num_heads"],
        "linear_head_dim": section["head_dim"],
        "linear_conv_kernel_dim": section["short_conv_kernel_size"],
    }


def state_parameters(raw: Mapping[str, Any], hidden: int) -> int:
    """Parameters of the matrices of a layer's running state. Raises KeyError without sizes."""
    model_type = str(raw.get("model_type"))
    if model_type.startswith("lfm2"):
        return 4 * hidden * hidden
    if model_type == "kimi_linear":
        found = _kimi(raw)
        heads, size = found["linear_num_heads"], found["linear_head_dim"]
        # q, k, v, o and b; decays and gates come through a bottleneck as wide as a head.
        return hidden * (4 * heads * size + heads) + 2 * size * (hidden + heads * size)
    if model_type in _EVERY_FEW:
        heads = raw["linear_num_value_heads"]
        keys = raw["linear_num_key_heads"] * raw["linear_key_head_dim"]
        values = heads * raw["linear_value_head_dim"]
        return int(hidden * (2 * keys + 3 * values + 2 * heads))
    if model_type == "nemotron_h":
        heads, groups, state = raw["mamba_num_heads"], raw["n_groups"], raw["ssm_state_size"]
        inner = heads * raw["mamba_head_dim"]
    else:
        heads, groups, state = raw["mamba_n_heads"], raw["mamba_n_groups"], raw["mamba_d_state"]
        size = raw.get("mamba_d_head", "auto")
        inner = heads * size if size != "auto" else raw.get("mamba_expand", 2) * hidden
    return int(hidden * (3 * inner + 2 * groups * state + heads))


def adjusted_inner(raw: Mapping[str, Any], inner: int) -> int:
    """The width of the MLPs of LFM2, which its class derives from `intermediate_size`."""
    if not raw.get("block_auto_adjust_ff_dim", True):
        return inner
    block = raw.get("block_multiple_of", 256)
    inner = int(raw.get("block_ffn_dim_multiplier", 1.0) * (2 * inner // 3))
    return -(-inner // block) * int(block)


def mean_layer(
    raw: Mapping[str, Any], hidden: int, attention: int, kv: int, *, experts: bool
) -> MeanLayer:
    """The mean of the layers, given those of a layer that attends: its parameters, and the numbers
    of K and V of a token. `experts`: the model has some. Raises KeyError or TypeError."""
    kinds = layer_kinds(raw)
    count = len(kinds)
    attending = sum(kind in (_ATTENTION, _BOTH) for kind in kinds)
    keeping = sum(kind in (_STATE, _BOTH) for kind in kinds)
    mixers = attending * attention + keeping * state_parameters(raw, hidden)
    if raw.get("model_type") == "nemotron_h":
        dense, sparse = kinds.count(_MLP), kinds.count(_EXPERTS)
    else:
        dense = _dense_layers(raw, count) if experts else count
        sparse = count - dense
    return MeanLayer(
        mixers // count, kv * attending // count, dense / count, sparse / count, keeping / count
    )


def _dense_layers(raw: Mapping[str, Any], count: int) -> int:
    """Layers of a mixture that have an MLP without experts."""
    listed = raw.get("mlp_layer_types")
    if listed:
        return int(list(listed).count("dense"))
    field, usual = _DENSE_LAYERS.get(str(raw.get("model_type")), ("", 0))
    found = raw.get(field)
    return min(int(usual if found is None else found), count)
