"""How a Transformers model comes to attend with an `AttentionFn` of ours.

Transformers calls a function that was registered by name; it hands the layer's pool and the
batch's plan to the backend. The layer's attention module carries them as its attribute `kv`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pipespec.engine.attention.plan import AttentionFn, AttentionPlan, LayerOptions, LayerPool
from pipespec.system.quiet import quiet

with quiet():
    from transformers import AttentionInterface

# Registered with Transformers' attention interface only: for an attention without a mask
# function of the same name Transformers makes no mask at all, which is what we want.
NAME = "pipespec"


@dataclass(slots=True, eq=False)
class Step:
    """What a slice is computing right now, shared by its layers."""

    attention: AttentionFn
    plan: AttentionPlan | None = None


@dataclass(slots=True, eq=False)
class LayerState:
    """What an attention module of a slice carries as its attribute `kv`.

    The layer's first call sets `pool` and `options`: its K and V say what the architecture
    makes of its config better than the config does.
    """

    step: Step
    num_slots: int
    pool: LayerPool | None = None
    options: LayerOptions | None = None


def register() -> None:
    """Make `NAME` known to Transformers; one entry serves all layers of all slices."""
    AttentionInterface.register(NAME, _attend)


def attach(layer: nn.Module, step: Step, num_slots: int) -> LayerState:
    """Give the attention module of a decoder layer its state."""
    (attention,) = (m for m in layer.modules() if type(m).__name__.endswith("Attention"))
    state = LayerState(step, num_slots)
    attention.kv = state  # type: ignore[assignment]
    return state


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What Transformers calls: `[1, heads, rows, dim]` in, `[1, rows, heads, dim]` out."""
    state: LayerState = module.kv  # type: ignore[assignment]
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if state.pool is None or state.options is None:
        assert attention_mask is None
        state.pool = LayerPool.allocate(state.num_slots, key, value)
        scaling = scaling if scaling is not None else query.shape[-1] ** -0.5
        state.options = LayerOptions(scaling, sliding_window, softcap, s_aux)
    step = state.step
    assert step.plan is not None
    out = step.attention(query, key, value, state.pool, step.plan, state.options)
    return out.unsqueeze(0), None
