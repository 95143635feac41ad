"""How a Transformers model comes to attend with a backend of ours.

Transformers calls a function that was registered by name. It hands what the layer has to the
slice's backend, through one custom operator that compilers and recorders take for a whole: what a
backend does inside, on the host and on the device, is none of theirs. The layer's attention module
carries its pool and the slice as its attribute `kv`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from pipespec.engine.attention.plan import Attention, LayerOptions, LayerPool
from pipespec.engine.attention.proof import Layer
from pipespec.system.quiet import quiet

with quiet():
    from transformers import AttentionInterface

# Registered with Transformers' attention interface only: for an attention without a mask
# function of the same name Transformers makes no mask at all, which is what we want.
NAME = "pipespec"

_numbers = count()


@dataclass(slots=True, eq=False, weakref_slot=True)
class Slice:
    """What the layers of a slice share: the backend. `number` names it to the operator."""

    attention: Attention
    number: int = field(default_factory=lambda: next(_numbers))

    def __post_init__(self) -> None:
        _slices[self.number] = self


_slices: WeakValueDictionary[int, Slice] = WeakValueDictionary()


@dataclass(slots=True, eq=False)
class LayerState:
    """What an attention module of a slice carries as its attribute `kv`.

    `kv_heads` are those that its query heads attend to, where it has others beside them. The
    layer's first call sets the rest: its Q, K and V say what the architecture
    makes of its config better than the config does.
    """

    slice: Slice
    num_slots: int
    kv_heads: Tensor | None = None
    pool: LayerPool | None = None
    options: LayerOptions | None = None
    heads: int = 0

    @property
    def layer(self) -> Layer:
        """What a backend must prove itself with, once the first call was made."""
        assert self.pool is not None
        assert self.options is not None
        return Layer(self.heads, self.options, self.pool)


def register() -> None:
    """Make `NAME` known to Transformers; one entry serves all layers of all slices."""
    AttentionInterface.register(NAME, _attend)


def attach(
    layer: nn.Module, slice_: Slice, num_slots: int, kv_heads: Sequence[int] | None = None
) -> LayerState:
    """Give the attention module of a decoder layer its state."""
    (attention,) = (m for m in layer.modules() if type(m).__name__.endswith("Attention"))
    state = LayerState(slice_, num_slots)
    if kv_heads is not None:
        state.kv_heads = torch.tensor(kv_heads, device=next(attention.parameters()).device)
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
    if state.kv_heads is not None:
        key, value = (x.index_select(1, state.kv_heads) for x in (key, value))
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if state.pool is None or state.options is None:
        assert attention_mask is None
        state.pool = LayerPool.allocate(state.num_slots, key, value)
        scaling = scaling if scaling is not None else query.shape[-1] ** -0.5
        state.options = LayerOptions(scaling, sliding_window, softcap, s_aux)
        state.heads = query.shape[1]
    pool, options = state.pool, state.options
    out = torch.ops.pipespec.attend(
        query,
        key,
        value,
        pool.keys,
        pool.values,
        options.sinks,
        options.scaling,
        options.window,
        options.softcap,
        state.slice.number,
    )
    return out.unsqueeze(0), None


# --- the operator -----------------------------------------------------------------------------

_library = torch.library.Library(NAME, "DEF")
_library.define(
    "attend(Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values,"
    " Tensor? sinks, float scaling, int? window, float? softcap, int slice) -> Tensor"
)


def _whole(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    sinks: Tensor | None,
    scaling: float,
    window: int | None,
    softcap: float | None,
    number: int,
) -> Tensor:
    options = LayerOptions(scaling, window, softcap, sinks)
    backend = _slices[number].attention
    return backend.attend(query, key, value, LayerPool(keys, values), options)


def _shape(query: Tensor, _key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty(*query.shape[:2], value.shape[2])


_library.impl("attend", _whole, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAME}::attend", _shape, lib=_library)
