"""The supported model architectures."""

from __future__ import annotations

from pathlib import Path

from pipespec.errors import ModelError

# Each of these decodes token for token like Hugging Face `generate` in
# tests/integration/test_model.py; add a model_type together with its test.
ARCHITECTURES = (
    "apertus",
    "arcee",
    "cohere",
    "cohere2",
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "granitemoe",
    "granitemoeshared",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "llama",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "persimmon",
    "phi",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
)


def require_supported(model_type: str, path: str | Path) -> None:
    """Raise `ModelError` unless the architecture is one of `ARCHITECTURES`."""
    if model_type not in ARCHITECTURES:
        raise ModelError(
            f"the architecture {model_type!r} of {path} is not supported; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )


def modeling_module(model_type: str) -> str:
    """The module of Transformers with the classes of an architecture."""
    name = model_type.removesuffix("_text")
    return f"transformers.models.{name}.modeling_{name}"
