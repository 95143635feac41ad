"""The supported model architectures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipespec.engine.formats import refused_architectures
from pipespec.errors import ModelError

# Each of these decodes token for token like Hugging Face `generate` in
# tests/integration/test_model.py; add a model_type together with its test.
ARCHITECTURES = (
    *("afmoe", "apertus", "arcee", "aria_text", "axk1", "axk2", "bamba", "beam", "bitnet"),
    *("cohere", "cohere2", "cohere2_moe", "cwm", "deepseek_v2", "deepseek_v3", "deepseek_v32"),
    *("dots1", "dots3_note_text", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon_h1"),
    *("flex_olmo", "flint", "gemma", "gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text"),
    *("glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_neox", "gpt_oss", "granite"),
    *("granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"),
    *("helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3"),
    *("iquestcoder", "jais2", "jetmoe", "kimi_linear", "kolibri1", "laguna", "lfm2", "lfm2_moe"),
    *("llama", "llama4_text", "longcat_flash", "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2"),
    *("ministral", "ministral3", "mistral", "mixtral", "nemotron", "nemotron_h", "olmo", "olmo2"),
    *("olmo3", "olmo_hybrid", "olmoe", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe"),
    *("qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss"),
    *("smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma", "youtu"),
)

# Types whose classes are those of another.
_MODULES = {"internlm3": "llama", "iquestcoder": "llama"}
# Multimodal types whose text part decodes alone, and its type where `text_config` names none.
WRAPPERS = {
    "aria": "aria_text",
    "aya_vision": "cohere2",
    "cohere2_vision": "cohere2",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "internvl": "qwen2",
    "llama4": "llama4_text",
    "llava": "llama",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}


def require_supported(model_type: str, path: str | Path, text_type: str | None = None) -> None:
    """Raise `ModelError` unless the architecture is one of `ARCHITECTURES`; `text_type` is the type
    of the text part of a multimodal model."""
    if model_type in ARCHITECTURES:
        return
    why = refused_architectures.reason(model_type)
    if text_type is not None and text_type != model_type:
        of_text = f"is not supported either: {refused_architectures.reason(text_type)}"
        if text_type in ARCHITECTURES:
            of_text = "decodes if it is saved as a checkpoint of its own"
        why = f"its text part is {text_type!r}, which {of_text}"
    raise ModelError(f"the architecture {model_type!r} of {path} is not supported: {why}")


def count_field(model_type: str) -> str:
    """The field of a config that counts the decoder layers."""
    return "num_layers" if model_type == "longcat_flash" else "num_hidden_layers"


def num_layers_of(config: Any) -> int:
    """The number of decoder layers of a model with this config of Transformers."""
    return int(getattr(config, count_field(config.model_type)))


def modeling_module(model_type: str) -> str:
    """The module of Transformers with the classes of an architecture."""
    name = _MODULES.get(model_type, model_type.removesuffix("_text"))
    return f"transformers.models.{name}.modeling_{name}"
