"""Tiny random checkpoints of every supported architecture, for tests.

Weights are scaled so that hidden states matter: with Transformers' own initialisation the
logits are nearly flat and greedy decoding repeats itself, which would hide most errors.
"""

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from pipespec.engine.attention.attention_plan import causal_plan
from pipespec.engine.inspection.inspection import inspect
from pipespec.engine.slice.model_slice import ModelSlice

# Of one run of the suite.
SHARED = Path(os.environ["XDG_CACHE_HOME"]) / "tiny-models"
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
_MIXTURE = {**_EXPERTS, "moe_intermediate_size": 32}
_SHARING = {**_MIXTURE, "shared_expert_intermediate_size": 32}

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

_SPARSE = {"index_topk": 256, "index_head_dim": 12, "index_n_heads": 2}
_SLIDING = {"sliding_window": _WINDOW, "layer_types": _ALTERNATE}
_MIXED = ["dense", *["sparse"] * (NUM_LAYERS - 1)]
# Running states: linear attention with shared key heads, Mamba 2 with two groups.
_HYBRID = ["linear_attention", "full_attention"] * (NUM_LAYERS // 2)
_DELTA = {
    "layer_types": _HYBRID,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "head_dim": 16,
}
_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 24,
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}

# What configs set beyond `_COMMON`, of types that are alike, and by type.
_ALIKE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("apertus arcee bitnet ernie4_5 gpt_neox jais2 nemotron olmo olmo2 persimmon phi", {}),
    ("helium hunyuan_v1_dense internlm3 iquestcoder", {"head_dim": 12}),
    ("gemma glm glm4 qwen3 seed_oss", {"head_dim": 16}),
    ("exaone4 olmo3", _SLIDING),
    ("olmoe phimoe", _EXPERTS),
)
CONFIGS: dict[str, dict[str, Any]] = {
    **{name: config for names, config in _ALIKE for name in names.split()},
    "afmoe": {**_MIXTURE, **_SLIDING, "head_dim": 12, "mup_enabled": True},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2},
    "axk1": {**_LATENT, **_ROUTED, "mlp_layer_types": _MIXED},
    "axk2": {**_LATENT, **_ROUTED, **_SPARSE, "mlp_layer_types": _MIXED},
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "beam": {**_MIXTURE, **_SLIDING, "head_dim": 12, "n_group": 2, "topk_group": 1},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.5, **_SLIDING},
    "cohere2_moe": {
        **_EXPERTS,
        **_SLIDING,
        "logit_scale": 0.5,
        "head_dim": 12,
        "num_shared_experts": 1,
        "mlp_layer_types": _MIXED,
        "prefix_dense_intermediate_size": 64,
    },
    "cwm": {**_SLIDING, "head_dim": 12},
    "deepseek_v2": {**_LATENT, **_ROUTED, "topk_method": "greedy"},
    "deepseek_v3": {**_LATENT, **_ROUTED},
    "deepseek_v32": {**_LATENT, **_ROUTED, **_SPARSE},
    "dots1": {**_ROUTED, **_SLIDING},
    "dots3_note_text": {
        **_LATENT,
        **_ROUTED,
        **_SPARSE,
        **_SLIDING,
        "head_dim": 20,
        "shared_experts_intermediate_size": 32,
        # Those of layers with a window, which would be of the size of a real model.
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 24,
        "swa_head_dim": 20,
        "swa_qk_nope_head_dim": 12,
        "swa_v_head_dim": 14,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_layer_start_index": 1,
    },
    "exaone_moe": {**_MIXTURE, **_SLIDING, "mlp_layer_types": _MIXED},
    "falcon_h1": {
        **_MAMBA,
        "mamba_d_ssm": 96,
        "embedding_multiplier": 3.0,
        "ssm_in_multiplier": 0.7,
        "attention_in_multiplier": 0.8,
        "key_multiplier": 0.9,
    },
    "flex_olmo": {**_EXPERTS, "tie_word_embeddings": True},
    "flint": {**_SHARING, **_SLIDING, "head_dim": 12},
    "gemma2": {
        "tie_word_embeddings": False,
        "head_dim": 16,
        **_SLIDING,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
        "query_pre_attn_scalar": 12,
    },
    "gemma3_text": {
        "tie_word_embeddings": False,
        "head_dim": 16,
        **_SLIDING,
        "query_pre_attn_scalar": 12,
    },
    "gemma4_text": {
        **_SLIDING,
        "tie_word_embeddings": False,
        "head_dim": 12,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 8.0,
    },
    "gemma4_unified_text": {
        **_SLIDING,
        "tie_word_embeddings": False,
        "head_dim": 12,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    },
    "glm4_moe": {**_ROUTED, "head_dim": 16},
    "glm4_moe_lite": {**_LATENT, **_ROUTED},
    "glm_moe_dsa": {
        **_LATENT,
        **_ROUTED,
        **_SPARSE,
        "indexer_types": ["full", "shared"] * (NUM_LAYERS // 2),
    },
    "gpt_oss": {**_EXPERTS, "head_dim": 16, **_SLIDING},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.4,
        "logits_scaling": 0.5,
    },
    "granite_swa": {**_SLIDING, "embedding_multiplier": 3.0, "logits_scaling": 0.5},
    "granitemoe": {**_EXPERTS, "embedding_multiplier": 3.0, "logits_scaling": 0.5},
    "granitemoe_swa": {
        **_EXPERTS,
        **_SLIDING,
        "embedding_multiplier": 3.0,
        "shared_intermediate_size": 32,
    },
    "granitemoehybrid": {
        **_EXPERTS,
        **_MAMBA,
        "layer_types": _HYBRID,
        "shared_intermediate_size": 32,
        "embedding_multiplier": 3.0,
        "logits_scaling": 0.5,
    },
    "granitemoeshared": {**_EXPERTS, "shared_intermediate_size": 32, "embedding_multiplier": 3.0},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 12},
    "hy_v3": {**_MIXTURE, "head_dim": 12, "mlp_layer_types": _MIXED},
    "hyperclovax": {"embedding_multiplier": 3.0, "logits_scaling": 0.5},
    "jetmoe": {**_EXPERTS, "kv_channels": 12},
    "kolibri1": {**_SHARING, **_SLIDING, "head_dim": 12},
    "kimi_linear": {
        **_LATENT,
        **_MIXTURE,
        "layer_types": _HYBRID,
        "mlp_layer_types": _MIXED,
        "num_shared_experts": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "linear_head_dim": 12,
        "linear_num_heads": 4,
    },
    "laguna": {**_SHARING, **_SLIDING, "head_dim": 12, "mlp_layer_types": _MIXED},
    "lfm2": {"layer_types": ["conv", "full_attention"] * (NUM_LAYERS // 2)},
    "lfm2_moe": {
        **_MIXTURE,
        "layer_types": ["conv", "full_attention"] * (NUM_LAYERS // 2),
        "num_dense_layers": 1,
    },
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
    "llama4_text": {
        **_EXPERTS,
        "head_dim": 12,
        "intermediate_size_mlp": 64,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 0] * (NUM_LAYERS // 2),
        "layer_types": ["chunked_attention", "full_attention"] * (NUM_LAYERS // 2),
        "attention_chunk_size": _WINDOW,
        "floor_scale": 4,
        "attn_scale": 0.5,
    },
    "longcat_flash": {
        **_LATENT,
        "num_hidden_layers": 2 * NUM_LAYERS,
        "ffn_hidden_size": 64,
        "n_routed_experts": 4,
        "moe_topk": 2,
        "zero_expert_num": 2,
        "expert_ffn_hidden_size": 32,
        "head_dim": 4,
    },
    "mellum": {**_MIXTURE, **_SLIDING, "head_dim": 12},
    "mimo_v2_flash": {**_ROUTED, **_SLIDING, "head_dim": 12, "v_head_dim": 8},
    "minicpm3": {**_LATENT, "tie_word_embeddings": False, "scale_emb": 3, "dim_model_base": 48},
    "minimax_m2": {**_EXPERTS, "head_dim": 12},
    "ministral": {"head_dim": 16, **_SLIDING},
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
    "nemotron_h": {
        **_ROUTED,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "head_dim": 12,
        "ssm_state_size": 10,
        "mamba_num_heads": 4,
        "mamba_head_dim": 24,
        "n_groups": 2,
        "chunk_size": 8,
        "moe_shared_expert_intermediate_size": 32,
    },
    "olmo_hybrid": {**_DELTA, "linear_num_key_heads": 4},
    "phi3": {"sliding_window": _WINDOW},
    "qwen2": {"use_sliding_window": True, **_SLIDING, "tie_word_embeddings": True},
    "qwen2_moe": {**_SHARING},
    "qwen3_5_moe_text": {**_DELTA, **_SHARING},
    "qwen3_5_text": dict(_DELTA),
    "qwen3_next": {**_DELTA, **_SHARING},
    "qwen3_moe": {**_MIXTURE, "head_dim": 16},
    "smollm3": {
        "no_rope_layers": [1, 0] * (NUM_LAYERS // 2),
        "use_sliding_window": True,
        **_SLIDING,
    },
    "solar_open": {**_ROUTED, "head_dim": 12},
    "stablelm": {"partial_rotary_factor": 0.5},
    "starcoder2": {"sliding_window": _WINDOW},
    "vaultgemma": {
        **_SLIDING,
        "head_dim": 12,
        "tie_word_embeddings": False,
        "attn_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 12,
    },
    "youtu": dict(_LATENT),
}


def build(model_type: str, folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Save a random float32 checkpoint of `model_type` to `folder`, which is returned.

    `overrides` are config values; `max_shard_size` splits the file.
    """
    max_shard_size = overrides.pop("max_shard_size", "1GB")
    config = AutoConfig.for_model(model_type, **{**_COMMON, **CONFIGS[model_type], **overrides})
    return _save(AutoModelForCausalLM, config, folder, seed, max_shard_size)


def shared(model_type: str) -> Path:
    """The folder of `build(model_type, ...)`, made once for all processes of a run of the suite:
    nobody may change it."""
    folder = SHARED / model_type
    if not folder.exists():
        SHARED.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=SHARED) as place:
            made = build(model_type, Path(place) / "model")
            with suppress(OSError):  # another process was faster
                made.rename(folder)
    return folder


_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
# Multimodal type -> the type of its text part, and what its config sets beside that and `_VISION`.
MULTIMODAL: dict[str, tuple[str, dict[str, Any]]] = {
    "aria": ("aria_text", {}),
    "aya_vision": ("cohere2", {}),
    "cohere2_vision": ("cohere2", {}),
    "gemma3": ("gemma3_text", {"mm_tokens_per_image": 4}),
    "gemma4": ("gemma4_text", {"audio_config": None}),
    "gemma4_unified": ("gemma4_unified_text", {"audio_config": None}),
    "internvl": ("qwen2", {}),
    "llama4": ("llama4_text", {}),
    "llava": ("llama", {}),
    "mistral3": ("mistral", {}),
    "qwen3_5": ("qwen3_5_text", {}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}),
}


def build_multimodal(model_type: str, folder: Path, **overrides: Any) -> Path:
    """Save a random float32 checkpoint of a multimodal type to `folder`, which is returned;
    `overrides` are values of its config; `max_shard_size` splits the file."""
    max_shard_size = overrides.pop("max_shard_size", "1GB")
    text_type, more = MULTIMODAL[model_type]
    text = {**_COMMON, **CONFIGS[text_type], "model_type": text_type}
    vision = _VISION | more.get("vision_config", {})
    settings = {"tie_word_embeddings": text.get("tie_word_embeddings", False), **more, **overrides}
    config = AutoConfig.for_model(model_type, text_config=text, **settings, vision_config=vision)
    return _save(AutoModelForImageTextToText, config, folder, 0, max_shard_size)


def _save(kind: Any, config: Any, folder: Path, seed: int, max_shard_size: str) -> Path:
    torch.manual_seed(seed)
    model = kind.from_config(config)
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


def weights(path: Path, layers: range, **how: Any) -> dict[str, torch.Tensor]:
    """The tensors that a slice of a checkpoint holds, by name; `how` is passed to `ModelSlice`."""
    held = ModelSlice.load(path, layers, num_slots=4, **{"dtype": torch.float32, **how})
    return dict(held.model.state_dict()) | dict(held.base.state_dict())


def logits(path: Path, prompt: Sequence[int], num_slices: int, **how: Any) -> torch.Tensor:
    """Those of all tokens of a prompt, in float32, through so many slices of a checkpoint; `how` is
    passed to `ModelSlice`."""
    num_layers = inspect(path).num_layers
    size, how = num_layers // num_slices, {"num_slots": max(32, len(prompt)), **how}
    slots = np.arange(len(prompt))
    plan = causal_plan(slots[:0], slots)
    hidden = torch.tensor(prompt)
    for start in range(0, num_layers, size):
        model = ModelSlice.load(path, range(start, start + size), **how)
        hidden = model.forward(hidden, torch.from_numpy(plan.positions), plan)
    return model.logits(hidden).float()
