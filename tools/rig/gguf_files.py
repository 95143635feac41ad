"""GGUF files of small models, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH_NAMES,
    GGUFWriter,
    RopeScalingType,
    SpecialVocab,
    get_tensor_name_map,
)
from gguf import GGMLQuantizationType as Type
from gguf.quants import quantize
from safetensors.torch import load_file

# The kinds of blocks that the package cannot make, with the places of their scales: bytes are
# drawn.
DRAWN = {
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
}
# A scale with which weights of drawn bytes are small.
SCALES = {Type.Q2_K: 0.004, Type.Q3_K: 0.002, Type.Q4_K: 0.0005, Type.Q5_K: 0.0002}
SMALL = 0.0002
# The architecture of llama.cpp, where its name differs from Transformers'.
KINDS = {
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "ministral3": "mistral3",
    "mistral": "mistral3",
}
# The architectures in which llama.cpp has rows of queries and keys in turns.
PERMUTED = ("llama", "mistral3")
_EXPERT = re.compile(r"\.layers\.(\d+)\..*experts\.(\d+)\.(\w+)\.weight$")
_PARTS = {"w1": "gate", "w3": "up", "w2": "down"}
# The stacks of gpt-oss, whose biases have the same names with `_bias`.
_STACKS = {
    "gate_up_proj": ("gate", "up"),
    "down_proj": ("down",),
}


def in_turns(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head as llama.cpp has them: one of the first half, one of the second."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def drawn(shape: tuple[int, ...], kind: Type, seed: int) -> np.ndarray:
    """Rows of blocks of random bytes, whose scales keep the weights small: `[rows, bytes]`."""
    generator = np.random.default_rng(seed)
    size, num_bytes = GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (*shape[:-1], shape[-1] // size, num_bytes), np.uint8)
    scale = np.float16(SCALES.get(kind, SMALL))
    for at in DRAWN[kind]:
        blocks[..., at : at + 2] = np.frombuffer(scale.tobytes(), np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write(
    source: Path,
    file: Path,
    kind: str,
    type_of: Callable[[str], Type],
    *,
    tokenizer: Path | None = None,
    per_file: int = 0,
    **metadata: Any,
) -> Path:
    """The model in the folder `source`, of the type `kind`, as a GGUF file.

    `type_of` returns the type of the tensor of a Hugging Face name; `metadata` are further
    fields, with `_` for `.` twice, and arrays are tensors. With `per_file` it is files of so many
    tensors, of which the first is returned.
    """
    config = json.loads((source / "config.json").read_text())
    architecture = KINDS.get(kind, kind)
    writer = GGUFWriter(file, architecture, split_max_tensors=per_file)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    if architecture == "deepseek2":
        _add_latent(writer, config)
    else:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if rope.get("rope_type") == "yarn":
        _add_yarn(writer, rope, architecture)
    elif rope.get("rope_type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
        for length in ("short", "long"):
            factors = np.array(rope[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
    writer.add_vocab_size(config["vocab_size"])
    if (window := config.get("sliding_window")) and kind in ("gemma3_text", "phi3", "gpt_oss"):
        writer.add_sliding_window(window)
    of_experts = ("num_local_experts", "num_experts", "n_routed_experts")
    if experts := next(filter(None, map(config.get, of_experts)), None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if size := config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(size)
    if size := config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(size)
    if "n_routed_experts" in config:
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        if config.get("n_group"):
            writer.add_expert_group_count(config["n_group"])
            writer.add_expert_group_used_count(config["topk_group"])
    for name, value in metadata.items():
        field = name.replace("__", ".")
        if isinstance(value, np.ndarray):
            writer.add_tensor(field, value)
        else:
            (writer.add_string if isinstance(value, str) else writer.add_uint32)(field, value)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer)
    of_kind = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(of_kind, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    weights: dict[str, tuple[np.ndarray, Type]] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        weight = tensor.float().numpy()
        made = _made_of(name, weight, config)
        if made is not None:
            weights |= {theirs: (part, type_of(name)) for theirs, part in made.items()}
            continue
        if (found := _EXPERT.search(name)) is not None:
            layer, expert, part = found.groups()
            theirs = f"blk.{layer}.ffn_{_PARTS.get(part, part.removesuffix('_proj'))}_exps.weight"
            stacks.setdefault(theirs, {})[int(expert)] = weight
            stacked = stacks[theirs]
            weights[theirs] = np.stack([stacked[i] for i in sorted(stacked)]), type_of(name)
            continue
        stem, _, suffix = name.rpartition(".")
        theirs = f"{names.get_name(stem)}.{suffix}"
        if suffix in ("e_score_correction_bias", "sinks"):
            ending = "weight" if suffix == "sinks" else "bias"
            theirs = f"{names.get_name(name.removesuffix('_bias'))}.{ending}"
        if architecture in PERMUTED and (part := stem.rpartition(".")[2]) in heads:
            weight = in_turns(weight, heads[part])
        if architecture == "gemma3" and name.endswith("norm.weight"):
            weight = weight + 1
        if weight.shape[0] == 1:
            weight = weight[0]
        weights[theirs] = weight, type_of(name)
    for seed, (theirs, (weight, wanted)) in enumerate(weights.items()):
        if weight.ndim == 1 or theirs.endswith((".bias", ".ffn_gate_inp.weight")):
            wanted = Type.F32
        made = drawn(weight.shape, wanted, seed) if wanted in DRAWN else quantize(weight, wanted)
        writer.add_tensor(theirs, made, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(file.parent.glob(f"{file.stem}-00001-of-*.gguf")) if per_file else file


def _add_latent(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """DeepSeek's K and V, which llama.cpp holds compressed, as those of one head."""
    latent, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_kv_lora_rank(latent)
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_key_length(latent + turned)
    writer.add_value_length(latent)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + turned)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(turned)


