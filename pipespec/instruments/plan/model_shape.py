"""The sizes of a model from its config alone, for plans before anything is downloaded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipespec.engine.architectures import require_supported
from pipespec.engine.checkpoint.model_path import resolve_config
from pipespec.engine.checkpoint.text_part import text_config, text_type
from pipespec.errors import ModelError
from pipespec.instruments.emulation.machine import experts_read
from pipespec.instruments.plan.hybrid_shape import (
    GATED_QUERIES,
    HYBRIDS,
    MeanLayer,
    adjusted_inner,
    kept_sizes,
    layer_kinds,
    mean_layer,
)
from pipespec.placement.rank_needs import STATES
from pipespec.system.validation import Unreadable, read_json

# What a number of the layers takes with scales and zeros of groups of 128 (AWQ, GPTQ), in bytes.
WEIGHT_BYTES = {"bfloat16": 2.0, "int8": 1.03, "fp8": 1.0, "int4": 0.53}
# What a batch moves for it: FP8 is read, becomes bfloat16, is scaled and is read again.
MOVED_BYTES = {**WEIGHT_BYTES, "fp8": 9.0}
# Numbers of embedding, head and KV are in bfloat16.
ITEM = 2
# Config files of published models, with the fields that count.
TABLE = Path(__file__).with_name("models.json")
# Names of one thing in different architectures.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_SHARED_EXPERTS = (
    *("n_shared_experts", "moe_num_shared_experts", "num_shared_expert", "num_shared_experts"),
)
_SHARED_SIZE = ("shared_expert_intermediate_size", "shared_intermediate_size")
# Architectures whose MLP has no gate, and whose KV heads are always the query heads.
_TWO_MATRICES = (
    "apertus",
    "arcee",
    "gpt_neox",
    "jais2",
    "nemotron",
    "nemotron_h",
    "persimmon",
    "phi",
    "starcoder2",
)
_ALL_KV_HEADS = ("gpt_neox", "persimmon")
# Architectures whose layers differ in their heads, attend twice, or have experts or other matrices
# of attention, and those with a gate for each number of the attention's output.
_UNUSUAL = (
    "axk2",
    "dots3_note_text",
    "gemma4_text",
    "gemma4_unified_text",
    "jetmoe",
    "longcat_flash",
    "mimo_v2_flash",
)
_GATED = ("afmoe", "beam")
# Mixtures with one shared expert, which their config.json need not count.
_ONE_SHARED = ("hunyuan_v1_moe", "llama4_text")
# What says how a model was tuned; the second also takes what follows it, such as a date.
_TUNED = re.compile(r"-(instruct|chat|it|base|thinking|hf)(?=-|$)")
_VARIANT = re.compile(r"-(instruct|chat|it|base|thinking)\b.*$")


@dataclass(frozen=True)
class ModelShape:
    """Numbers of parameters of a decoder.

    Attributes:
        dense: of a layer, in what every row is multiplied with.
        experts, chosen: of a layer, and by each row; 0: there are none.
        expert: parameters of one expert.
        kv: numbers of K and V of a token in a layer.
        state, node: bytes that a layer keeps for a sequence and for a tree node, if it has a
            running state.
        recurrence: numbers of that state, but for the inputs of a convolution.

    Of a model whose layers are of several kinds these are means over all layers.
    """

    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    tied: bool
    dense: int
    experts: int
    chosen: int
    expert: int
    kv: int
    state: int = 0
    node: int = 0
    recurrence: int = 0

    @classmethod
    def from_config(cls, name: str, raw: Mapping[str, Any]) -> ModelShape:
        """Raises ModelError if the model is not supported, or sizes are missing. Norms, biases and
        routers are left out, and of a mixture the layers without experts, unless its layers are of
        several kinds (`hybrid_shape`)."""
        whole, raw = raw, text_config(raw)
        model_type = str(raw.get("model_type"))
        require_supported(model_type, name, text_type(whole))
        if model_type in _UNUSUAL or len(set(raw.get("num_attention_heads_per_layer") or ())) > 1:
            raise ModelError(
                f"{name} has layers with unusual attention, which are not planned from its config; "
                "measure a stage (`python -m benchmarks.budgets.stage_time`) and give stage_ms"
            )

        def number(field: str, default: int | None = None) -> int:
            value = raw.get(field)
            value = default if value is None else value
            if type(value) is not int or value < 1:
                raise ModelError(f"config.json of {name} has no {field} from which to plan")
            return value

        def first(fields: tuple[str, ...]) -> int:
            """The first field that there is, of a list its first element; 0: none."""
            found = [raw[field] for field in fields if raw.get(field)]
            value = found[0] if found else 0
            return int(value[0] if isinstance(value, list) else value)

        hidden, heads = number("hidden_size"), number("num_attention_heads")
        kv_heads = heads if model_type in _ALL_KV_HEADS else number("num_key_value_heads", heads)
        head_dim = number("head_dim", 128 if model_type == "nemotron_h" else hidden // heads)
        inner = number("intermediate_size", 4 * hidden)
        if model_type == "lfm2":
            inner = adjusted_inner(raw, inner)
        experts = first(_EXPERTS)
        expert_inner = number("moe_intermediate_size", inner)
        num_shared = first(_SHARED_EXPERTS) or model_type in _ONE_SHARED
        shared = num_shared * expert_inner or first(_SHARED_SIZE)
        if model_type == "nemotron_h":
            shared = number("moe_shared_expert_intermediate_size", inner)
        if experts and not first(_CHOSEN):
            raise ModelError(f"config.json of {name} does not say how many experts a row chooses")
        matrices = 2 if model_type in _TWO_MATRICES else 3
        gate = heads if model_type in _GATED else 0
        if model_type in GATED_QUERIES:
            gate = heads
        attention = hidden * (2 * (heads + kv_heads) + gate) * head_dim
        kv = 2 * kv_heads * head_dim
        if raw.get("kv_lora_rank") is not None:
            attention, kv = _latent_attention(hidden, heads, number, raw)
        mlp, routed = matrices * hidden * inner, matrices * hidden * shared
        narrow = raw.get("moe_latent_size")  # experts that compute in fewer dimensions
        expert = matrices * (narrow or hidden) * expert_inner
        mean = MeanLayer(attention, kv, float(not experts), float(bool(experts)), 0.0)
        num_layers, kept = None, None
        if model_type in HYBRIDS:
            try:
                mean = mean_layer(raw, hidden, attention, kv, experts=bool(experts))
                num_layers, kept = len(layer_kinds(raw)), kept_sizes(raw, hidden)
            except (AttributeError, KeyError, TypeError) as error:
                raise ModelError(
                    f"config.json of {name} does not say what its layers keep ({error})"
                ) from error
        experts = experts if mean.experts else 0
        return cls(
            name=name,
            num_layers=num_layers or number("num_hidden_layers"),
            hidden_size=hidden,
            vocab_size=number("vocab_size"),
            tied=bool(raw.get("tie_word_embeddings")),
            dense=mean.mixer
            + round(mean.mlps * mlp + mean.experts * (routed + 2 * hidden * (narrow or 0))),
            experts=experts,
            chosen=first(_CHOSEN) if experts else 0,
            expert=round(mean.experts * expert) if experts else 0,
            kv=mean.kv,
            state=round(mean.states * kept.state_bytes(ITEM)) if kept else 0,
            node=round(mean.states * kept.node_bytes(ITEM)) if kept else 0,
            recurrence=round(mean.states * (kept.state - kept.state_inputs)) if kept else 0,
        )

    @property
    def layer(self) -> int:
        """Parameters of a layer."""
        return self.dense + self.experts * self.expert

    @property
    def embedding(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        return self.num_layers * self.layer + self.embedding * (1 if self.tied else 2)

    def layer_bytes(self, weights: str) -> float:
        """Of a layer's weights in memory; `weights` is one of WEIGHT_BYTES."""
        return self.layer * WEIGHT_BYTES[weights]

    def read_bytes(self, weights: str, rows: int) -> float:
        """What a batch of one sequence moves for a layer's weights, and for its running state,
        which is read and written. Rows choose experts independently (ASSUMED)."""
        read = experts_read(rows, self.experts, self.chosen) if self.experts else 0.0
        kept = 2 * self.state + rows * self.node
        return (self.dense + read * self.expert) * MOVED_BYTES[weights] + kept

    def layer_flops(self, rows: int) -> float:
        """Of a batch in a layer, without attention to the context. A row reads a running state with
        its query and its key, and is folded into it."""
        return 2.0 * rows * (self.dense + self.chosen * self.expert + 3 * self.recurrence)

    @property
    def head_bytes(self) -> int:
        return self.embedding * ITEM

    def head_flops(self, rows: int) -> float:
        return 2.0 * rows * self.embedding

    def kv_bytes(self, tokens: int) -> int:
        """Of K and V of so many tokens in a layer."""
        return self.kv * ITEM * tokens

    def state_bytes(self, nodes: int) -> int:
        """Of the running states of a request in a layer, and of so many tree nodes."""
        return STATES * self.state + nodes * self.node


