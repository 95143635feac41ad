"""The supported model architectures, why others are refused, and the text part of multimodal ones.
Pure.

Such a checkpoint has the config of its language model in `text_config`, and prefixes before the
names of its tensors. The language model is loaded alone, by the names that it has without them.

`tests/unit/engine/formats/test_architectures.py` checks that every causal language model of the
installed Transformers is either supported or has a reason here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

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
_REFUSED = {
    "its layers keep a running state by a rule that is not computed for draft tokens of a tree": (
        "bailing_hybrid falcon_mamba inkling2_text inkling_text jamba lfm3 mamba mamba2 minimax "
        "qwen4_exp qwen4_exp_text recurrent_gemma rwkv xlstm zamba zamba2 zaya"
    ),
    "it attends to the output of an encoder or of another model": (
        "bart bigbird_pegasus blenderbot blenderbot-small blt marian mbart mllama moshi musicgen "
        "musicgen_melody mvp pegasus plbart prophetnet trocr whisper gemma4_assistant "
        "gemma4_unified_assistant"
    ),
    "it reads texts in both directions, so that a new token changes those before it": (
        "bert bert-generation big_bird camembert cpmant data2vec-text electra ernie git "
        "megatron-bert rembert roberta roberta-prelayernorm roc_bert roformer xlm xlm-roberta "
        "xlm-roberta-xl xlnet xmod"
    ),
    "Transformers lets no program replace its attention": (
        "bloom codegen ctrl falcon gpt_neo gpt_neox_japanese gptj mpt openai-gpt reformer xglm"
    ),
    "it adds learned positions to the embeddings in front of every slice, not of the first alone": (
        "biogpt gpt-sw3 gpt2 gpt_bigcode opt"
    ),
    "it normalises the embeddings in front of every slice, not of the first alone": (
        "modernbert-decoder nanochat"
    ),
    "several streams of hidden states pass between its layers": "deepseek_v4 hrm_text hy_v4",
    "its layers read embeddings of the tokens, which are on the first stage alone": (
        "gemma3n gemma3n_text"
    ),
    "its positions or embeddings depend on images or sound": (
        "cohere_compass_text dots3_note emu3 fuyu got_ocr2 moss_transcribe_diarize phi4_multimodal"
    ),
    "its layers have other names and places than those of other decoders": "dbrx",
    "its attention is computed twice and subtracted": "diffllama",
    "its attention mask depends on the values": "doge",
    "its attention selects blocks of keys by their scores": "minimax_m3_vl_text",
}
REASONS = {name: why for why, names in _REFUSED.items() for name in names.split()}
UNKNOWN = "Transformers has no causal language model of this type"
TEXT_CONFIG = "text_config"
# Fields that a multimodal config may have outside of `text_config`.
_SHARED = ("quantization_config", "eos_token_id", "tie_word_embeddings", "dtype", "torch_dtype")
# Prefixes of the base model and of the output head, as Transformers 5 and 4 save them.
_BASE = re.compile(r"^(?:model\.language_model\.(?:model\.)?|language_model\.model\.)")
_HEAD = re.compile(r"^(?:model\.)?(?:language_model\.)?(?=lm_head\.)")


def require_supported(model_type: str, path: str | Path, text_type: str | None = None) -> None:
    """Raise `ModelError` unless the architecture is one of `ARCHITECTURES`; `text_type` is the type
    of the text part of a multimodal model."""
    if model_type in ARCHITECTURES:
        return
    why = REASONS.get(model_type, UNKNOWN)
    if text_type is not None and text_type != model_type:
        of_text = f"is not supported either: {REASONS.get(text_type, UNKNOWN)}"
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


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the text part; the config itself of a model that is not multimodal."""
    if raw.get("model_type") not in WRAPPERS or not isinstance(raw.get(TEXT_CONFIG), dict):
        return raw
    inner: Mapping[str, Any] = raw[TEXT_CONFIG]
    shared = {name: raw[name] for name in _SHARED if raw.get(name) is not None}
    usual = {"model_type": WRAPPERS[raw["model_type"]]}
    return usual | shared | {name: value for name, value in inner.items() if value is not None}


def text_type(raw: Mapping[str, Any]) -> str | None:
    """The type of the text part of any multimodal model; None: it names none."""
    inner = raw.get(TEXT_CONFIG)
    found = inner.get("model_type") if isinstance(inner, dict) else None
    return found if isinstance(found, str) else None


def text_names(stored: Iterable[str]) -> dict[str, str]:
    """The tensors of the text part: the name that each has in the language model, by its name in
    the files. Other tensors are left out; a checkpoint without prefixes keeps all."""
    names = list(stored)
    if not any(_BASE.match(name) for name in names):
        return {name: name for name in names}
    found = {}
    for name in names:
        if _BASE.match(name):
            found[name] = _BASE.sub("model.", name)
        elif _HEAD.match(name):
            found[name] = _HEAD.sub("", name)
    return found
