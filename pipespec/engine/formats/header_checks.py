"""Checks whether the headers of a checkpoint fit its config, by names and shapes.

The checks take milliseconds and import neither torch nor Transformers, so that common faults are
reported at once. They hold for every supported architecture, and skip tensors with unusual names.
`building.check_fit` checks all tensors, with the model's own class.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from pipespec.engine.formats.architectures import count_field
from pipespec.engine.formats.safetensors_headers import Tensor
from pipespec.engine.formats.slice_tensors import LAYER, OUTPUT_HEADS
from pipespec.errors import ModelError
from pipespec.limits import suggest
from pipespec.system.validation import shown

REMEDY = "fetch the checkpoint again"
# Fields with the kind of each layer, of attention and of what follows it.
_LAYER_KINDS = (
    "layer_types",
    "layers_block_type",
    "mlp_layer_types",
    "indexer_types",
    "num_attention_heads_per_layer",
)
# Tensors that only some layers of a mixture have, where others are dense.
_VARYING = ("mlp.", "block_sparse_moe.", "feed_forward.", "moe.")
# Types whose class derives the size of a head from hidden_size and ignores `head_dim`.
_HEAD_DIM_IGNORED = ("stablelm",)
# Types whose queries come with as many numbers of a gate.
_GATED_QUERIES = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
# Types whose layers differ in the number or size of their heads.
_HEADS_VARY = ("dots3_note_text", "gemma4_text", "gemma4_unified_text", "laguna", "mimo_v2_flash")
# Types with a layer for multi-token prediction (MTP) after the last one, which is not decoded.
_WITH_MTP = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa")
# Masks and position tables of older checkpoints, which are not weights.
_TABLES = re.compile(r"(attention|attn)\.(bias|masked_bias)$|position_ids$|inv_freq$")
_EXPERT = re.compile(r"(.*\bexperts\.)(\d+)(\..*)")
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
# Default eos tokens of config classes, which may lie outside the vocabulary of a small model.
USUAL_EOS = {
    **dict.fromkeys(("arcee", "bitnet", "smollm3", "youtu"), (128001,)),
    **dict.fromkeys(("axk1", "axk2"), (163691,)),
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe"), (255001,)),
    "cwm": (128001, 128008, 128009),
    "dots3_note_text": (151668,),
    **dict.fromkeys(("flex_olmo", "granite_swa", "olmo_hybrid"), (100257,)),
    **dict.fromkeys(("glm", "glm4"), (151329, 151336, 151338)),
    **dict.fromkeys(("olmo", "olmo2", "olmo3", "olmoe"), (50279,)),
    "jais2": (150024,),
    "kimi_linear": (163586,),
    "minimax_m2": (200020,),
    "phi3": (32000,),
    "starcoder2": (50256,),
}
# Names of `transformers.activations.ACT2FN`.
ACTIVATIONS = (
    *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python"),
    *("gelu_python_tanh", "gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear"),
    *("mish", "prelu", "quick_gelu", "relu", "relu2", "relu6", "sigmoid", "silu"),
    *("sqrtsoftplus", "swish", "tanh", "xielu"),
)


def require_consistent(
    path: Path, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], *, plain: bool
) -> None:
    """Make all checks below; `plain`: the tensors are plain weights. Raises ModelError."""
    check_activation(path, raw)
    check_heads(path, raw)
    if plain:
        check_floats(path, tensors)
        check_layers(path, raw, tensors)
        check_shapes(path, raw, tensors)


def check_activation(path: Path, raw: Mapping[str, Any]) -> None:
    """Raise ModelError if config.json names an activation function that does not exist."""
    for name in ("hidden_act", "hidden_activation"):
        value = raw.get(name)
        if isinstance(value, str) and value not in ACTIVATIONS:
            raise ModelError(
                f"{path / 'config.json'}: {name} is {shown(value)}, which is no activation "
                f"function; {suggest(value, ACTIVATIONS)}"
            )


def check_heads(path: Path, raw: Mapping[str, Any]) -> None:
    """Raise ModelError unless every KV head has as many query heads as the others."""
    heads, kv_heads = raw.get("num_attention_heads"), raw.get("num_key_value_heads")
    if type(heads) is int and type(kv_heads) is int and heads % kv_heads:
        raise ModelError(
            f"{path / 'config.json'}: num_attention_heads is {shown(heads)}, but must be a "
            f"multiple of num_key_value_heads, which is {shown(kv_heads)}; correct it, or {REMEDY}"
        )


def check_eos(path: Path, model_type: str, eos: Iterable[int], rows: int) -> None:
    """Raise ModelError if an eos token is outside the embedding, unless it is the default of the
    config's class, which is meant for larger models."""
    for token in eos:
        if not 0 <= token < rows and token not in USUAL_EOS.get(model_type, ()):
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


