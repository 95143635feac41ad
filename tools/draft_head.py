"""A draft head of one decoder layer, as EAGLE-3's (Li et al. 2025), in the folder that SpecForge
writes and SGLang and vLLM read: `config.json` and `model.safetensors`.

Row i reads what is known of position i and the embedding of token i + 1, and says token i + 2. What
is known are the target's hidden states at three layers, fused by `fc`, or, of a position that the
head drafted itself, its own output before the last norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

JOINED = ("q_proj", "k_proj", "v_proj")  # these read the embedding and what is known
# What a head's configuration has of its target's.
SHARED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "vocab_size",
    "rms_norm_eps",
    "bos_token_id",
    "eos_token_id",
)


def feature_layers(count: int) -> list[int]:
    """After how many of the target's layers the head reads its hidden states, by default of
    SpecForge, SGLang and vLLM."""
    return [2, count // 2, count - 3]


def head_config(target: PreTrainedConfig, draft_vocabulary: int) -> LlamaConfig:
    """The configuration of a head that says so many of the target's tokens."""
    theta = target.rope_parameters["rope_theta"]
    layers = feature_layers(target.num_hidden_layers)
    if layers[0] > layers[1] or layers[1] > layers[2]:
        raise SystemExit(
            f"The target has {target.num_hidden_layers} layers, too few for the features of three."
        )
    values: dict[str, Any] = {name: getattr(target, name, None) for name in SHARED}
    values |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "draft_vocab_size": draft_vocabulary,
        # vLLM counts the layers below the state, SpecForge and SGLang name the last of them.
        "eagle_aux_hidden_state_layer_ids": layers,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers]},
    }
    return LlamaConfig(**values)


class DraftHead(nn.Module):
    """The head; its parameters and buffers have the names of the file."""

    t2d: Tensor  # of each of the target's tokens, whether the head says it
    d2t: Tensor  # from each of the head's tokens to its id in the target's vocabulary

    def __init__(self, config: LlamaConfig):
        super().__init__()
        hidden = config.hidden_size
        self.config = config
        self.rotary = LlamaRotaryEmbedding(config)
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.midlayer = LlamaDecoderLayer(config, 0)
        self.midlayer.hidden_norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        attention = self.midlayer.self_attn
        for name in JOINED:
            wide = nn.Linear(2 * hidden, getattr(attention, name).out_features, bias=False)
            setattr(attention, name, wide)
        self.norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.register_buffer("t2d", torch.ones(config.vocab_size, dtype=torch.bool))
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    @classmethod
    def before_training(cls, target: PreTrainedModel, said: Tensor) -> DraftHead:
        """A head that says these of the target's tokens `[n]`. It begins as the target's last layer
        over the last of the features, which reads the embedding as it reads these."""
        head = cls(head_config(target.config, len(said)))
        known = said.sort().values
        last = target.model.layers[-1].state_dict()
        own = head.midlayer.state_dict()
        own |= {name: last[name] for name in own if name in last}
        for name in JOINED:
            own[f"self_attn.{name}.weight"] = last[f"self_attn.{name}.weight"].repeat(1, 2)
        own["hidden_norm.weight"] = own["input_layernorm.weight"]
        head.midlayer.load_state_dict(own)
        hidden = head.config.hidden_size
        with torch.no_grad():
            head.fc.weight.zero_()[:, -hidden:] = torch.eye(hidden)
            head.norm.weight.copy_(target.model.norm.weight)
            head.lm_head.weight.copy_(target.get_output_embeddings().weight[known])
        head.t2d.zero_()[known] = True
        head.d2t.copy_(known - torch.arange(len(known)))
        return head

    def places(self) -> Tensor:
        """Of each of the target's tokens its number among the head's, -1 for none."""
        return torch.where(self.t2d, self.t2d.cumsum(0) - 1, -1)

    def projected(self, known: Tensor, embedded: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values `[heads, n, size]` of rows at positions `[n]`, from what is
        known `[n, hidden]` and embeddings `[n, hidden]`."""
        layer, size = self.midlayer, self.config.head_dim
        joined = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(known)), -1)
        q, k, v = (
            getattr(layer.self_attn, name)(joined).view(len(at), -1, size).transpose(0, 1)
            for name in JOINED
        )
        q, k = apply_rotary_pos_emb(q[None], k[None], *self.rotary(joined, at[None]))
        groups = len(q[0]) // len(k[0])
        return q[0], k[0].repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)

    def output(
        self, known: Tensor, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], mask: Any
    ) -> Tensor:
        """Outputs `[n, hidden]` of rows that attend to the first keys `[heads, m, size]`, to which
        a mask `[n, m]` is added, and each to its own `[heads, n, size]` of the other ones."""
        scale = q.shape[-1] ** -0.5
        scores = [q @ keys[0].mT * scale + mask]
        scores += [(q * own).sum(-1, keepdim=True) * scale for own in keys[1:]]
        weights = torch.cat(scores, -1).softmax(-1)
        shared = keys[0].shape[1]
        mixed = weights[..., :shared] @ values[0]
        for number, own in enumerate(values[1:], shared):
            mixed = mixed + weights[..., number, None] * own
        state = known + self.midlayer.self_attn.o_proj(mixed.transpose(0, 1).flatten(1))
        return state + self.midlayer.mlp(self.midlayer.post_attention_layernorm(state))

    def forward(
        self, features: Tensor, embedded: Tensor, steps: int, first: int = 0
    ) -> Iterator[Tensor]:
        """Outputs of steps at bases `first` to n, `[n - first, hidden]` each, from features
        `[n, 3 * hidden]` and embeddings `[n + steps, hidden]`. Step j at base i reads token i + j,
        attends to the rows of step 1 up to base i, and to its own later ones."""
        n = len(features)
        known = self.fc(features)
        q, k, v = self.projected(known, embedded[1 : n + 1], torch.arange(n))
        keys, values, known, q = [k], [v], known[first:], q[:, first:]
        mask = torch.ones(n, n).tril().log()[first:]
        for step in range(1, steps + 1):
            if step > 1:
                at = torch.arange(first, n) + step - 1
                q, k, v = self.projected(known, embedded[first + step : n + step], at)
                keys.append(k)
                values.append(v)
            known = self.output(known, q, keys, values, mask)
            yield known

    def logits(self, output: Tensor) -> Tensor:
        """Of the head's own tokens `[n, draft_vocab_size]`."""
        return self.lm_head(self.norm(output))

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: value.to(dtype) for name, value in self.named_parameters()}
        save_file(self.state_dict() | weights, folder / "model.safetensors")
        config = deepcopy(self.config)
        config.dtype = config.torch_dtype = str(dtype).removeprefix("torch.")
        # As Transformers before 5 say it.
        config.rope_theta = config.rope_parameters["rope_theta"]
        config.to_json_file(folder / "config.json", use_diff=False)
