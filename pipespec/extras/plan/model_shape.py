"""The sizes of a model from its config alone, for plans before anything is downloaded."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipespec.engine.checkpoint.checkpoint import open_files
from pipespec.engine.checkpoint.model_path import resolve_config
from pipespec.engine.formats.architectures import require_supported, text_config, text_type
from pipespec.engine.formats.slice_tensors import LAYER
from pipespec.engine.inspection.model_config import read_config
from pipespec.errors import ModelError
from pipespec.extras.emulation.machine import experts_read
from pipespec.placement.measurements import STATES
from pipespec.system.result_cache import cached_call
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
# What says how a model was tuned; the second also takes what follows it, such as a date.
_TUNED = re.compile(r"-(instruct|chat|it|base|thinking|hf)(?=-|$)")
_VARIANT = re.compile(r"-(instruct|chat|it|base|thinking)\b.*$")


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
        """Those of the model's own class in Transformers; cached. Raises ModelError if the model is
        not supported or the config is not valid."""
        require_supported(str(text_config(raw).get("model_type")), name, text_type(raw))
        version = importlib.metadata.version("transformers")
        depends = {"name": name, "config": raw, "transformers": version}
        return cached_call("shapes", cls, depends, _count, name, raw)

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


def _count(name: str, raw: Mapping[str, Any]) -> ModelShape:
    """On PyTorch's meta device."""
    import torch
    from transformers import AutoModelForCausalLM

    from pipespec.engine.checkpoint import building

    with TemporaryDirectory() as folder:  # Transformers reads configs from folders
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(raw))
        try:
            stored, config = read_config(files := open_files(path)), files.config()
        except ModelError as error:
            raise ModelError(str(error).replace(str(path / "config.json"), name)) from error
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    count, of = stored.num_layers, stored.recurrent
    with building.alone(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    experts = _first(config, _EXPERTS)
    matrices = [
        (name, each)
        for name, each in model.named_parameters()
        if LAYER.search(name) is not None and each.ndim > 1
    ]
    whole = sum(each.numel() for _, each in matrices)
    routed = sum(each.numel() for n, each in matrices if _is_expert(n, each.shape, experts))
    states = sum(stored.has_state) / count
    return ModelShape(
        name=name,
        num_layers=count,
        hidden_size=stored.hidden_size,
        vocab_size=config.vocab_size,
        tied=stored.tied,
        dense=(whole - routed) // count,
        experts=experts if routed else 0,
        chosen=_first(config, _CHOSEN) if routed else 0,
        expert=routed // (experts * count) if routed else 0,
        kv=stored.kv_size * sum(stored.has_kv) // count,
        state=round(states * of.state_bytes(ITEM)) if of else 0,
        node=round(states * of.node_bytes(ITEM)) if of else 0,
        recurrence=round(states * (of.state - of.state_inputs)) if of else 0,
    )


def _first(config: Any, names: tuple[str, ...]) -> int:
    """The first of these fields that there is, of a list its first element; 0: none."""
    value = next((found for name in names if (found := getattr(config, name, None))), 0)
    return int(value[0] if isinstance(value, list) else value)


def _is_expert(name: str, shape: tuple[int, ...], experts: int) -> bool:
    """Whether a parameter is of routed experts: in modules of their own, or `[experts, ...]`."""
    return ".experts." in name or (len(shape) == 3 and shape[0] == experts and shape[1] > 1)


def published() -> dict[str, Mapping[str, Any]]:
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
