"""What the metadata of a GGUF file mean: the config of Transformers, and the names of its tensors.

The names are those of a checkpoint of safetensors files, in which each expert of a mixture has
matrices of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipespec.engine.formats.gguf_architectures import (
    ARCHITECTURES,
    Field,
    GgufArchitecture,
    Known,
    Shapes,
    architecture_named,
)
from pipespec.engine.formats.gguf_tensors import LATENT, NUMBERS, TRANSPOSED, Stored
from pipespec.errors import ModelError
from pipespec.system.validation import reason, shown

if TYPE_CHECKING:  # not needed if the header is cached
    from pipespec.engine.formats.gguf_file import GgufFile

FOREIGN = "take another file, or a safetensors checkpoint"
EMBEDDING, ROPE_FACTORS, OUTPUT = "token_embd.weight", "rope_freqs.weight", "output.weight"
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
_TOKENS = ("bos", "eos", "padding")
# Llama 3's scaling of its rotary embedding but for the factor (`rope_type: llama3`).
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# The ends of names whose tensors llama.cpp names in another way: what follows the name of the
# module in its table, and the end of its own.
_UNLIKE = {"e_score_correction_bias": ("e_score_correction", "bias"), "sinks": ("sinks", "weight")}
_PARTNERS = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}


def architecture_of(path: Path, reader: GgufFile) -> GgufArchitecture:
    """That of a file. Raises ModelError."""
    kind = reader.metadata("general.architecture")
    try:
        return architecture_named(kind, partial(_field, reader), shapes_of(reader))
    except KeyError:
        raise ModelError(
            f"{path} holds a model of the architecture {kind!r}, which is not read from GGUF; read "
            f"are {', '.join(ARCHITECTURES)}"
        ) from None


def _field(reader: GgufFile, name: str) -> Any:
    """A value of the metadata of the file's architecture; None: there is none."""
    return reader.metadata(f"{reader.metadata('general.architecture')}.{name}")


def config_of(path: Path, reader: GgufFile, architecture: GgufArchitecture) -> Any:
    """The config of Transformers. Raises ModelError."""
    from transformers import AutoConfig

    kind = reader.metadata("general.architecture")
    field = partial(_field, reader)
    shapes = shapes_of(reader)
    layers = field("block_count")
    if not isinstance(layers, int) or not 0 < layers <= len(shapes):
        raise ModelError(
            f"the metadata of {path} count {shown(layers)} layers ({kind}.block_count), but it "
            f"holds {len(shapes)} tensors; fetch it again"
        )
    settings = {
        name: value
        for theirs, name in {**_COMMON, **architecture.fields}.items()
        if (value := field(theirs)) is not None
    }
    for name, value in settings.items():
        if not isinstance(value, int | float):
            raise ModelError(
                f"{path} has layers that differ in {name}, which is not read; {FOREIGN}"
            )
    for each in _TOKENS:
        name = "pad" if each == "padding" else each
        settings[f"{name}_token_id"] = reader.metadata(f"tokenizer.ggml.{each}_token_id")
    if EMBEDDING in shapes:  # its rows may be more than the tokenizer's tokens
        settings["vocab_size"] = shapes[EMBEDDING][0]
    settings["tie_word_embeddings"] = OUTPUT not in shapes
    try:
        if "head_dim" not in settings:
            settings["head_dim"] = settings["hidden_size"] // settings["num_attention_heads"]
        turned = field("rope.dimension_count")
        if turned not in (None, settings["head_dim"]) and not architecture.partial:
            raise ModelError(
                f"{path} turns {turned} of the {settings['head_dim']} numbers of a head by their "
                f"position, which is not read; {FOREIGN}"
            )
        rope = _rope(path, reader, field, settings["head_dim"], architecture.yarn)
        if architecture.partial and turned is not None:
            rope["partial_rotary_factor"] = turned / settings["head_dim"]
        settings |= {"rope_parameters": rope, **architecture.settings}
        if architecture.more is not None:
            settings |= architecture.more(Known(field, settings, shapes))
        return AutoConfig.for_model(architecture.model_type, **settings)
    except ModelError:
        raise
    except Exception as error:  # model code may raise anything for invalid values
        raise not_valid(path, error) from error


def not_valid(path: Path, error: Exception) -> ModelError:
    """That the metadata of a file make no config or model, and why."""
    return ModelError(f"the metadata of {path} are not valid: {reason(error)}; {FOREIGN}")


