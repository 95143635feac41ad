"""What the metadata of a GGUF file mean: the config of Transformers, and the names of its tensors.

The names are those of a checkpoint of safetensors files, in which each expert of a mixture has
matrices of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipespec.errors import ModelError
from pipespec.system.validation import shown

if TYPE_CHECKING:  # not needed if the header is cached
    from gguf import GGUFReader

FOREIGN = "take another file, or a safetensors checkpoint"
# Characters of another library's message in an error message.
LONGEST_REASON = 400
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
_MIXTURE = {"expert_used_count": "num_experts_per_tok"}
_QWEN_MIXTURE = {
    **_MIXTURE,
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_TOKENS = ("bos", "eos", "padding")
# The layers of Gemma 3 with global attention, and the theta of the others: llama.cpp's constants.
_GEMMA_PERIOD, _GEMMA_LOCAL_THETA, _GEMMA_27B_LAYERS = 6, 10000.0, 62
# Llama 3's scaling of its rotary embedding but for the factor (`rope_type: llama3`).
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

_PARTNERS = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}

# A value of the metadata of the architecture; None: there is none.
Field = Callable[[str], Any]


@dataclass(frozen=True)
class GgufArchitecture:
    """How files of an architecture of llama.cpp become a model of Transformers.

    Attributes:
        model_type: of Transformers.
        fields: the config's names of further metadata.
        settings: of the config, which llama.cpp takes for granted.
        permuted: parts of names in the file of matrices in which llama.cpp interleaves the two
            halves of each head; Hugging Face does not.
        shifted: norms are stored plus 1.
        experts: the names of the matrices gate, up and down of an expert.
    """

    model_type: str
    fields: Mapping[str, str]
    settings: Mapping[str, Any]
    permuted: tuple[str, ...] = ()
    shifted: bool = False
    experts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


_HALVES = (".attn_q.", ".attn_k.")
_MIXTRAL = GgufArchitecture(
    "mixtral",
    {**_MIXTURE, "expert_count": "num_local_experts"},
    {},
    permuted=_HALVES,
    experts=("w1", "w3", "w2"),
)
# By `general.architecture`; each has a test in tests/integration/test_gguf.py. Mixtral's is llama.
ARCHITECTURES = {
    "llama": GgufArchitecture("llama", {}, {}, permuted=_HALVES),
    "qwen2": GgufArchitecture("qwen2", {}, {}),
    "qwen3": GgufArchitecture("qwen3", {}, {}),
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
        {},
        shifted=True,
    ),
    "phi3": GgufArchitecture("phi3", {"attention.sliding_window": "sliding_window"}, {}),
}


def architecture_of(path: Path, reader: GGUFReader) -> GgufArchitecture:
    """That of a file. Raises ModelError."""
    kind = metadata(reader, "general.architecture")
    if kind not in ARCHITECTURES:
        raise ModelError(
            f"{path} holds a model of the architecture {kind!r}, which is not read from GGUF; read "
            f"are {', '.join(ARCHITECTURES)}"
        )
    found = ARCHITECTURES[kind]
    if metadata(reader, f"{kind}.expert_count"):
        found = _MIXTRAL if kind == "llama" else found
        if not found.fields:
            raise ModelError(
                f"{path} holds a mixture of experts of {kind}, which is not read; {FOREIGN}"
            )
    return found


def metadata(reader: GGUFReader, name: str) -> Any:
    """The metadata with this name; None: there is none."""
    field = reader.fields.get(name)
    return None if field is None else field.contents()


def config_of(path: Path, reader: GGUFReader, architecture: GgufArchitecture) -> Any:
    """The config of Transformers. Raises ModelError."""
    from transformers import AutoConfig

    kind = metadata(reader, "general.architecture")
    field: Field = lambda name: metadata(reader, f"{kind}.{name}")  # noqa: E731
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
        settings[f"{name}_token_id"] = metadata(reader, f"tokenizer.ggml.{each}_token_id")
    if EMBEDDING in shapes:  # its rows may be more than the tokenizer's tokens
        settings["vocab_size"] = shapes[EMBEDDING][0]
    settings["tie_word_embeddings"] = OUTPUT not in shapes
    try:
        if "head_dim" not in settings:
            settings["head_dim"] = settings["hidden_size"] // settings["num_attention_heads"]
        turned = field("rope.dimension_count")
        if turned not in (None, settings["head_dim"]):
            raise ModelError(
                f"{path} turns {turned} of the {settings['head_dim']} numbers of a head by their "
                f"position, which is not read; {FOREIGN}"
            )
        rope = _rope(path, reader, field, settings["head_dim"])
        settings |= {"rope_parameters": rope, **architecture.settings}
        if architecture.model_type == "gemma3_text":
            settings |= _gemma3(settings)
        return AutoConfig.for_model(architecture.model_type, **settings)
    except ModelError:
        raise
    except Exception as error:  # model code may raise anything for invalid values
        raise not_valid(path, error) from error


def not_valid(path: Path, error: Exception) -> ModelError:
    """That the metadata of a file make no config or model, and why."""
    why = " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_REASON]
    return ModelError(f"the metadata of {path} are not valid: {why}; {FOREIGN}")


def _rope(path: Path, reader: GGUFReader, field: Field, head_dim: int) -> dict[str, Any]:
    """The parameters of the rotary embedding."""
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
    tensors = {each.name: each for each in reader.tensors}
    if ROPE_FACTORS in tensors:
        factors = [float(each) for each in tensors[ROPE_FACTORS].data]
        scaled = _llama3(factors, rope["rope_theta"], head_dim)
        if kind != "none" or scaled is None:
            raise ModelError(
                f"{path} scales its rotary embedding in another way than Llama 3, which is not "
                f"read; {FOREIGN}"
            )
        return rope | scaled
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": factor}
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


def _gemma3(settings: Mapping[str, Any]) -> dict[str, Any]:
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


def shapes_of(reader: GGUFReader) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor, by its name in the file."""
    return {each.name: tuple(int(n) for n in reversed(each.shape)) for each in reader.tensors}


