"""What layers of each kind keep for a sequence, a tree node and a token, from a model's config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipespec.errors import ModelError

# Kinds of layers (`layer_types` of a config) that keep a running state, and that attend to nothing.
_RECURRENT = ("linear_attention", "conv", "hybrid")
_WITHOUT_KV = ("linear_attention", "conv", "moe", "mlp")
# Of plans of fixed size: nodes of earlier batches for each row, and at least.
ENTRIES_PER_ROW = 8
LEAST_ENTRIES = 64


def fixed_entries(rows: int) -> int:
    """How many tree nodes of earlier batches a plan of fixed size may read, whose batches have up
    to so many rows."""
    return max(LEAST_ENTRIES, ENTRIES_PER_ROW * rows)


@dataclass(frozen=True)
class RecurrentSizes:
    """Numbers that a layer keeps: `state` for a sequence, `node` for a tree node; of these
    `state_inputs` and `node_inputs` in the model's type, the others in float32."""

    state: int
    node: int
    state_inputs: int
    node_inputs: int

    def state_bytes(self, item: int) -> int:
        """Bytes for a sequence in one layer, if the model's numbers take `item` bytes."""
        return 4 * (self.state - self.state_inputs) + item * self.state_inputs

    def node_bytes(self, item: int) -> int:
        return 4 * (self.node - self.node_inputs) + item * self.node_inputs


def layers_with_kv(config: Any) -> tuple[bool, ...]:
    return tuple(kind not in _WITHOUT_KV for kind in _kinds(config))


def layers_with_state(config: Any) -> tuple[bool, ...]:
    return tuple(kind in _RECURRENT for kind in _kinds(config))


def _kinds(config: Any) -> list[str]:
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    return list(kinds) if kinds else ["full_attention"] * config.num_hidden_layers


def recurrent_sizes(config: Any) -> RecurrentSizes | None:
    """Those of the layers with a running state; None: the model has none."""
    if not any(layers_with_state(config)):
        return None

    def first(*names: str) -> int:
        values = [getattr(config, name, None) for name in names]
        value = next((each for each in values if each is not None), None)
        if type(value) is not int or value < 1:
            raise ModelError(
                f"{names[0]} in the config of a {config.model_type} model is {value}, but must be "
                "a positive number"
            )
        return value

    if "conv" in _kinds(config):
        inputs = config.hidden_size
        history = first("conv_L_cache") - 1
        return RecurrentSizes(history * inputs, inputs, history * inputs, inputs)
    if hasattr(config, "linear_num_heads"):  # Kimi: a decay for each channel
        heads = key_heads = config.linear_num_heads
        key = value = config.linear_head_dim
        decays = heads * key
    elif hasattr(config, "linear_num_value_heads"):
        heads, key_heads = config.linear_num_value_heads, config.linear_num_key_heads
        key, value = config.linear_key_head_dim, config.linear_value_head_dim
        decays = heads
    else:
        heads = decays = first("mamba_n_heads", "mamba_num_heads")
        key_heads = first("mamba_n_groups", "n_groups")
        key = first("mamba_d_state", "ssm_state_size")
        value = first("mamba_d_head", "mamba_head_dim")
    # The delta rule convolves queries, keys and values, Mamba 2 the same: C, B and x.
    inputs = 2 * key_heads * key + heads * value
    history = first("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel") - 1
    own = key_heads * key + heads * value + decays
    state = heads * key * value
    return RecurrentSizes(state + history * inputs, own + inputs, history * inputs, inputs)
