"""Makes the attention modules of a Transformers model call one of our backends.

Transformers calls a function that is registered by name. The function calls the slice's backend
through one custom operator, which torch.compile and CUDA graphs treat as opaque. Each attention
module has its KV pool and its backend in its attribute `kv`.

Most modules pass all that matters to that function. The others rely on a mask, on a cache or on the
order of rows, none of which there is in a batch of tree rows:

    chunked attention    (Llama 4) the mask alone limits what a row sees
    query temperatures   (Llama 4) a factor by position, which the module takes from the cache
    sparse attention     (DeepSeek V3.2) an indexer selects the `index_topk` keys of each row; in a
                         context of at most as many keys it selects all, so it is left out, and the
                         context ends there (`pipespec.engine.inspection.model_config`)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from pipespec.engine.attention.attention_plan import AttentionBackend, LayerOptions, LayerPool
from pipespec.engine.attention.self_test import AttentionLayer
from pipespec.engine.precision import KV_PLAIN
from pipespec.system.silence_warnings import silence_warnings

with silence_warnings():
    from transformers import AttentionInterface

# Registered with Transformers' attention interface only: without a mask function of the same name,
# Transformers creates no attention mask, which is what we want.
NAME = "pipespec"
# Endings of the names of attention classes.
_ATTENTION = ("Attention", "MLA")
_LINEAR = "DeltaAttention"
_CHUNKED = "chunked_attention"
# The argument by which a decoder layer hands the rows' positions to its attention.
POSITIONS = "query_positions"

_numbers = count()
# Multiplies queries `[1, heads, rows, dim]` by a factor of their positions `[1, rows]`.
ScaleQueries = Callable[[Tensor, Tensor], Tensor]


@dataclass(slots=True, eq=False, weakref_slot=True)
class AttentionState:
    """The attribute `kv` of an attention module.

    The first call sets `layer` from the actual Q, K and V, whose shapes are more reliable than what
    can be derived from the config. The custom operator identifies the state by `number`."""

    backend: AttentionBackend
    num_slots: int
    chunk: int | None = None
    temperature: ScaleQueries | None = None
    kv_dtype: str = KV_PLAIN
    layer: AttentionLayer | None = None
    number: int = field(default_factory=lambda: next(_numbers))

    def __post_init__(self) -> None:
        _states[self.number] = self


_states: WeakValueDictionary[int, AttentionState] = WeakValueDictionary()


def register() -> None:
    AttentionInterface.register(NAME, _attend)


def attach(
    layer: nn.Module,
    backend: AttentionBackend,
    num_slots: int,
    chunk: int | None,
    kv_dtype: str,
) -> list[AttentionState]:
    """Give each attention module of a decoder layer its state; layers of some kinds have none."""
    states = []
    for attention in filter(is_attention, layer.modules()):
        state = AttentionState(backend, num_slots, chunk=chunk, kv_dtype=kv_dtype)
        state.temperature = take_temperature(layer, attention)
        attention.kv = state  # type: ignore[assignment]
        states.append(state)
    return states


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    query_positions: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that Transformers calls: `[1, heads, rows, dim]` -> `[1, rows, heads, dim]`."""
    state: AttentionState = module.kv  # type: ignore[assignment]
    if state.temperature is not None:
        assert query_positions is not None
        query = state.temperature(query, query_positions)
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if state.layer is None:
        # An empty one is that of `leave_out_indexers`.
        assert attention_mask is None or not attention_mask.numel()
        pool = LayerPool.allocate(state.num_slots, key, value, state.kv_dtype)
        scaling = scaling if scaling is not None else query.shape[-1] ** -0.5
        options = LayerOptions(scaling, sliding_window, softcap, s_aux, state.chunk)
        state.layer = AttentionLayer(query.shape[1], options, pool)
    pool = state.layer.pool
    out = torch.ops.pipespec.attend(query, key, value, pool.keys, pool.values, state.number)
    return out.unsqueeze(0), None


def is_attention(module: nn.Module) -> bool:
    name = type(module).__name__
    return name.endswith(_ATTENTION) and not name.endswith(_LINEAR)


def chunk_of(config: Any, index: int) -> int | None:
    """The chunk size of layer `index` of a model with this config; None: it is not chunked."""
    types = getattr(config, "layer_types", None)
    if types is None or types[index] != _CHUNKED:
        return None
    return int(config.attention_chunk_size)


def take_temperature(layer: nn.Module, attention: nn.Module) -> ScaleQueries | None:
    """Keep an attention module from scaling its queries, which the hook does from now on, and let
    its layer hand on the positions; None: it does not scale them. The factor is
    `1 + scale * log(1 + floor((position + 1) / floor))`."""
    if not getattr(attention, "attn_temperature_tuning", False) or attention.use_rope:
        return None
    attention.attn_temperature_tuning = False  # type: ignore[assignment]

    def add_positions(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, POSITIONS: kwargs["position_ids"]}

    layer.register_forward_pre_hook(add_positions, with_kwargs=True)
    scale, floor = float(attention.attn_scale), float(attention.floor_scale)  # type: ignore[arg-type]

    def scaled(query: Tensor, positions: Tensor) -> Tensor:
        steps = torch.floor((positions.float() + 1.0) / floor)
        scales = torch.log1p(steps) * scale + 1.0
        return (query * scales[:, None, :, None]).to(query.dtype)

    return scaled


def leave_out_indexers(model: nn.Module) -> None:
    """Replace the indexers of sparse attention, also in layers that share that of another one."""
    for module in list(model.modules()):
        shared = getattr(module, "skip_topk", False)
        if isinstance(getattr(module, "indexer", None), nn.Module) or shared:
            module.indexer = _EveryKey()
            module.register_forward_pre_hook(_with_mask, with_kwargs=True)


class _EveryKey(nn.Module):
    def forward(self, *_: Any, **__: Any) -> None:
        return None


def _with_mask(
    _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An empty mask, as the module indexes the one for its indexer."""
    hidden: Tensor = kwargs["hidden_states"]
    return args, {**kwargs, "attention_mask": hidden.new_zeros(1, 1, 0, 0)}


_library = torch.library.Library(NAME, "DEF")
_library.define(
    "attend(Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, int layer)"
    " -> Tensor"
)


def _with_backend(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, layer: int
) -> Tensor:
    state = _states[layer]
    assert state.layer is not None
    return state.backend.attend(query, key, value, LayerPool(keys, values), state.layer.options)


def _shape(query: Tensor, _key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty(*query.shape[:2], value.shape[2])


_library.impl("attend", _with_backend, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAME}::attend", _shape, lib=_library)
