"""The sizes of a model from its config alone, for plans before anything is downloaded."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipespec.engine.checkpoint.checkpoint import open_files
from pipespec.engine.checkpoint.model_path import resolve, resolve_config
from pipespec.engine.checkpoint.parts.folder import is_checkpoint
from pipespec.engine.formats.architectures import require_supported, text_config, text_type
from pipespec.engine.formats.slice_tensors import LAYER
from pipespec.engine.inspection.model_config import read_config
from pipespec.errors import ModelError
from pipespec.extras.emulation.machine import experts_read
from pipespec.extras.plan.stored_weights import PLAIN, WEIGHTS, Weights, by_config, by_headers
from pipespec.placement.measurements import STATES
from pipespec.system.result_cache import cached_call
from pipespec.system.validation import Unreadable, from_fields, home_expanded, read_json

# Numbers of embedding, head and KV are in bfloat16.
ITEM = 2
# Of published models the config, with the fields that count, and the shape that `count` finds.
TABLE = Path(__file__).with_name("models.json")
# The version of cached shapes: increase it when `count` changes its result.
FORM = 2
# Names of one thing in different architectures.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
# What says how a model was tuned; the second also takes what follows it, such as a date.
_TUNED = re.compile(r"-(instruct|chat|it|base|thinking|hf)(?=-|$)")
_VARIANT = re.compile(r"-(instruct|chat|it|base|thinking)\b.*$")
_EXACT = re.compile(r"(?!)")


@dataclass(frozen=True)
class ModelShape:
    """Numbers of parameters of a decoder, in matrices alone. Those of a layer are means over all
    layers.

    Attributes:
        dense: of a layer, but for its experts.
        experts, chosen: of a layer, and by each row; 0: there are none.
        expert: parameters of one expert.
        kv: numbers of K and V of a token in a layer.
        state, node: bytes that a layer keeps for a sequence and for a tree node, if it has a
            running state.
        recurrence: numbers of that state, but for the inputs of a convolution.
        dense_weights, expert_weights: as they are published, or in their files.
        undecoded: why pipespec does not decode the model; "": it does.
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
    dense_weights: Weights = PLAIN
    expert_weights: Weights = PLAIN
    undecoded: str = ""

    @classmethod
    def from_config(cls, name: str, raw: Mapping[str, Any]) -> ModelShape:
        """Those of the model's own class in Transformers; cached. Raises ModelError if the model is
        not supported or the config is not valid."""
        require_supported(str(text_config(raw).get("model_type")), name, text_type(raw))
        version = importlib.metadata.version("transformers")
        depends = {"name": name, "config": raw, "transformers": version, "form": FORM}
        return cached_call("shapes", cls, depends, count, name, raw)

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

    def weights(self, name: str) -> tuple[Weights, Weights]:
        """Of the dense ones and of the experts; `name` is one of WEIGHTS, or "": as stored."""
        return (WEIGHTS[name],) * 2 if name else (self.dense_weights, self.expert_weights)

    def layer_bytes(self, weights: str) -> float:
        """Of a layer's weights in memory."""
        dense, experts = self.weights(weights)
        return self.dense * dense.held + self.experts * self.expert * experts.held

    def read_bytes(self, weights: str, rows: int) -> float:
        """What a batch of one sequence moves for a layer's weights, and for its running state,
        which is read and written. Rows choose experts independently (assumed)."""
        read = experts_read(rows, self.experts, self.chosen) if self.experts else 0.0
        kept = 2 * self.state + rows * self.node
        dense, experts = self.weights(weights)
        return self.dense * dense.moved + read * self.expert * experts.moved + kept

    def layer_flops(self, rows: int) -> float:
        """Of a batch in a layer, without attention to the context. A row reads a running state with
        its query and its key, and is folded into it."""
        return 2.0 * rows * (self.dense + self.chosen * self.expert + 3 * self.recurrence)

    def num_bytes(self, weights: str) -> float:
        """Of all weights; the embedding and the head are in bfloat16."""
        ends = self.head_bytes * (1 if self.tied else 2)
        return self.num_layers * self.layer_bytes(weights) + ends

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


