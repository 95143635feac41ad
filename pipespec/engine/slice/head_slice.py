"""A draft head as slices of one layer each, by the class of the model whose layers they are."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipespec.engine.attention import hook, select
from pipespec.engine.checkpoint.building import alone, build, require_all, without_numbers
from pipespec.engine.checkpoint.checkpoint import open_files
from pipespec.engine.checkpoint.partial_checkpoint import require_parts
from pipespec.engine.formats.draft_heads import (
    EAGLE3,
    EAGLE_LAYERS,
    OUTPUT,
    OWN_EMBEDDING,
    TO_TARGET,
    DraftHead,
    HeadFolder,
    eagle3_names,
    mtp_names,
)
from pipespec.engine.formats.rotary import fix_frequencies, reach
from pipespec.engine.formats.safetensors_folder import FOREIGN
from pipespec.engine.formats.slice_tensors import EMBEDDING_NAME, LAYER
from pipespec.engine.low_bit import cpu_products
from pipespec.engine.precision import KV_PLAIN
from pipespec.engine.slice.loading import sliced_class
from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.engine.slice.whole_slice import WholeSlice
from pipespec.errors import ModelError
from pipespec.system.silence_warnings import silence_warnings
from pipespec.system.validation import reason

with silence_warnings():
    from transformers import PretrainedConfig, PreTrainedModel


class HeadSlice(ModelSlice):
    """A decoder layer of a draft head, with the embedding and the output head that it uses.

    It takes rows of `joined`, and returns states `[rows, hidden]`, which tokens below read, and of
    which `logits` has those of its own tokens. MTP layers return them normed; all have the output
    head of the last, which alone has it, and in `earlier` the others.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        head: DraftHead,
        embedding: Tensor,
        tokens: np.ndarray | None,
        num_slots: int,
        attention: str,
        **how: Any,
    ):
        """`embedding`: of the target's tokens, `[vocab, hidden]`; `tokens`: which of them the head
        proposes, rising; None: all."""
        self.embedding, self.tokens = embedding, tokens
        self.eagle = head.kind == EAGLE3
        base = model.base_model
        self.norm, base.norm = base.norm, nn.Identity()
        layers = range(head.layer, head.layer + 1)
        super().__init__(model, layers, num_slots, attention, parallel=WholeSlice(), **how)
        self.vocab_size = len(embedding)

    @property
    def input_size(self) -> int:
        return self.embedding.shape[1] + self.hidden_size

    @torch.inference_mode()
    def fused(self, features: Tensor) -> Tensor:
        """What the layer reads of features `[rows, columns]` of the target, `[rows, hidden]`."""
        features = features.to(self.device, self.dtype)
        return self.base.layers[0].fc(features) if self.eagle else features

    @torch.inference_mode()
    def joined(self, tokens: Tensor, before: Tensor) -> Tensor:
        """Rows with these tokens `[rows]`, where `before` `[rows, hidden]` is known of the
        positions before them."""
        return torch.cat((self.embedding.index_select(0, tokens), before), 1)

    def compute(self, inputs: Tensor, positions: Tensor) -> Tensor:
        token, before = inputs.tensor_split([self.embedding.shape[1]], 1)
        layer: Any = self.base.layers[0]
        if self.eagle:
            layer.input_layernorm.token = token.unsqueeze(0)
        else:
            before = layer.eh_proj(torch.cat((layer.enorm(token), layer.hnorm(before)), 1))
        states = super().compute(before, positions)
        return states if self.eagle else self.norm(states)

    def head(self, hidden: Tensor) -> Tensor:
        return super().head(self.norm(hidden) if self.eagle else hidden)


class _JoinedNorm(nn.Module):
    """Both inputs of an EAGLE-3 layer's attention, each normed, in place of the norm before it."""

    def __init__(self, of_token: nn.Module, of_state: nn.Module):
        super().__init__()
        self.of_token, self.of_state = of_token, of_state
        self.token: Tensor | None = None  # embeddings `[1, rows, hidden]`

    def forward(self, state: Tensor) -> Tensor:
        assert self.token is not None
        return torch.cat((self.of_token(self.token), self.of_state(state)), -1)


