"""What the metadata of a GGUF file mean: the config of Transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipespec.engine.formats.gguf_architectures import GgufArchitecture
from pipespec.engine.formats.gguf_file import FOREIGN, GgufFile
from pipespec.errors import ModelError
from pipespec.system.validation import reason, shown

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
# Divisors of rotary frequencies: in any context, in the original one, and in a longer one.
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
# The config's names of metadata that all architectures have.
_COMMON = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
}
_TOKENS = {"bos": "bos", "eos": "eos", "padding": "pad"}
_ORIGINAL = "original_max_position_embeddings"


def config_of(file: GgufFile, architecture: GgufArchitecture) -> Any:
    """The config of Transformers. Raises ModelError."""
    from transformers import AutoConfig

    shapes = file.shapes
    layers = file.field("block_count")
    if not isinstance(layers, int) or not 0 < layers <= len(shapes):
        raise ModelError(
            f"the metadata of {file.path} count {shown(layers)} layers ({file.kind}.block_count), "
            f"but it holds {len(shapes)} tensors; fetch it again"
        )
    settings = {
        name: value
        for theirs, name in {**_COMMON, **architecture.fields}.items()
        if (value := file.field(theirs)) is not None
    }
    for name, value in settings.items():
        if not isinstance(value, int | float):
            raise file.unread(f"has layers that differ in {name}, which is not read")
    for theirs, name in _TOKENS.items():
        settings[f"{name}_token_id"] = file.metadata(f"tokenizer.ggml.{theirs}_token_id")
    if EMBEDDING in shapes:  # its rows may be more than the tokenizer's tokens
        settings["vocab_size"] = shapes[EMBEDDING][0]
    settings["tie_word_embeddings"] = OUTPUT not in shapes
    try:
        if "head_dim" not in settings:
            settings["head_dim"] = settings["hidden_size"] // settings["num_attention_heads"]
        turned = file.field("rope.dimension_count")
        if turned not in (None, settings["head_dim"]) and not architecture.partial:
            numbers = f"{turned} of the {settings['head_dim']} numbers of a head"
            raise file.unread(f"turns {numbers} by their position, which is not read")
        rope = _rope(file, turned or settings["head_dim"], architecture.yarn)
        if architecture.partial and turned is not None:
            rope["partial_rotary_factor"] = turned / settings["head_dim"]
        if rope["rope_type"] == "longrope":  # where Phi-3's class looks for it
            settings[_ORIGINAL] = rope[_ORIGINAL]
        settings |= {"rope_parameters": rope, **architecture.settings}
        if architecture.more is not None:
            settings |= architecture.more(file, settings)
        return AutoConfig.for_model(architecture.model_type, **settings)
    except ModelError:
        raise
    except Exception as error:  # model code may raise anything for invalid values
        raise not_valid(file, error) from error


def not_valid(file: GgufFile, error: Exception) -> ModelError:
    """That the metadata of a file make no config or model, and why."""
    return ModelError(f"the metadata of {file.path} are not valid: {reason(error)}; {FOREIGN}")


def require_types(file: GgufFile) -> None:
    """Raise ModelError for types of tensors that the package does not dequantise."""
    from gguf import GGMLQuantizationType, dequantize

    one_of_each = {each.kind: name for name, each in file.tensors.items()}
    for number, name in one_of_each.items():
        what = f"a type that gguf does not know ({number})"
        try:
            kind = GGMLQuantizationType(number)
            what = f"type {kind.name}, which gguf does not dequantise"
            dequantize(file.data(name)[:1], kind)
        except Exception as error:
            raise file.unread(f"holds tensors of {what}") from error


def _rope(file: GgufFile, turned: int, yarn: Mapping[str, Any] | None) -> dict[str, Any]:
    """The parameters of the rotary embedding of `turned` numbers of a head; `yarn`: see
    `GgufArchitecture`."""
    field = file.field
    rope: dict[str, Any] = {"rope_theta": float(field("rope.freq_base") or 10000.0)}
    kind = field("rope.scaling.type")
    factor = float(field("rope.scaling.factor") or field("rope.scale_linear") or 1)  # an old name
    if kind is None:  # for llama.cpp a factor then means linear
        kind = "linear" if factor != 1 else "none"
    divisors = {each: file.data(each).tolist() for each in ROPE_FACTORS if each in file.tensors}
    if divisors:  # of Llama 3 one set, of LongRoPE two
        whole = tuple(divisors) in (ROPE_FACTORS[:1], ROPE_FACTORS[1:])
        counts = {len(each) for each in divisors.values()}
        if not whole or counts != {turned // 2} or kind not in ("none", "longrope") or factor != 1:
            raise file.unread("scales its rotary embedding in a way which is not read")
        short, *long = divisors.values()
        return rope | {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": (long or [short])[0],
            _ORIGINAL: (long and field("rope.scaling.original_context_length"))
            or field("context_length"),
            "attention_factor": float(field("rope.scaling.attn_factor") or 1.0),
        }
    if kind == "linear":
        original = (field("context_length") or 0) / factor  # which counts scaled positions
        return rope | {"rope_type": "linear", "factor": factor, _ORIGINAL: original}
    if kind == "yarn" and yarn is not None:
        return rope | _yarn(file, factor) | dict(yarn)
    if kind != "none":
        raise file.unread(f"scales its rotary embedding ({kind}), which is not read")
    return rope | {"rope_type": "default"}


def _yarn(file: GgufFile, factor: float) -> dict[str, Any]:
    """The scaling by YaRN. Its multiplier is a tenth in files of DeepSeek."""
    field = file.field
    found: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        _ORIGINAL: field("rope.scaling.original_context_length"),
        "beta_fast": field("rope.scaling.yarn_beta_fast") or 32.0,
        "beta_slow": field("rope.scaling.yarn_beta_slow") or 1.0,
    }
    multiplier = field("rope.scaling.yarn_log_multiplier")
    if multiplier:
        if field("attention.kv_lora_rank"):
            multiplier = round(10 * multiplier, 6)
        found |= {"mscale": multiplier, "mscale_all_dim": multiplier}
    return found
