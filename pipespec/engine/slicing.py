"""A model's own class with the layers of other slices left out before its weights are loaded."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from pipespec.system.quiet import quiet

with quiet():
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

# What the base models of the supported architectures call the norm after the last layer.
_FINAL_NORMS = ("norm", "final_layer_norm", "final_layernorm")
# Quantisers leave a model's last parameter alone, which in a slice without a head could be a
# matrix. Until the weights are loaded such a slice has a module of this name for them to spare.
_SPARED = "spared"


def sliced_class(
    config: PretrainedConfig,
    layers: range,
    prepare: Callable[[PreTrainedModel], None] | None = None,
) -> type[PreTrainedModel]:
    """The model's own class, which leaves out what is not of `layers` before weights load.

    Other slices' layers are empty placeholders, so that those that remain keep their names.
    `prepare` is done to the model then.
    """
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    is_first, is_last = layers.start == 0, layers.stop == config.num_hidden_layers

    def init(self: PreTrainedModel, config: PretrainedConfig) -> None:
        model_class.__init__(self, config)
        base = self.base_model
        for i in range(len(base.layers)):
            if i not in layers:
                base.layers[i] = nn.Identity()
        if not is_last:
            norm = next(name for name in _FINAL_NORMS if hasattr(base, name))
            setattr(base, norm, nn.Identity())
            _leave_out(self, self.get_output_embeddings())
            setattr(self, _SPARED, nn.LayerNorm(1))
            self.all_tied_weights_keys = {}
        # A tied head is stored as the embedding, and loads as that.
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
    """Take out of a model of that class, once it is loaded, what was there only to load it.

    Its config then counts the layers of the slice alone.
    """
    config, base = model.config, model.base_model
    if layers.start > 0:
        _leave_out(base, base.get_input_embeddings())
        # Granite scales its embeddings in the base model's forward, which here gets the
        # hidden states of the slice before.
        if hasattr(base, "embedding_multiplier"):
            base.embedding_multiplier = 1.0
    if layers.stop < config.num_hidden_layers:
        delattr(model, _SPARED)
    base.layers = base.layers[layers.start : layers.stop]
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[layers.start : layers.stop]


def _leave_out(parent: nn.Module, module: nn.Module) -> None:
    """Put a module without parameters in the place of `parent`'s child `module`."""
    name = next(name for name, child in parent.named_children() if child is module)
    setattr(parent, name, nn.Identity())