def _rope(
    path: Path, reader: GgufFile, field: Field, head_dim: int, yarn: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The parameters of the rotary embedding; `yarn`: see `GgufArchitecture`."""
    rope: dict[str, Any] = {"rope_theta": float(field("rope.freq_base") or 10000.0)}
    kind = field("rope.scaling.type")
    factor = next(
        (
            float(found)
            for name in ("scaling.factor", "scale_linear")  # the second name is old
            if (found := field(f"rope.{name}")) not in (None, 0, 1)
        ),
        1.0,
    )
    if kind is None:  # for llama.cpp a factor then means linear
        kind = "linear" if factor != 1 else "none"
    if ROPE_FACTORS in reader.tensors:
        factors = [float(each) for each in reader.data(ROPE_FACTORS)]
        scaled = _llama3(factors, rope["rope_theta"], head_dim)
        if kind != "none" or scaled is None:
            raise ModelError(
                f"{path} scales its rotary embedding in another way than Llama 3, which is not "
                f"read; {FOREIGN}"
            )
        return rope | scaled
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and yarn is not None:
        return rope | _yarn(field, factor) | dict(yarn)
    if kind != "none":
        raise ModelError(
            f"{path} scales its rotary embedding ({kind}), which is not read; {FOREIGN}"
        )
    return rope | {"rope_type": "default"}


def _llama3(factors: list[float], theta: float, head_dim: int) -> dict[str, Any] | None:
    """The scaling of which llama.cpp's converter made these divisors of frequencies; None: it is
    not that of Llama 3."""
    most = max(factors, default=0.0)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    original = _LLAMA3["original_max_position_embeddings"]
    if len(factors) != head_dim // 2 or most <= 0:
        return None
    for i, found in enumerate(factors):
        turns = original / (2 * math.pi * theta ** (2 * i / head_dim))  # in the original context
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        expected = 1 / ((1 - smooth) / most + smooth)
        if not math.isclose(found, expected, rel_tol=1e-4):
            return None
    return {"rope_type": "llama3", "factor": most, **_LLAMA3}


def _yarn(field: Field, factor: float) -> dict[str, Any]:
    """The scaling by YaRN. Its multiplier is a tenth in files of DeepSeek."""
    found: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": field("rope.scaling.original_context_length"),
        "beta_fast": field("rope.scaling.yarn_beta_fast") or 32.0,
        "beta_slow": field("rope.scaling.yarn_beta_slow") or 1.0,
    }
    multiplier = field("rope.scaling.yarn_log_multiplier")
    if multiplier:
        if field("attention.kv_lora_rank"):
            multiplier = round(10 * multiplier, 6)
        found |= {"mscale": multiplier, "mscale_all_dim": multiplier}
    return found


def shapes_of(reader: GgufFile) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor, by its name in the file."""
    return {name: each.shape for name, each in reader.tensors.items()}


def names_of(
    path: Path, reader: GgufFile, architecture: GgufArchitecture, config: Any
) -> dict[str, Stored]:
    """Each tensor of a checkpoint that the file has. Raises ModelError."""
    import torch
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    from transformers import AutoModelForCausalLM

    kind = reader.metadata("general.architecture")
    of_kind = next((arch for arch, name in MODEL_ARCH_NAMES.items() if name == kind), None)
    if of_kind is None:
        raise ModelError(f"{path} holds {kind}, which this version of gguf does not know; renew it")
    layers = int(reader.metadata(f"{kind}.block_count"))  # with those that are not loaded
    known = get_tensor_name_map(of_kind, layers)
    shapes = shapes_of(reader)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # model code may raise anything for invalid values
        raise not_valid(path, error) from error
    found: dict[str, Stored] = {}
    for name, tensor in model.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        if stem.endswith(".experts"):
            found |= _experts(name, architecture, shapes)
            continue
        theirs = f"{known.get_name(stem)}.{suffix}"
        if suffix in _UNLIKE:
            theirs = f"{known.get_name(f'{stem}.{_UNLIKE[suffix][0]}')}.{_UNLIKE[suffix][1]}"
        if theirs in shapes:
            shape = shapes[theirs]
            if shape == tuple(tensor.shape[1:]) and tensor.shape[0] == 1:
                shape = tuple(tensor.shape)
            found[name] = Stored((theirs,), shape)
        elif stem.endswith(".kv_b_proj"):
            parts = tuple(theirs.replace("attn_kv_b", f"attn_{part}_b") for part in "kv")
            if all(len(shapes.get(part, ())) == 3 for part in parts):
                (heads, latent, of_keys), (_, of_values, _) = (shapes[part] for part in parts)
                shape = heads * (of_keys + of_values), latent
                found[name] = Stored(parts, shape, form=LATENT)
    beyond = re.compile(rf"blk\.({'|'.join(map(str, range(config.num_hidden_layers, layers)))})\.")
    homeless = {
        theirs
        for theirs in shapes.keys() - {part for each in found.values() for part in each.names}
        if theirs != ROPE_FACTORS
        and (layers == config.num_hidden_layers or not beyond.match(theirs))
    }
    if homeless:
        raise ModelError(
            f"{path} holds {len(homeless)} tensors that {config.model_type} of Transformers has "
            f"no place for, for example {min(homeless)}; {FOREIGN}"
        )
    return found


def _experts(name: str, architecture: GgufArchitecture, shapes: Shapes) -> dict[str, Stored]:
    """The matrices, or biases, of the experts of a layer that Transformers has in one stack."""
    stem, _, stack = name.rpartition(".")
    is_bias = stack.endswith("_bias")
    parts = ("gate", "up") if stack.startswith("gate_up") else ("down",)
    layer = next(part for part in stem.split(".") if part.isdigit())
    suffix = "bias" if is_bias else "weight"
    stored = tuple(f"blk.{layer}.ffn_{part}_exps.{suffix}" for part in parts)
    if not all(theirs in shapes for theirs in stored):
        return {}
    if architecture.transposed:
        count, out, *inputs = shapes[stored[0]]
        shape = (count, *inputs, len(stored) * out)
        return {name: Stored(stored, shape, form=NUMBERS if is_bias else TRANSPOSED)}
    found = {}
    for part, theirs in zip(parts, stored, strict=True):
        count, *of_one = shapes[theirs]
        for expert in range(count):
            ours = f"{stem}.{expert}.{architecture.experts[part]}.{suffix}"
            found[ours] = Stored((theirs,), tuple(of_one), expert)
    return found


def partner_of(name: str) -> str | None:
    """The other matrix of an expert, gate or up, that Transformers stacks with this one; None:
    there is none."""
    stem, _, part = name.rpartition(".")
    other = _PARTNERS.get(part) if ".experts." in stem else None
    return None if other is None else f"{stem}.{other}"
