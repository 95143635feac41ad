"""Makes a subclass of a model's class that leaves out the layers of other slices, so that their
weights are not loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pipespec.engine.attention.variants import leave_out_indexers
from pipespec.engine.formats.architectures import count_field, num_layers_of
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
    """Replace `parent`'s child `module` by a module without parameters."""
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