def _latent_attention(
    hidden: int, heads: int, number: Callable[[str], int], raw: Mapping[str, Any]
) -> tuple[int, int]:
    """Parameters of a layer that computes K and V from a latent vector (MLA) and, if it selects
    keys, of its indexer; numbers of K and V of a token, which are kept as they are computed."""
    rope, nope = number("qk_rope_head_dim"), number("qk_nope_head_dim")
    value, latent = number("v_head_dim"), number("kv_lora_rank")
    queries, rank = heads * (nope + rope), raw.get("q_lora_rank")
    found = hidden * queries if rank is None else number("q_lora_rank") * (hidden + queries)
    found += hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
    if raw.get("index_n_heads") is not None:
        indexers, size = number("index_n_heads"), number("index_head_dim")
        found += number("q_lora_rank") * indexers * size + hidden * (size + indexers)
    return found, heads * (nope + rope + value)


def published() -> dict[str, Mapping[str, Any]]:
    """The shipped table of configs, by hub id."""
    table: dict[str, Mapping[str, Any]] = json.loads(TABLE.read_text())
    return table


def find(model: str) -> ModelShape:
    """The shape of a model, by its config.json in a folder, in the shipped table, or on the hub, of
    which only that file is fetched. Raises ModelError."""
    return ModelShape.from_config(*_named_config(model))


def _named_config(model: str) -> tuple[str, Mapping[str, Any]]:
    if not Path(model).expanduser().exists():
        known = {_family(name, _TUNED): name for name in published()}
        name = known.get(_family(model, _TUNED)) or known.get(_family(model, _VARIANT))
        if name is not None:
            return name, published()[name]
    file = resolve_config(model)
    try:
        return model, read_json(file)
    except Unreadable as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def _family(model: str, tuned: re.Pattern[str]) -> str:
    """A name without its owner, and without what says how it was tuned."""
    return tuned.sub("", model.rpartition("/")[2].lower())
