"""The architectures of llama.cpp that are read from GGUF files, and what each means here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pipespec.engine.formats.gguf_file import GgufFile
from pipespec.errors import ModelError

_MIXTURE = {"expert_used_count": "num_experts_per_tok"}
_QWEN_MIXTURE = {
    **_MIXTURE,
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}
# The layers of Gemma 3 with global attention, and the theta of the others: llama.cpp's constants.
_GEMMA_PERIOD, _GEMMA_LOCAL_THETA, _GEMMA_27B_LAYERS = 6, 10000.0, 62
# The end of the names of what DeepSeek V3 adds to the scores of experts, and V2 does not.
_CORRECTION = ".exp_probs_b.bias"
# How the scores of experts become probabilities, as `expert_gating_func` has it.
_SOFTMAX, _SIGMOID = 1, 2
_EXPERTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


@dataclass(frozen=True)
class GgufArchitecture:
    """How files of an architecture of llama.cpp become a model of Transformers.

    Attributes:
        model_type: of Transformers.
        fields: the config's names of further metadata.
        settings: of the config, which llama.cpp takes for granted.
        more: makes further settings of a file and of the settings that its metadata make.
        yarn: what llama.cpp takes for granted of a rotary embedding scaled by YaRN; None: such a
            scaling is not read.
        partial: some numbers of a head may not be turned by their position.
        in_turns: llama.cpp interleaves the rows of the two halves of each head of queries and keys;
            Hugging Face does not.
        shifted: norms are stored plus 1.
        experts: the names of the matrices of an expert.
        transposed: its stacks are transposed, and hold gate and up in turns.
    """

    model_type: str
    fields: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    more: Callable[[GgufFile, Mapping[str, Any]], Mapping[str, Any]] | None = None
    yarn: Mapping[str, Any] | None = None
    partial: bool = False
    in_turns: bool = False
    shifted: bool = False
    experts: Mapping[str, str] = field(default_factory=lambda: dict(_EXPERTS))
    transposed: bool = False


def _gemma3(_: GgufFile, settings: Mapping[str, Any]) -> dict[str, Any]:
    layers = settings["num_hidden_layers"]
    scaled_by = settings["head_dim"]
    if layers == _GEMMA_27B_LAYERS:
        scaled_by = settings["hidden_size"] // settings["num_attention_heads"]
    return {
        "query_pre_attn_scalar": scaled_by,
        "layer_types": [
            "sliding_attention" if (i + 1) % _GEMMA_PERIOD else "full_attention"
            for i in range(layers)
        ],
        "rope_parameters": {
            "full_attention": settings["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": _GEMMA_LOCAL_THETA},
        },
    }


def _glm4_moe(file: GgufFile, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Layers for multi-token prediction are counted in the file, and not loaded."""
    layers, unused = settings["num_hidden_layers"], file.field("nextn_predict_layers") or 0
    if not 0 <= unused < layers:
        raise ValueError(f"{unused} of {layers} layers are for multi-token prediction")
    return {
        "num_hidden_layers": layers - unused,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }


def _deepseek(file: GgufFile, settings: Mapping[str, Any]) -> dict[str, Any]:
    """New files say of K and V how they are held compressed, as of one head; Transformers' V2 does
    not normalise what its router chooses, nor scale by temperature."""
    field = file.field
    is_v3, norm = _is_deepseek_3(file), bool(field("expert_weights_norm"))
    gating = field("expert_gating_func") or (_SIGMOID if is_v3 else _SOFTMAX)
    scaled = field("attention.temperature_scale")
    if gating != (_SIGMOID if is_v3 else _SOFTMAX) or (norm and not is_v3) or scaled:
        raise ValueError("its experts are chosen, or its attention is scaled, as in no DeepSeek")
    turned = field("rope.dimension_count")
    of_key = field("attention.key_length_mla") or field("attention.key_length")
    groups = field("expert_group_count") or 1
    return {
        "num_key_value_heads": settings["num_attention_heads"],
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": of_key - turned,
        "v_head_dim": field("attention.value_length_mla") or field("attention.value_length"),
        "q_lora_rank": field("attention.q_lora_rank"),
        "norm_topk_prob": norm,
        "n_group": groups,
        "topk_group": field("expert_group_used_count") or 1,
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
    }


def _ministral3(file: GgufFile, settings: Mapping[str, Any]) -> dict[str, Any]:
    beta = file.field("attention.temperature_scale") or 0.0
    return {"rope_parameters": {**settings["rope_parameters"], "llama_4_scaling_beta": beta}}


_MIXTRAL = GgufArchitecture(
    "mixtral",
    {**_MIXTURE, "expert_count": "num_local_experts"},
    in_turns=True,
    experts={"gate": "w1", "up": "w3", "down": "w2"},
)
_ROUTED = {
    **_MIXTURE,
    "expert_count": "n_routed_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}
_LATENT = {
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.dimension_count": "head_dim",
}
# By `general.architecture`; each has a test in tests/integration/test_gguf.py. Some names mean a
# mixture too, or two models.
ARCHITECTURES = {
    "llama": GgufArchitecture("llama", in_turns=True),
    "qwen2": GgufArchitecture("qwen2"),
    "qwen3": GgufArchitecture("qwen3"),
    "qwen2moe": GgufArchitecture(
        "qwen2_moe",
        {**_QWEN_MIXTURE, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        {"norm_topk_prob": False},
    ),
    "qwen3moe": GgufArchitecture("qwen3_moe", _QWEN_MIXTURE, {"norm_topk_prob": True}),
    "gemma3": GgufArchitecture(
        "gemma3_text",
        {
            "attention.sliding_window": "sliding_window",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        more=_gemma3,
        shifted=True,
    ),
    "phi3": GgufArchitecture("phi3", {"attention.sliding_window": "sliding_window"}),
    "mistral3": GgufArchitecture("mistral", settings={"sliding_window": None}, in_turns=True),
    "glm4moe": GgufArchitecture(
        "glm4_moe",
        {
            **_ROUTED,
            "expert_weights_norm": "norm_topk_prob",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
        },
        more=_glm4_moe,
        partial=True,
    ),
    "gpt-oss": GgufArchitecture(
        "gpt_oss",
        {
            **_MIXTURE,
            "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
            "attention.sliding_window": "sliding_window",
        },
        yarn={"truncate": False},
        transposed=True,
    ),
    "deepseek2": GgufArchitecture("deepseek_v2", {**_ROUTED, **_LATENT}, more=_deepseek, yarn={}),
}
_MINISTRAL_3 = GgufArchitecture(
    "ministral3", settings={"sliding_window": None}, more=_ministral3, yarn={}, in_turns=True
)


def _is_deepseek_3(file: GgufFile) -> bool:
    return any(name.endswith(_CORRECTION) for name in file.tensors)


def architecture_of(file: GgufFile) -> GgufArchitecture:
    """That of a file. Raises ModelError."""
    found = ARCHITECTURES.get(file.kind)
    if found is None:
        raise ModelError(
            f"{file.path} holds a model of the architecture {file.kind!r}, which is not read from "
            f"GGUF; read are {', '.join(ARCHITECTURES)}"
        )
    if file.kind == "llama" and file.field("expert_count"):
        return _MIXTRAL
    if file.kind == "deepseek2" and _is_deepseek_3(file):
        return replace(found, model_type="deepseek_v3")
    if file.kind == "mistral3" and file.field("rope.scaling.type") == "yarn":
        return _MINISTRAL_3
    return found
