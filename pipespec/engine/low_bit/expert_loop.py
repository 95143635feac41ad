"""The loop over the experts that rows chose, for stacks whose matrices are layers of their own.

Transformers' own loop waits for the device several times for each expert; this one waits once in a
layer, for how many rows chose each.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pipespec.engine.low_bit.ggml_experts import GgmlExperts
from pipespec.system.device_copy import to_host
from pipespec.system.silence_warnings import silence_warnings

with silence_warnings():
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

_NAME, _TRANSFORMERS = "pipespec", "eager"


def use_loop(module: Any) -> None:
    """Let a mixture's module compute its experts in this loop, or in Transformers' own where it
    computes them in another way than by `_apply_gate` between two products."""
    known = getattr(module, "has_gate", False) and not module.has_post_expert_norm
    if known:
        ALL_EXPERTS_FUNCTIONS.register(_NAME, loop_over_experts)
    config: Any = copy.copy(module.config)
    config._experts_implementation = _NAME if known else _TRANSFORMERS
    module.config = config
    module._is_hf_initialized = True


def loop_over_experts(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """`[rows, hidden]`, the experts of each row and their weights, `[rows, k]` -> `[rows, hidden]`;
    each row's experts are added by rising number."""
    if isinstance(module.gate_up_proj, GgmlExperts) and isinstance(module.down_proj, GgmlExperts):
        return _by_ggml(module, hidden_states, top_k_index, top_k_weights)
    chosen, order = top_k_index.flatten().sort(stable=True)
    numbers = torch.arange(module.num_experts, device=chosen.device)
    (ends,) = to_host(torch.searchsorted(chosen, numbers, right=True))
    rows = order // top_k_index.shape[-1]
    weights = top_k_weights.flatten().index_select(0, order).unsqueeze(-1)
    out = torch.zeros_like(hidden_states)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            mine = rows[start:end]
            found = _product(module, "gate_up_proj", expert, hidden_states.index_select(0, mine))
            found = _product(module, "down_proj", expert, module._apply_gate(found))
            out.index_add_(0, mine, (found * weights[start:end]).to(out.dtype))
        start = end
    return out


def _by_ggml(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The same where ggml multiplies with all experts at once."""
    chosen, order = chosen.sort(-1)
    weights = (weights.gather(-1, order) * (chosen < module.num_experts)).unsqueeze(-1)
    chosen = chosen.clamp(max=module.num_experts - 1)

    def product(stack: str, rows: Tensor) -> Tensor:
        found: Tensor = getattr(module, stack).product(rows, chosen)
        return found + getattr(module, f"{stack}_bias")[chosen] if module.has_bias else found

    found = product("gate_up_proj", hidden.unsqueeze(1))
    found = product("down_proj", module._apply_gate(found)) * weights
    out = torch.zeros_like(hidden)
    for each in found.to(out.dtype).unbind(1):
        out += each
    return out


def _product(module: Any, stack: str, expert: int, rows: Tensor) -> Tensor:
    """Rows times one matrix of a stack, with its bias if there is one."""
    matrix = getattr(module, stack)[expert]
    found: Tensor = rows @ matrix if module.is_transposed else functional.linear(rows, matrix)
    return found + getattr(module, f"{stack}_bias")[expert] if module.has_bias else found
