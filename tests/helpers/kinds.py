"""Architectures that differ in how they compute, of which the short suite tries one each."""

from collections.abc import Collection
from typing import Any

import pytest

from pipespec.engine.formats.architectures import ARCHITECTURES

# One of each kind of attention: grouped heads, windows, caps, sinks, chunks and temperatures,
# latent, sparse, layers of unequal heads, two attentions in a layer, fused projections.
ATTENDING = (
    *("cohere2", "deepseek_v3", "deepseek_v32", "dots3_note_text", "gemma2", "gemma4_text"),
    *("gpt_oss", "granite_swa", "llama", "llama4_text", "longcat_flash", "mimo_v2_flash"),
    *("minicpm3", "mistral", "phi3", "qwen3", "qwen3_next"),
)
# Ways in which tensors are shared among members: those of each kind of layer, one without a plan,
# and one with a plan of unknown rules. `--long` tries every architecture.
SHARED = (
    *("afmoe", "deepseek_v2", "deepseek_v32", "flex_olmo", "gemma2", "glm4_moe", "gpt_oss"),
    *("llama", "llama4_text", "minicpm3", "mixtral", "olmo2", "phi3", "qwen3_next", "starcoder2"),
)
# One of each kind of running state: Mamba 2 beside attention and in layers of its own, delta rules
# of several gates, short convolutions.
WITH_STATE = ("bamba", "falcon_h1", "kimi_linear", "lfm2", "nemotron_h", "olmo_hybrid")
# Layers of other kinds: experts that share one matrix or look at K and V, weights of three values,
# norms of layers, positions in part of a head.
OTHERS = (
    *("aria_text", "bitnet", "cohere", "granite", "hunyuan_v1_dense", "jetmoe", "laguna"),
    *("minimax_m2", "nemotron", "persimmon", "phimoe", "qwen2_moe", "stablelm"),
)
KINDS = frozenset((*ATTENDING, *SHARED, *WITH_STATE, *OTHERS))


def by_kind(kinds: Collection[str] = KINDS) -> list[Any]:
    """Every architecture, for `parametrize`; one that is none of the `kinds` is `long`."""
    return [
        name if name in kinds else pytest.param(name, marks=pytest.mark.long)
        for name in ARCHITECTURES
    ]
