"""What the attention modules of some architectures need to be computed by our backends.

Most modules pass all that matters to the attention interface. The others rely on a mask, on a cache
or on the order of rows, none of which there is in a batch of tree rows:

    chunked attention    (Llama 4) the mask alone limits what a row sees
    query temperatures   (Llama 4) a factor by position, which the module takes from the cache
    sparse attention     (DeepSeek V3.2) an indexer selects the `index_topk` keys of each row; in a
                         context of at most as many keys it selects all, so it is left out, and the
                         context ends there (`pipespec.engine.inspection.model_config`)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Endings of the names of attention classes.
_ATTENTION = ("Attention", "MLA")
_LINEAR = "DeltaAttention"
_CHUNKED = "chunked_attention"
# The argument by which a decoder layer hands the rows' positions to its attention.
POSITIONS = "query_positions"


@dataclass(frozen=True)
class QueryTemperature:
    """Queries are multiplied by `1 + scale * log(1 + floor((position + 1) / floor))`."""

    scale: float
    floor: float

    def applied(self, query: Tensor, positions: Tensor) -> Tensor:
        """`[1, heads, rows, dim]` and `[1, rows]` -> the scaled queries."""
        steps = torch.floor((positions.float() + 1.0) / self.floor)
        scales = torch.log1p(steps) * self.scale + 1.0
        return (query * scales[:, None, :, None]).to(query.dtype)


def attention_modules(layer: nn.Module) -> list[nn.Module]:
    """The attention modules of a decoder layer, in the order in which it calls them."""
    return [each for each in layer.modules() if is_attention(each)]


def is_attention(module: nn.Module) -> bool:
    """Whether a module attends to K and V."""
    name = type(module).__name__
    return name.endswith(_ATTENTION) and not name.endswith(_LINEAR)


def chunk_of(config: Any, index: int) -> int | None:
    """The chunk size of layer `index` of a model with this config; None: it is not chunked."""
    types = getattr(config, "layer_types", None)
    if types is None or types[index] != _CHUNKED:
        return None
    return int(config.attention_chunk_size)


def take_temperature(layer: nn.Module, attention: nn.Module) -> QueryTemperature | None:
    """Keep an attention module from scaling its queries, which the hook does from now on, and let
    its layer hand on the positions; None: it does not scale them."""
    if not getattr(attention, "attn_temperature_tuning", False) or attention.use_rope:
        return None
    attention.attn_temperature_tuning = False  # type: ignore[assignment]

    def add_positions(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, POSITIONS: kwargs["position_ids"]}

    layer.register_forward_pre_hook(add_positions, with_kwargs=True)
    return QueryTemperature(float(attention.attn_scale), float(attention.floor_scale))  # type: ignore[arg-type]


def leave_out_indexers(model: nn.Module) -> None:
    """Replace the indexers of sparse attention, also in layers that share that of another one."""
    for module in list(model.modules()):
        shared = getattr(module, "skip_topk", False)
        if isinstance(getattr(module, "indexer", None), nn.Module) or shared:
            module.indexer = _EveryKey()
            module.register_forward_pre_hook(_with_mask, with_kwargs=True)


class _EveryKey(nn.Module):
    """Replaces an indexer."""

    def forward(self, *_: Any, **__: Any) -> None:
        return None


def _with_mask(
    _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An empty mask, as the module indexes the one for its indexer."""
    hidden: Tensor = kwargs["hidden_states"]
    return args, {**kwargs, "attention_mask": hidden.new_zeros(1, 1, 0, 0)}
