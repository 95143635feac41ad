"""GGUF files of small models, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGUFWriter, get_tensor_name_map
from gguf import GGMLQuantizationType as Type
from gguf.quants import quantize
from safetensors.torch import load_file

# Weights of a block of the kinds that the package cannot make: its bytes are drawn.
DRAWN = {Type.Q4_K: 144, Type.Q6_K: 210}
BLOCK = 256


def in_turns(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head as llama.cpp has them: one of the first half, one of the second."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def drawn(shape: tuple[int, ...], kind: Type, seed: int) -> np.ndarray:
    """Rows of blocks of random bytes, whose scales keep the weights small: `[rows, bytes]`."""
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (shape[0], shape[1] // BLOCK, DRAWN[kind]), np.uint8)
    scale = np.float16(0.0005 if kind == Type.Q4_K else 0.0002)
    where = [0, 2] if kind == Type.Q4_K else [208]
    for at in where:
        blocks[..., at : at + 2] = np.frombuffer(scale.tobytes(), np.uint8)
    return blocks.reshape(shape[0], -1)


def write(
    source: Path,
    file: Path,
    kind: str,
    type_of: Callable[[str], Type],
    *,
    tokenizer: Path | None = None,
    **metadata: Any,
) -> Path:
    """The model in the folder `source` as a GGUF file of the architecture `kind`.

    `type_of` returns the type of the tensor of a Hugging Face name; `metadata` are further
    fields, with `_` for `.` twice.
    """
    config = json.loads((source / "config.json").read_text())
    writer = GGUFWriter(file, kind)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    writer.add_vocab_size(config["vocab_size"])
    for name, value in metadata.items():
        field = name.replace("__", ".")
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(field, value)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer)
    of_kind = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == kind)
    names = get_tensor_name_map(of_kind, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for seed, (name, tensor) in enumerate(load_file(source / "model.safetensors").items()):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        weight = tensor.float().numpy()
        stem, _, suffix = name.rpartition(".")
        theirs = f"{names.get_name(stem)}.{suffix}"
        wanted = Type.F32 if weight.ndim == 1 else type_of(name)
        part = stem.rpartition(".")[2]
        if kind == "llama" and part in heads:
            weight = in_turns(weight, heads[part])
        if wanted in DRAWN:
            data, shape = drawn(weight.shape, wanted, seed), None
            writer.add_tensor(theirs, data, raw_shape=shape, raw_dtype=wanted)
        else:
            writer.add_tensor(theirs, quantize(weight, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: GGUFWriter, folder: Path) -> None:
    """A byte-pair tokenizer of Hugging Face, as llama.cpp's `gpt2`."""
    stored = json.loads((folder / "tokenizer.json").read_text())
    model = stored["model"]
    special = {each["content"]: each["id"] for each in stored["added_tokens"] if each["special"]}
    tokens = sorted(model["vocab"] | special, key=lambda token: (model["vocab"] | special)[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    writer.add_token_merges(merges)
    config = json.loads((folder / "generation_config.json").read_text())
    writer.add_eos_token_id(config["eos_token_id"])
    template = folder / "chat_template.jinja"
    if template.exists():
        writer.add_chat_template(template.read_text())