def _add_yarn(writer: GGUFWriter, rope: dict[str, Any], architecture: str) -> None:
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast") or 32.0)
    writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow") or 1.0)
    if (scale := rope.get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(scale / 10 if architecture == "deepseek2" else scale)
    if (beta := rope.get("llama_4_scaling_beta")) is not None:
        writer.add_attn_temperature_scale(beta)


def _made_of(name: str, weight: np.ndarray, config: dict[str, Any]) -> dict[str, np.ndarray] | None:
    """What a tensor becomes that is several in the file; None: it is one."""
    layer = next((part for part in name.split(".") if part.isdigit()), "")
    stem, _, last = name.rpartition(".")
    if stem.endswith(".kv_b_proj"):
        heads, of_keys = config["num_attention_heads"], config["qk_nope_head_dim"]
        both = weight.reshape(heads, -1, weight.shape[-1])
        return {
            f"blk.{layer}.attn_k_b.weight": both[:, :of_keys].swapaxes(1, 2).copy(),
            f"blk.{layer}.attn_v_b.weight": both[:, of_keys:].copy(),
        }
    parts = _STACKS.get(last.removesuffix("_bias"))
    if not stem.endswith(".experts") or parts is None:
        return None
    ending = "bias" if last.endswith("_bias") else "weight"
    if ending == "weight":
        weight = weight.swapaxes(1, 2)
    return {
        f"blk.{layer}.ffn_{part}_exps.{ending}": weight[:, i :: len(parts)].copy()
        for i, part in enumerate(parts)
    }


def _add_tokenizer(writer: GGUFWriter, folder: Path) -> None:
    """A byte-pair tokenizer of Hugging Face, as llama.cpp's `gpt2`."""
    stored = json.loads((folder / "tokenizer.json").read_text())
    model = stored["model"]
    special = {each["content"]: each["id"] for each in stored["added_tokens"] if each["special"]}
    tokens = sorted(model["vocab"] | special, key=lambda token: (model["vocab"] | special)[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    SpecialVocab(folder, load_merges=True).add_to_gguf(writer)