def names_of(
    path: Path, reader: GGUFReader, architecture: GgufArchitecture, config: Any
) -> dict[str, list[Any]]:
    """Of each tensor of a checkpoint that the file has: its name there, its shape, and which of the
    experts stored together it is of, or None. Raises ModelError."""
    import torch
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    from transformers import AutoModelForCausalLM

    kind = metadata(reader, "general.architecture")
    of_kind = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == kind)
    known = get_tensor_name_map(of_kind, config.num_hidden_layers)
    shapes = shapes_of(reader)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # model code may raise anything for invalid values
        raise not_valid(path, error) from error
    found: dict[str, list[Any]] = {}
    for name, tensor in model.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        if stem.endswith(".experts") and tensor.ndim == 3:
            found |= _experts(stem, suffix, architecture, shapes)
            continue
        theirs = f"{known.get_name(stem)}.{suffix}"
        if theirs in shapes:
            shape = shapes[theirs]
            if shape == tuple(tensor.shape[1:]) and tensor.shape[0] == 1:
                shape = tuple(tensor.shape)
            found[name] = [theirs, shape, None]
    homeless = shapes.keys() - {theirs for theirs, _, _ in found.values()} - {ROPE_FACTORS}
    if homeless:
        raise ModelError(
            f"{path} holds {len(homeless)} tensors that {config.model_type} of Transformers has "
            f"no place for, for example {min(homeless)}; {FOREIGN}"
        )
    return found


def _experts(
    stem: str, stack: str, architecture: GgufArchitecture, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, list[Any]]:
    """The matrices of the experts of a layer that Transformers has in one stack."""
    gate, up, down = architecture.experts
    parts = {"gate": gate, "up": up} if stack == "gate_up_proj" else {"down": down}
    layer = next(part for part in stem.split(".") if part.isdigit())
    found = {}
    for theirs, ours in parts.items():
        stored = f"blk.{layer}.ffn_{theirs}_exps.weight"
        count, *shape = shapes.get(stored, (0,))
        for expert in range(count):
            found[f"{stem}.{expert}.{ours}.weight"] = [stored, shape, expert]
    return found


def partner_of(name: str) -> str | None:
    """The other matrix of an expert, gate or up, that Transformers stacks with this one; None:
    there is none."""
    stem, _, part = name.rpartition(".")
    other = _PARTNERS.get(part) if ".experts." in stem else None
    return None if other is None else f"{stem}.{other}"
