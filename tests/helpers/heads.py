"""Tiny random draft heads for tiny targets, as their trainers store them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.helpers import models


def write_eagle3(
    folder: Path,
    target: Path,
    *,
    draft_vocab_size: int | None = 61,
    seed: int = 0,
    own_embedding: bool = False,
    taps: int = 3,
    **config: Any,
) -> Path:
    """An EAGLE-3 head in the layout of SpecForge; `config`: of its config.json. With a
    `draft_vocab_size` of None it proposes all tokens by the target's output head."""
    torch.manual_seed(seed)
    of_target = json.loads((target / "config.json").read_text())
    hidden, vocab_size = of_target["hidden_size"], of_target["vocab_size"]
    heads, kv_heads, size, inner = 4, 2, 16, 40

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return 1.5 * torch.randn(rows, columns) / columns**0.5

    def norm() -> torch.Tensor:
        return 1 + 0.2 * torch.randn(hidden)

    tensors = {
        "fc.weight": matrix(hidden, taps * hidden),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        "midlayer.self_attn.q_proj.weight": matrix(heads * size, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": matrix(kv_heads * size, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": matrix(kv_heads * size, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": matrix(hidden, heads * size),
        "midlayer.mlp.gate_proj.weight": matrix(inner, hidden),
        "midlayer.mlp.up_proj.weight": matrix(inner, hidden),
        "midlayer.mlp.down_proj.weight": matrix(hidden, inner),
        "norm.weight": norm(),
    }
    if draft_vocab_size is not None:
        chosen = torch.randperm(vocab_size)[:draft_vocab_size].sort().values
        tensors["lm_head.weight"] = matrix(draft_vocab_size, hidden)
        tensors["d2t"] = chosen - torch.arange(draft_vocab_size)
        tensors["t2d"] = torch.isin(torch.arange(vocab_size), chosen)
    if own_embedding:
        tensors["embed_tokens.weight"] = 0.2 * torch.randn(vocab_size, hidden)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    made = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500.0,
        "tie_word_embeddings": False,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(made))
    return folder


def write_mtp(model_type: str, folder: Path, **overrides: Any) -> Path:
    """A target with an MTP layer in its checkpoint. The layer is one more of the target's kind."""
    count = models.NUM_LAYERS
    more: dict[str, Any] = {"num_hidden_layers": count + 1}
    for name in ("layer_types", "mlp_layer_types"):
        if name in models.CONFIGS[model_type]:
            kind = "full_attention" if name == "layer_types" else "sparse"
            more[name] = [*models.CONFIGS[model_type][name], kind]
    models.build(model_type, folder, **more, **overrides)
    raw = json.loads((folder / "config.json").read_text())
    raw["num_hidden_layers"] = count
    for name in ("layer_types", "mlp_layer_types"):
        if raw.get(name) is not None:
            raw[name] = raw[name][:count]
    qwen = model_type == "qwen3_next"
    if not qwen:
        raw["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(raw))
    hidden = raw["hidden_size"]
    file, own = folder / "model.safetensors", f"model.layers.{count}."
    tensors = load_file(file)
    extra = {
        "enorm.weight": 1 - qwen + 0.2 * torch.randn(hidden),
        "hnorm.weight": 1 - qwen + 0.2 * torch.randn(hidden),
        "eh_proj.weight": 1.5 * torch.randn(hidden, 2 * hidden) / (2 * hidden) ** 0.5,
        "shared_head.norm.weight": 1 - qwen + 0.2 * torch.randn(hidden),
    }
    if not qwen:
        extra["shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        extra["embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    names = {
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "eh_proj": "fc",
        "shared_head.norm": "norm",
    }
    found = {}
    for name, tensor in {**tensors, **{own + name: each for name, each in extra.items()}}.items():
        inner = name.removeprefix(own)
        if qwen and inner != name:
            module = inner.removesuffix(".weight")
            name = f"mtp.{names[module]}.weight" if module in names else f"mtp.layers.0.{inner}"
        found[name] = tensor
    save_file(found, file, {"format": "pt"})
    return folder