def count(name: str, raw: Mapping[str, Any]) -> ModelShape:
    """On PyTorch's meta device. Raises ModelError."""
    import torch
    from transformers import AutoModelForCausalLM

    from pipespec.engine.checkpoint import building

    with TemporaryDirectory() as folder:  # Transformers reads configs from folders
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(raw))
        try:
            stored = read_config(files := open_files(path), text_config(raw))
            config = files.config()
        except ModelError as error:
            raise ModelError(str(error).replace(str(path / "config.json"), name)) from error
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    num_layers, of = stored.num_layers, stored.recurrent
    with building.alone(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    experts = _first(config, _EXPERTS)
    matrices = [
        (name.removesuffix(".weight"), each.numel(), _is_expert(name, each.shape, experts))
        for name, each in model.named_parameters()
        if LAYER.search(name) is not None and each.ndim > 1
    ]
    whole = sum(size for _, size, _ in matrices)
    routed = sum(size for _, size, is_expert in matrices if is_expert)
    states = sum(stored.has_state) / num_layers
    dense_weights, expert_weights = by_config(name, text_config(raw), matrices)
    return ModelShape(
        name=name,
        num_layers=num_layers,
        hidden_size=stored.hidden_size,
        vocab_size=config.vocab_size,
        tied=stored.tied,
        dense=(whole - routed) // num_layers,
        experts=experts if routed else 0,
        chosen=_first(config, _CHOSEN) if routed else 0,
        expert=routed // (experts * num_layers) if routed else 0,
        kv=stored.kv_size * sum(stored.has_kv) // num_layers,
        state=round(states * of.state_bytes(ITEM)) if of else 0,
        node=round(states * of.node_bytes(ITEM)) if of else 0,
        recurrence=round(states * (of.state - of.state_inputs)) if of else 0,
        dense_weights=dense_weights,
        expert_weights=expert_weights,
    )


def _first(config: Any, names: tuple[str, ...]) -> int:
    """The first of these fields that there is, of a list its first element; 0: none."""
    value = next((found for name in names if (found := getattr(config, name, None))), 0)
    return int(value[0] if isinstance(value, list) else value)


def _is_expert(name: str, shape: tuple[int, ...], experts: int) -> bool:
    """Whether a parameter is of routed experts: in modules of their own, or `[experts, ...]`."""
    return ".experts." in name or (len(shape) == 3 and shape[0] == experts and shape[1] > 1)


def published() -> dict[str, ModelShape]:
    table: dict[str, Any] = json.loads(TABLE.read_text())
    return {n: from_fields(ModelShape, {"name": n, **each["shape"]}) for n, each in table.items()}


def find(model: str) -> ModelShape:
    """The shape of a model, by its GGUF file or a folder with its config.json, whose headers also
    say in how many bits weights are, in the shipped table, or on the hub, of which only that file
    is fetched. Raises ModelError."""
    path = home_expanded(model)
    if not path.exists():
        known = {
            _family(each.name, tuned): each
            for tuned in (_TUNED, _EXACT)  # of two of a family the first is meant
            for each in reversed(published().values())
        }
        names = (_family(model, tuned) for tuned in (_EXACT, _TUNED, _VARIANT))
        if (name := next((each for each in names if each in known), None)) is not None:
            return known[name]
    if path.is_file() and is_checkpoint(path):
        files = open_files(resolve(path))
        shape, some = ModelShape.from_config(model, files.raw), True
    else:
        file = resolve_config(model)
        try:
            shape = ModelShape.from_config(model, read_json(file))
        except Unreadable as error:
            raise ModelError(f"{file} cannot be read: {error}") from error
        files = open_files(file.parent)
        some = path.exists() and any(each.is_file() for each in files.weight_files())
    num_layers = shape.num_layers
    sizes = num_layers * shape.dense, num_layers * shape.experts * shape.expert
    if some and (found := by_headers(files, num_layers, *sizes)) is not None:
        return replace(shape, dense_weights=found[0], expert_weights=found[1])
    return shape


def _family(model: str, tuned: re.Pattern[str]) -> str:
    """A name without its owner, and without what says how it was tuned."""
    return tuned.sub("", model.rpartition("/")[2].lower())