def load_head(
    path: Path,
    head: DraftHead,
    target: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    num_slots: int,
    attention: str = select.AUTO,
    kv_dtype: str = KV_PLAIN,
    context: int | None = None,
) -> HeadSlice:
    """Load a draft head for the checkpoint `target`: its last layer, which has the others; see
    `ModelSlice.load`. Raises ModelError."""
    require_parts(path, head.parts)
    require_parts(target, head.target_parts)
    files, of_target, device = HeadFolder(path), open_files(target), torch.device(device)
    own = files if head.kind == EAGLE3 else of_target
    if OWN_EMBEDDING in files.headers() and head.kind == EAGLE3:
        rows = files.tensor(OWN_EMBEDDING, dtype)
    else:
        rows = of_target.tensor(_embedding_of(of_target), dtype)
    embedding = rows[...].to(device, dtype)
    tokens = None
    if TO_TARGET in files.present:
        to_target = files.read(TO_TARGET).numpy()
        tokens = to_target + np.arange(len(to_target))
        if not all(np.diff(tokens, prepend=-1, append=len(embedding)) > 0):
            raise ModelError(
                f"{path}: {TO_TARGET} must name rising tokens of the target; fetch the head again"
            )
    layers: list[HeadSlice] = []
    for number in range(head.num_layers):
        names = parameters(head, files, number)
        known = {name: files.tensor(stored, dtype) for stored, name in names.items()}
        if OUTPUT not in known:
            known[OUTPUT] = _output(of_target, dtype)
        with alone():
            model, loaded = make(head, own.config(), known, device, dtype)
        require_all(path, loaded)
        if number + 1 < head.num_layers:
            model.lm_head = nn.Identity()
        if device.type == "cpu":
            cpu_products.use_eight_bits(model)
        most, _ = reach(model.config)
        fix_frequencies(model, min(context or most, most))
        how = num_slots, attention
        layers.append(HeadSlice(model, head, embedding, tokens, *how, kv_dtype=kv_dtype))
    layers[-1].earlier = tuple(layers[:-1])
    return layers[-1]


def check_fit(path: Path, head: DraftHead, target: Path, output: tuple[int, int]) -> None:
    """Make a draft head from the headers of its files, as `building.check_fit`; `output` is the
    shape of the output head, unless they hold one. Raises ModelError."""
    files, device = HeadFolder(path), torch.device("meta")
    headers = files.headers()
    own = files if head.kind == EAGLE3 else open_files(target)
    for number in range(head.num_layers):
        names = parameters(head, files, number)
        shapes = {OUTPUT: output, **{name: headers[of].shape for of, name in names.items()}}
        known = {name: without_numbers(shape) for name, shape in shapes.items()}
        config = own.config()
        with alone():
            try:
                _, loaded = make(head, config, known, device, torch.float32)
            except Exception as error:  # model code may raise anything for invalid values
                why = f"no draft head can be made of {path} and its config.json ({reason(error)})"
                raise ModelError(f"{why}; {FOREIGN}") from error
        require_all(path, loaded)


def parameters(head: DraftHead, files: HeadFolder, number: int) -> dict[str, str]:
    """The parameter for each tensor in the files of one of its layers, counted from 0."""
    if head.kind == EAGLE3:
        return eagle3_names(files.headers(), head.layer)
    return mtp_names(files.headers(), head.layer, number)


def make(
    head: DraftHead,
    config: PretrainedConfig,
    known: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """A model with one layer of the class of a config, from parameters by their names, and what
    Transformers reports of them."""
    hook.register()
    layers = range(head.layer, head.layer + 1)
    config.tie_word_embeddings = False
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # what is read is plain
    add = partial(_add_mtp, layer=head.layer)
    if head.kind == EAGLE3:
        config.num_hidden_layers = EAGLE_LAYERS
        config.vocab_size = known[OUTPUT].get_shape()[0]
        features = known[f"model.layers.{head.layer}.fc.weight"].get_shape()[1]
        biased = f"model.layers.{head.layer}.fc.bias" in known
        add = partial(_add_eagle3, layer=head.layer, features=features, biased=biased)
    else:
        config.num_hidden_layers = layers.stop
        for name, kind in (("layer_types", "full_attention"), ("mlp_layer_types", None)):
            if (kinds := getattr(config, name, None)) is not None:
                setattr(config, name, [*kinds[: head.layer], kind or kinds[head.layer - 1]])
    return build(
        sliced_class(config, layers, add),
        config,
        (None, known),
        device,
        dtype=dtype,
        attn_implementation=hook.NAME,
    )


def _add_eagle3(model: PreTrainedModel, *, layer: int, features: int, biased: bool) -> None:
    own = model.base_model.layers[layer]
    size, norm, attention = model.config.hidden_size, own.input_layernorm, own.self_attn
    own.input_layernorm = _JoinedNorm(norm, type(norm)(size, eps=norm.variance_epsilon))
    own.fc = nn.Linear(features, size, bias=biased)
    for name in ("q_proj", "k_proj", "v_proj"):
        given = getattr(attention, name)
        wide = nn.Linear(2 * size, given.out_features, bias=given.bias is not None)
        setattr(attention, name, wide)


def _add_mtp(model: PreTrainedModel, *, layer: int) -> None:
    own, size = model.base_model.layers[layer], model.config.hidden_size
    norm = type(own.input_layernorm)
    for name in ("enorm", "hnorm"):
        setattr(own, name, norm(size, eps=model.config.rms_norm_eps))
    own.eh_proj = nn.Linear(2 * size, size, bias=False)


def _embedding_of(files: Any) -> str:
    found = (name for name in files.headers() if LAYER.search(name) is None)
    return next(name for name in found if EMBEDDING_NAME.search(name))


def _output(files: Any, dtype: torch.dtype) -> Any:
    """The target's output head, which may be its embedding."""
    name = OUTPUT if OUTPUT in files.headers() else _embedding_of(files)
    return files.tensor(name, dtype)
