"""Tiny random draft heads for tiny targets, as their trainers store them."""

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.helpers import models


def write_eagle3(
    folder: Path,
    target: Path,
    *,
    draft_vocab_size: int | None = 61,
    seed: int = 0,
    own_embedding: bool = False,
    layers: Sequence[int] = (0, 1, 3),
    **config: Any,
) -> Path:
    """An EAGLE-3 head in the layout of SpecForge; `config`: of its config.json. With a
    `draft_vocab_size` of None it proposes all tokens by the target's output head."""
    torch.manual_seed(seed)
    of_target = json.loads((target / "config.json").read_text())
    hidden, vocab_size = of_target["hidden_size"], of_target["vocab_size"]
    heads, kv_heads, size, inner = 4, 2, 16, 40

    def matrix(rows: int, columns: int) -> Tensor:
        return 1.5 * torch.randn(rows, columns) / columns**0.5

    def norm() -> Tensor:
        return 1 + 0.2 * torch.randn(hidden)

    tensors = {
        "fc.weight": matrix(hidden, len(layers) * hidden),
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
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [*layers]},
        **config,
    }
    (folder / "config.json").write_text(json.dumps(made))
    return folder


# The names of an MTP layer's own modules in the layout of Qwen3-Next.
_OF_QWEN = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}
_KINDS = {"layer_types": "full_attention", "mlp_layer_types": "sparse"}


def shared(target: Path) -> Path:
    """The folder of an EAGLE-3 head for a target, made once for all processes of a run of the
    suite."""
    key = hashlib.sha256((target / "model.safetensors").read_bytes()).hexdigest()[:16]
    folder = models.SHARED / f"head-{key}"
    if not folder.exists():
        models.SHARED.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=models.SHARED) as place:
            made = write_eagle3(Path(place) / "head", target)
            with suppress(OSError):  # another process was faster
                made.rename(folder)
    return folder


