"""Why causal language models of Transformers that are not supported are refused.

`tests/unit/engine/formats/test_architectures.py` checks that every type of the installed
Transformers is either supported or has a reason here.
"""

from __future__ import annotations

_STATE = (
    "its layers keep a running state by a rule that is not computed for the draft tokens of a tree"
)
_ENCODER = "it attends to the output of an encoder or of another model"
_BOTH_WAYS = "it reads texts in both directions, so that a new token changes those before it"
_OWN_ATTENTION = "Transformers lets no program replace its attention"
_POSITIONS = (
    "it adds learned positions to the embeddings in front of every slice, not of the first alone"
)
_NORMED = "it normalises the embeddings in front of every slice, not of the first alone"
_STREAMS = "several streams of hidden states pass between its layers"
_LAYER_INPUTS = "its layers read embeddings of the tokens, which are on the first stage alone"
_SPARSE = "its attention selects blocks of keys by their scores"
_MEDIA = "its positions or embeddings depend on images or sound"
_VALUES = "its attention mask depends on the values"
_TWICE = "its attention is computed twice and subtracted"
_NAMES = "its layers have other names and places than those of other decoders"

REASONS: dict[str, str] = {
    **dict.fromkeys(
        (
            *("bailing_hybrid", "falcon_mamba", "inkling2_text", "inkling_text", "jamba", "lfm3"),
            *("mamba", "mamba2", "minimax", "qwen4_exp", "qwen4_exp_text", "recurrent_gemma"),
            *("rwkv", "xlstm", "zamba", "zamba2", "zaya"),
        ),
        _STATE,
    ),
    **dict.fromkeys(
        (
            *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "blt", "marian"),
            *("mbart", "mllama", "moshi", "musicgen", "musicgen_melody", "mvp", "pegasus"),
            *("plbart", "prophetnet", "trocr", "whisper", "gemma4_assistant"),
            "gemma4_unified_assistant",
        ),
        _ENCODER,
    ),
    **dict.fromkeys(
        (
            *("bert", "bert-generation", "big_bird", "camembert", "cpmant", "data2vec-text"),
            *("electra", "ernie", "git", "megatron-bert", "rembert", "roberta"),
            *("roberta-prelayernorm", "roc_bert", "roformer", "xlm", "xlm-roberta"),
            *("xlm-roberta-xl", "xlnet", "xmod"),
        ),
        _BOTH_WAYS,
    ),
    **dict.fromkeys(
        (
            *("bloom", "codegen", "ctrl", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj"),
            *("mpt", "openai-gpt", "reformer", "xglm"),
        ),
        _OWN_ATTENTION,
    ),
    **dict.fromkeys(("biogpt", "gpt-sw3", "gpt2", "gpt_bigcode", "opt"), _POSITIONS),
    **dict.fromkeys(("modernbert-decoder", "nanochat"), _NORMED),
    **dict.fromkeys(("deepseek_v4", "hrm_text", "hy_v4"), _STREAMS),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), _LAYER_INPUTS),
    **dict.fromkeys(
        (
            *("cohere_compass_text", "dots3_note", "emu3", "fuyu", "got_ocr2"),
            *("moss_transcribe_diarize", "phi4_multimodal"),
        ),
        _MEDIA,
    ),
    "dbrx": _NAMES,
    "diffllama": _TWICE,
    "doge": _VALUES,
    "minimax_m3_vl_text": _SPARSE,
}

UNKNOWN = "Transformers has no causal language model of this type"


def reason(model_type: str) -> str:
    """Why a type is refused, as a clause."""
    return REASONS.get(model_type, UNKNOWN)