def check_layers(path: Path, raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raise ModelError if there are tensors of layers beyond num_hidden_layers, or if layers differ
    in their tensors."""
    count = raw.get(count_field(str(raw.get("model_type"))))
    layers: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if (found := LAYER.search(name)) is not None:
            layers.setdefault(found[2], {})[int(found[1])] = tensor
    if type(count) is int:
        check_count(path, raw, tensors, count)
    numbers = {number for held in layers.values() for number in held}
    if type(count) is int:
        absent = next((number for number in range(count) if number not in numbers), None)
        if absent is not None:
            raise ModelError(
                f"{path} holds no tensor of layer {absent}, though config.json counts {count} "
                f"layers; {REMEDY}"
            )
        numbers = {number for number in numbers if number < count}
    mixture = any("expert" in suffix for suffix in layers)
    _check_experts(path, raw, layers)
    for suffix, held in layers.items():
        varies = mixture and suffix.startswith(_VARYING)
        weight = suffix.endswith((".weight", ".bias")) and not _TABLES.search(suffix)
        for alike in _kinds(raw, numbers):
            inside = {number: each for number, each in held.items() if number in alike}
            _check_alike(path, suffix, inside)
            if weight and not varies and len(alike) > len(inside) > len(alike) / 2:
                missing = min(alike - inside.keys())
                raise ModelError(f"{path} holds no {suffix} of layer {missing}; {REMEDY}")


def _kinds(raw: Mapping[str, Any], numbers: Collection[int]) -> list[set[int]]:
    """The layers in groups of the same kind by config.json, which have the same tensors."""
    kinds: dict[tuple[object, ...], set[int]] = {}
    for number in numbers:
        types = (raw.get(field) for field in _LAYER_KINDS)
        kind = tuple(
            each[number] for each in types if isinstance(each, list) and number < len(each)
        )
        kinds.setdefault(tuple(map(str, kind)), set()).add(number)
    return list(kinds.values())


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


def _check_experts(
    path: Path, raw: Mapping[str, Any], layers: Mapping[str, Mapping[int, Tensor]]
) -> None:
    """Raise ModelError if a layer with experts lacks a tensor of one of them. Experts that compute
    nothing (`zero_expert_num`) may have some."""
    found: dict[tuple[str, str], dict[int, Collection[int]]] = {}
    for suffix, held in layers.items():
        if (expert := _EXPERT.match(suffix)) is not None:
            found.setdefault((expert[1], expert[3]), {})[int(expert[2])] = held.keys()
    count = 1 + max((number for of in found.values() for number in of), default=-1)
    if raw.get("zero_expert_num") and type(routed := raw.get("n_routed_experts")) is int:
        count = routed
    for (before, after), layers_of in found.items():
        mixed = {layer for with_it in layers_of.values() for layer in with_it}
        for number in range(count):
            if missing := mixed.difference(layers_of.get(number, ())):
                name = f"{before}{number}{after}"
                raise ModelError(f"{path} holds no {name} of layer {min(missing)}; {REMEDY}")


def _check_alike(path: Path, suffix: str, held: Mapping[int, Tensor]) -> None:
    first: tuple[int, Tensor] | None = None
    for number, tensor in held.items():
        if first is None:
            first = number, tensor
        elif tensor.shape != first[1].shape:
            raise ModelError(
                f"{path} holds {suffix} as {list(first[1].shape)} in layer {first[0]} and as "
                f"{list(tensor.shape)} in layer {number}; {REMEDY}"
            )


def check_shapes(path: Path, raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raise ModelError if plain weights have other shapes than config.json asks for, or if the
    final norm or an output head of its own is missing."""
    expected_by_name: dict[str, dict[int, tuple[int, str]]] = {}  # by name within a layer
    for name, tensor in tensors.items():
        found = LAYER.search(name)
        inner = found[2] if found else name
        if inner not in expected_by_name:
            expected_by_name[inner] = expected_sizes(raw, inner)
        for axis, (expected, why) in expected_by_name[inner].items():
            if len(tensor.shape) == 2 and tensor.shape[axis] != expected:
                raise ModelError(
                    f"{path} holds {name} as {list(tensor.shape)}, but config.json asks for "
                    f"{expected} {'columns' if axis else 'rows'} ({why}); correct config.json, or "
                    f"{REMEDY}"
                )
    outside = [name for name in tensors if LAYER.search(name) is None]
    if raw.get("tie_word_embeddings") is False and not any(
        n.endswith(OUTPUT_HEADS) for n in outside
    ):
        raise ModelError(
            f"{path} holds no output head ({' or '.join(OUTPUT_HEADS)}), but tie_word_embeddings "
            f"in config.json is false; {REMEDY}"
        )
    normed = any(
        "norm" in found[2] and found[2].endswith(".weight")
        for name in tensors
        if (found := LAYER.search(name)) is not None
    )
    if normed and not any("norm" in name for name in outside):
        raise ModelError(f"{path} holds no norm after the last layer; {REMEDY}")


def expected_sizes(raw: Mapping[str, Any], name: str) -> dict[int, tuple[int, str]]:
    """The numbers of rows (axis 0) and columns (axis 1) that config.json implies for a matrix, with
    the reason; `name` is that within its layer, or within the model. Nothing for values that
    config.json leaves to its class."""

    def size(field: str) -> int | None:
        value = raw.get(field)
        return value if type(value) is int else None

    hidden, inner = size("hidden_size"), size("intermediate_size")
    heads, kv_heads, head_dim = map(
        size, ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    if raw.get("model_type") in (*_HEAD_DIM_IGNORED, *_HEADS_VARY):
        head_dim = None
    latent = raw.get("qk_rope_head_dim") is not None
    found: dict[int, tuple[int, str]] = {}

    def expect(axis: int, value: int | None, why: str) -> None:
        if value is not None:
            found[axis] = value, why

    def product(count: int | None, names: str) -> tuple[int | None, str]:
        known = count is not None and head_dim is not None and not latent
        return (count * head_dim if known else None), f"{names} {count} x head_dim {head_dim}"  # type: ignore[operator]

    if name.endswith((*OUTPUT_HEADS, "embed_tokens.weight", "embed_in.weight")):
        expect(0, size("vocab_size"), f"vocab_size {size('vocab_size')}")
        expect(1, hidden, f"hidden_size {hidden}")
    elif name == "self_attn.q_proj.weight":
        gated = raw.get("model_type") in _GATED_QUERIES
        queries = heads if heads is None or not gated else 2 * heads
        expect(0, *product(queries, "gated " * gated + "num_attention_heads"))
        expect(1, hidden, f"hidden_size {hidden}")
    elif name in ("self_attn.k_proj.weight", "self_attn.v_proj.weight"):
        expect(0, *product(kv_heads, "num_key_value_heads"))
        expect(1, hidden, f"hidden_size {hidden}")
    elif name == "self_attn.o_proj.weight":
        expect(0, hidden, f"hidden_size {hidden}")
        expect(1, *product(heads, "num_attention_heads"))
    elif name in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
        expect(0, inner, f"intermediate_size {inner}")
        expect(1, hidden, f"hidden_size {hidden}")
    elif name == "mlp.down_proj.weight":
        expect(0, hidden, f"hidden_size {hidden}")
        expect(1, inner, f"intermediate_size {inner}")
    return found
