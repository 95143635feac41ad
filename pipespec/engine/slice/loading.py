"""Loads the layers of a slice from a checkpoint, by Transformers' own loading code, into a subclass
of the model's class that leaves out the layers of other slices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipespec.engine.attention import hook
from pipespec.engine.attention.hook import leave_out_indexers
from pipespec.engine.checkpoint.building import alone, build, require_all, source_of
from pipespec.engine.checkpoint.checkpoint import open_files
from pipespec.engine.checkpoint.partial_checkpoint import require_parts
from pipespec.engine.formats.architectures import count_field, num_layers_of, require_supported
from pipespec.engine.formats.quantization import QUANTIZATIONS, loading_options
from pipespec.engine.formats.rotary import fix_frequencies, reach
from pipespec.engine.formats.slice_tensors import parts_of
from pipespec.engine.formats.stored import DTYPES, KeptMatrix
from pipespec.engine.low_bit import kept_weights
from pipespec.engine.precision import name_of
from pipespec.engine.slice.whole_slice import WholeSlice
from pipespec.errors import ModelError
from pipespec.system.silence_warnings import silence_warnings

with silence_warnings():
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import MoeModelOutputWithPast
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

# Names of the norm after the last layer in the supported architectures.
_FINAL_NORMS = ("norm", "final_layer_norm", "final_layernorm", "embedding_norm", "norm_f")
# The usual name of the base model.
_BASE = "model"
# Quantisers skip a model's last parameter, which could be a matrix in a slice without output head.
# Such a slice has an extra module of this name at the end until the weights are loaded.
_SPARED = "spared"


def load(
    path: Path,
    layers: range,
    dtype: torch.dtype | None,
    quantization: str | None,
    device: torch.device,
    parallel: WholeSlice,
    context: int | None,
) -> PreTrainedModel:
    """The model with the weights of `layers`, or this device's part of them; see
    `ModelSlice.load`."""
    with alone():
        files = open_files(path)
        config = files.config()
        require_supported(config.model_type, path)
        assert layers.step == 1
        assert 0 <= layers.start < layers.stop <= num_layers_of(config)
        parts = parts_of(layers, num_layers_of(config), tied=config.tie_word_embeddings)
        require_parts(path, parts)
        hook.register()
        if not files.by_package and getattr(config, "quantization_config", None) is not None:
            del config.quantization_config  # for Transformers it has plain weights
        computed = dtype or config.dtype or getattr(torch, DTYPES[files.dtype])
        requantized = files.by_package or quantization in QUANTIZATIONS
        parallel.require_divisible(path, config, requantized=requantized)
        kept: dict[str, KeptMatrix] = {}
        if quantization is not None and quantization == files.kept_format:
            with_ggml = kept_weights.with_ggml(device)
            kept = files.kept(parts, with_ggml=with_ggml, divided=parallel.size > 1)
        kinds = {name: each.kind for name, each in kept.items()}
        make = kept_weights.LayerMaker(kinds, device, computed)
        keep = partial(kept_weights.replace, names=kept, make=make)
        source = source_of(files, parts, computed)
        model, loaded = build(
            sliced_class(config, layers, partial(parallel.prepare, files.units(), source[1], keep)),
            config,
            source,
            device,
            dtype=computed,
            attn_implementation=hook.NAME,
            **loading_options(quantization, dtype),
        )
        if quantization is not None:
            kept_weights.fill(model, kept, device, quantization)
    require_all(path, loaded)
    most, _ = reach(config)
    fix_frequencies(model, min(context or most, most))
    if dtype is not None and model.dtype != dtype:
        raise ModelError(
            f"{path} is quantised for {name_of(model.dtype)}, not {name_of(dtype)}; leave "
            "model.dtype out"
        )
    return model


def sliced_class(
    config: PretrainedConfig,
    layers: range,
    prepare: Callable[[PreTrainedModel], None] | None = None,
) -> type[PreTrainedModel]:
    """A subclass of the model's own class without the modules outside `layers`.

    Layers of other slices are empty placeholders, so that the others keep their names. `prepare`
    is called with the model before its weights are loaded.
    """
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    is_first, is_last = layers.start == 0, layers.stop == num_layers_of(config)

    def init(self: PreTrainedModel, config: PretrainedConfig) -> None:
        model_class.__init__(self, config)
        if not hasattr(self, self.base_model_prefix):  # Llama 4 names another attribute
            self.base_model_prefix = _BASE
        base = self.base_model
        leave_out_indexers(base)
        for i in range(len(base.layers)):
            if i not in layers:
                scales = getattr(getattr(base.layers[i], "mamba", None), "mup_vector", None)
                base.layers[i] = empty = nn.Identity()
                if isinstance(scales, Tensor):  # Falcon H1 fills it in all layers
                    empty.mamba = nn.Identity()
                    empty.mamba.register_buffer("mup_vector", scales, persistent=False)
        if not is_last:
            norm = next(name for name in _FINAL_NORMS if hasattr(base, name))
            setattr(base, norm, nn.Identity())
            _leave_out(self, self.get_output_embeddings())
            setattr(self, _SPARED, nn.LayerNorm(1))
            self.all_tied_weights_keys = {}
        # A tied head is stored and loaded as the embedding.
        if not is_first and not (is_last and config.tie_word_embeddings):
            _leave_out(base, base.get_input_embeddings())
        if prepare is not None:
            prepare(self)

    # Transformers finds conversions and error messages by the class's name and module.
    return type(
        model_class.__name__,
        (model_class,),
        {
            "__init__": init,
            "__module__": model_class.__module__,
            "can_generate": classmethod(lambda _: False),
            "_keys_to_ignore_on_load_missing": [rf"^{_SPARED}\."],
        },
    )


def drop_placeholders(model: PreTrainedModel, layers: range) -> None:
    """Remove the placeholders from a loaded model of that class.

    Its config then counts only the layers of the slice.
    """
    config, base = model.config, model.base_model
    is_last = layers.stop == num_layers_of(config)
    if layers.start > 0:
        _leave_out(base, base.get_input_embeddings())
        # Granite scales embeddings in the base model's forward pass, which here gets hidden
        # states.
        if hasattr(base, "embedding_multiplier"):
            base.embedding_multiplier = 1.0
        if hasattr(config, "mup_enabled"):  # so does AFMoE
            config.mup_enabled = False
    if not is_last:
        delattr(model, _SPARED)
    base.layers = base.layers[layers.start : layers.stop]
    setattr(config, count_field(config.model_type), len(layers))
    derived = isinstance(getattr(type(config), "layers_block_type", None), property)
    if getattr(config, "layer_types", None) is not None and not derived:
        config.layer_types = config.layer_types[layers.start : layers.stop]


def _leave_out(parent: nn.Module, module: nn.Module) -> None:
    name = next(name for name, child in parent.named_children() if child is module)
    setattr(parent, name, nn.Identity())


class ComputedBase(nn.Module):
    """Replaces the base model of a slice: its layers have run already."""

    def __init__(self, base: nn.Module):
        super().__init__()
        # Falcon H1 keeps a factor of its output head here.
        self.lm_head_multiplier = getattr(base, "lm_head_multiplier", None)

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> MoeModelOutputWithPast:
        return _BaseOutput(last_hidden_state=inputs_embeds)


@dataclass
class _BaseOutput(MoeModelOutputWithPast):
    """Every field that an output head reads: those of mixtures also read router logits."""

    shared_kv_states: Any = None
