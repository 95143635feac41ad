"""The models with random weights that are checked and timed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pipespec.engine.model_slice import ModelSlice
from pipespec.system.silence_warnings import silence_warnings

with silence_warnings():
    from transformers import AutoConfig, PretrainedConfig

# Token slots of models that are only checked.
NUM_SLOTS = 512
# Two layers each: grouped queries; windows, soft caps and large heads; sinks and experts; layers
# with a running state.
SMALL: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 256, "sliding_window": 64},
    "gpt_oss": {"head_dim": 64, "num_key_value_heads": 2, "num_local_experts": 4},
    "qwen3_next": {
        "head_dim": 64,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
    },
}
_OF_ALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 1024,
    "max_position_embeddings": NUM_SLOTS,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Sizes:
    """What is timed: a stage of some layers, and a draft model.

    Attributes:
        stage, draft: configs of Llama; a stage has all layers but the first and the last.
        stage_name, draft_name: of the published models that have
            such layers.
        contexts: tokens before the rows of a batch.
    """

    stage_name: str
    stage: PretrainedConfig
    draft_name: str
    draft: PretrainedConfig
    dtype: torch.dtype
    contexts: tuple[int, ...]


def sizes(device: torch.device) -> Sizes:
    """Those of published models on a GPU, and small ones on a CPU, where speeds say little."""
    if device.type == "cpu":
        return Sizes(
            "a small model",
            _llama(256, 4, 2, 512, 4, 1024),
            "a small draft",
            _llama(128, 4, 2, 256, 2, 1024),
            torch.float32,
            (128, 512),
        )
    return Sizes(
        "4 layers of Llama 3.1 8B",
        _llama(4096, 32, 8, 14336, 6, 128256),
        "Llama 3.2 1B",
        _llama(2048, 32, 8, 8192, 16, 128256),
        torch.bfloat16,
        (128, 2048, 8192),
    )


def _llama(
    hidden: int, heads: int, kv_heads: int, inner: int, layers: int, vocabulary: int
) -> PretrainedConfig:
    return AutoConfig.for_model(
        "llama",
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        num_hidden_layers=layers,
        vocab_size=vocabulary,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
    )


def small_slice(
    model_type: str, device: torch.device, dtype: torch.dtype, attention: str
) -> ModelSlice:
    """A whole small model of an architecture of SMALL."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**_OF_ALL, **SMALL[model_type]})
    layers = range(config.num_hidden_layers)
    return ModelSlice.random(
        config, layers, dtype=dtype, device=device, num_slots=NUM_SLOTS, attention=attention
    )