def write_mtp(model_type: str, folder: Path, layers: int = 1, **overrides: Any) -> Path:
    """A target with MTP layers in its checkpoint: more layers of its kind. Beside it, in the
    folder `whole`, these layers are some of the target's, as Transformers loads it."""
    count, qwen = models.NUM_LAYERS, model_type == "qwen3_next"
    kinds = {
        name: [*models.CONFIGS[model_type][name], *[kind] * layers]
        for name, kind in _KINDS.items()
        if name in models.CONFIGS[model_type]
    }
    more = {"num_hidden_layers": count + layers, **kinds, **overrides}
    models.build(model_type, folder / "whole", **more)
    tensors = load_file(folder / "whole" / "model.safetensors")
    raw = json.loads((folder / "whole" / "config.json").read_text())
    hidden, found = raw["hidden_size"], dict(tensors)
    for number in range(layers):
        own = f"model.layers.{count + number}."
        if qwen:
            for name in [name for name in tensors if name.startswith(own)]:
                found[f"mtp.layers.{number}.{name.removeprefix(own)}"] = found.pop(name)
        else:
            found[own + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
            found[own + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            raw["num_nextn_predict_layers"] = layers
        for name in _OF_QWEN if not (qwen and number) else ():
            weight = 1 - qwen + 0.2 * torch.randn(hidden)
            if name == "eh_proj":
                weight = 1.5 * torch.randn(hidden, 2 * hidden) / (2 * hidden) ** 0.5
            found[mtp_name(found, name, number)] = weight
    raw["num_hidden_layers"] = count
    raw |= {name: raw[name][:count] for name in _KINDS if raw.get(name) is not None}
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def mtp_name(tensors: Mapping[str, Tensor], name: str, number: int) -> str:
    """The weight of a module that `write_mtp` adds to a layer: in the layout of Qwen3-Next all
    layers have the same."""
    if any(each.startswith("mtp.") for each in tensors):
        return f"mtp.{_OF_QWEN[name]}.weight"
    return f"model.layers.{models.NUM_LAYERS + number}.{name}.weight"


class PlainMTP:
    """The MTP layers that `write_mtp` has made, in plain torch and by Transformers' own layers, as
    DeepSeek-V3's report has them (section 2.2): each computes whole texts."""

    def __init__(self, folder: Path):
        tensors = load_file(folder / "model.safetensors")
        count = models.NUM_LAYERS
        model = AutoModelForCausalLM.from_pretrained(folder / "whole", dtype=torch.float32)
        self.base, self.config, self.output = model.model, model.config, model.lm_head
        self.layers = self.base.layers[count:]
        kind, size = type(self.layers[0].input_layernorm), self.config.hidden_size
        self.own: list[dict[str, Any]] = []
        for number in range(len(self.layers)):
            own = {name: tensors[mtp_name(tensors, name, number)] for name in _OF_QWEN}
            norms = {name: kind(size, eps=self.config.rms_norm_eps) for name in own}
            for name, norm in norms.items():
                norm.weight.data = own[name]
            self.own.append({**norms, "eh_proj": own["eh_proj"]})
        if getattr(self.config, "layer_types", None) is not None:
            self.config.layer_types = self.config.layer_types[count : count + 1]
        self.config.num_hidden_layers = 1

    @torch.no_grad()
    def states(self, number: int, tokens: list[int], before: Tensor) -> Tensor:
        """The normed states of rows with these tokens in a layer, each of which attends to those
        before it, given what is known of the positions before them, `[rows, hidden]`."""
        own = self.own[number]
        self.base.layers, self.base.norm = self.layers[number : number + 1], own["shared_head.norm"]
        embedded = self.base.embed_tokens(torch.tensor(tokens))
        joined = torch.cat((own["enorm"](embedded), own["hnorm"](before)), -1) @ own["eh_proj"].T
        return self.base(inputs_embeds=joined[None], use_cache=False).last_hidden_state[0]

    @torch.no_grad()
    def logits(self, tokens: list[int], drafted: list[int], features: Tensor) -> Tensor:
        """After draft tokens below the last of a text, given the features of its positions but the
        last, `[vocab]`."""
        path, before = [*tokens, *drafted], features
        for number in range(min(len(drafted) + 1, len(self.layers))):
            # The k-th layer reads the k-th token behind each position of which it knows a state.
            first = number + 1
            read = before
            before = states = self.states(number, path[first : first + len(read)], read)
        while first + len(read) < len(path):  # the last layer, from its own states
            read = torch.cat((read, states[-1:]))
            states = self.states(number, path[first : first + len(read)], read)
        return self.output(states[-1])


def write_follower(folder: Path) -> tuple[Path, Path]:
    """A target each token of which follows from the one before it, and an EAGLE-3 head that knows
    that: the layers of both add nothing to an embedding that is a direction for each token."""
    size = 64
    target = models.build(
        "llama", folder / "target", vocab_size=size, hidden_size=size, pad_token_id=None
    )
    tensors = load_file(target / "model.safetensors")
    following = torch.roll(torch.eye(size), 7, 0)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif "norm" in name:
            tensor.fill_(1.0)
    tensors |= {"model.embed_tokens.weight": torch.eye(size), "lm_head.weight": 9 * following}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    head = write_eagle3(folder / "head", target, draft_vocab_size=size, num_key_value_heads=4)
    own = load_file(head / "model.safetensors")
    own["fc.weight"].zero_()
    own["midlayer.mlp.down_proj.weight"].zero_()
    # A row attends to the same token alone, as those of others have other directions in each of
    # four heads, and puts its embedding in place of what it has read.
    directions = F.normalize(torch.randn(4, size // 4, size), dim=1).reshape(size, size)
    same = torch.cat((directions, torch.zeros(size, size)), 1)
    instead = torch.cat((torch.eye(size), -torch.eye(size)), 1)
    own |= {name: torch.ones(size) for name in own if "norm" in name}
    own |= {f"midlayer.self_attn.{name}_proj.weight": 4 * same for name in "qk"}
    own["midlayer.self_attn.v_proj.weight"] = 4 * instead
    own |= {"midlayer.self_attn.o_proj.weight": torch.eye(size), "lm_head.weight": following}
    save_file(own, head / "model.safetensors")
    return target, head


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def rotated(x: Tensor, theta: float) -> Tensor:
    """Rotary embedding of rows `[rows, heads, size]` at the positions 0, 1, ..."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x))[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def eagle3(w: dict[str, Tensor], embedded: Tensor, before: Tensor) -> Tensor:
    """The states of an EAGLE-3 head's rows, each of which attends to those before it, in plain
    torch: `before` is what it reads of the positions before them."""
    count = len(before)
    both = (
        rms(embedded, w["midlayer.input_layernorm.weight"]),
        rms(before, w["midlayer.hidden_norm.weight"]),
    )
    joined = torch.cat(both, -1)
    q, k, v = (
        (joined @ w[f"midlayer.self_attn.{name}_proj.weight"].T).view(count, -1, 16)
        for name in "qkv"
    )
    q, k = rotated(q, 500.0), rotated(k, 500.0)
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / 4 + torch.ones(count, count).tril().log()
    mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(count, -1)
    x = before + mixed @ w["midlayer.self_attn.o_proj.weight"].T
    y = rms(x, w["midlayer.post_attention_layernorm.weight"])
    gate, up = (y @ w[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (F.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T
