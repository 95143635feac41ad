"""Tiny random checkpoints of every supported architecture, for tests.

Weights are scaled so that hidden states matter: with Transformers' own initialisation the
logits are nearly flat and greedy decoding repeats itself, which would hide most errors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

NUM_LAYERS = 4
VOCAB_SIZE = 199

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_WINDOW = 9  # shorter than every test's context
_ALTERNATE = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}

_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
# Latent attention: the heads of K and of V differ in size.
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}

# model_type -> what its config sets beyond `_COMMON`
CONFIGS: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.5, "sliding_window": _WINDOW, "layer_types": _ALTERNATE},
    "deepseek_v2": {**_LATENT, **_ROUTED, "topk_method": "greedy"},
    "deepseek_v3": {**_LATENT, **_ROUTED},
    "dots1": {**_ROUTED, "sliding_window": _WINDOW, "layer_types": _ALTERNATE},
    "ernie4_5": {},
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_layer_start_index": 1,
    },
    "exaone4": {"sliding_window": _WINDOW, "layer_types": _ALTERNATE},
    "gemma": {"head_dim": 16},
    "gemma2": {
        "tie_word_embeddings": False,
        "head_dim": 16,
        "sliding_window": _WINDOW,
        "layer_types": _ALTERNATE,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
        "query_pre_attn_scalar": 12,
    },
    "gemma3_text": {
        "tie_word_embeddings": False,
        "head_dim": 16,
        "sliding_window": _WINDOW,
        "layer_types": _ALTERNATE,
        "query_pre_attn_scalar": 12,
    },
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "glm4_moe": {**_ROUTED, "head_dim": 16},
    "gpt_neox": {},
    "gpt_oss": {
        **_EXPERTS,
        "head_dim": 16,
        "sliding_window": _WINDOW,
        "layer_types": _ALTERNATE,
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.4,
        "logits_scaling": 0.5,
    },
    "granitemoe": {**_EXPERTS, "embedding_multiplier": 3.0, "logits_scaling": 0.5},
    "granitemoeshared": {
        **_EXPERTS,
        "shared_intermediate_size": 32,
        "embedding_multiplier": 3.0,
    },
    "helium": {"head_dim": 12},
    "hunyuan_v1_dense": {"head_dim": 12},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 12},
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
    "ministral": {"head_dim": 16, "sliding_window": _WINDOW, "layer_types": _ALTERNATE},
    "ministral3": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000.0,
            "llama_4_scaling_beta": 0.5,
            "original_max_position_embeddings": 8,
        },
    },
    "mistral": {"sliding_window": _WINDOW},
    "mixtral": {**_EXPERTS, "sliding_window": _WINDOW},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": _WINDOW, "layer_types": _ALTERNATE},
    "olmoe": dict(_EXPERTS),
    "persimmon": {},
    "phi": {},
    "phi3": {"sliding_window": _WINDOW},
    "phimoe": dict(_EXPERTS),
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": _WINDOW,
        "layer_types": _ALTERNATE,
        "tie_word_embeddings": True,
    },
    "qwen2_moe": {**_EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {**_EXPERTS, "head_dim": 16, "moe_intermediate_size": 32},
    "seed_oss": {"head_dim": 16},
    "smollm3": {
        "no_rope_layers": [1, 0] * (NUM_LAYERS // 2),
        "use_sliding_window": True,
        "sliding_window": _WINDOW,
        "layer_types": _ALTERNATE,
    },
    "stablelm": {"partial_rotary_factor": 0.5},
    "starcoder2": {"sliding_window": _WINDOW},
}


def build(model_type: str, folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Save a random float32 checkpoint of `model_type` to `folder`, which is returned.

    `overrides` are config values; `max_shard_size` splits the file.
    """
    max_shard_size = overrides.pop("max_shard_size", "1GB")
    settings = {**_COMMON, **CONFIGS[model_type], **overrides}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings))
    _spread(model)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


@torch.no_grad()
def _spread(model: PreTrainedModel) -> None:
    """Random weights under which every layer changes what comes out."""
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        if parameter.ndim < 2:
            parameter.add_(0.2 * noise)  # norms keep their centre, 0 or 1
        elif "embed" in name:
            # Small beside what the layers add, or a tied head would repeat the last token.
            parameter.copy_(0.15 * noise)
        else:
            parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)
