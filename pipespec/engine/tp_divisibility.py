"""Checks whether a model's layers can be divided among tensor-parallel devices, without loading
it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipespec.errors import ModelError

# Rules of the supported architectures' plans: modules whose outputs are summed, whose input is
# split too, whose outputs are concatenated, and those without a collective.
SUMMED = ("rowwise", "rowwise_split_input", "moe_tp_experts")
SPLIT = "rowwise_split_input"
GATHERED = "colwise_gather_output"
LOCAL = ("colwise", "packed_colwise", "mla_kv_a_proj", "replicated_with_grad_allreduce")


# Types whose layers differ in the number of their heads, which one plan cannot divide.
_HEADS_VARY = ("laguna", "mimo_v2_flash")


def has_plan(config: Any) -> bool:
    """Whether Transformers has a tensor-parallel plan for the layers of a model with this config,
    of rules that are known here and for layers with the same heads."""
    if config.is_heterogeneous or config.model_type in _HEADS_VARY:
        return False
    plan = config.base_model_tp_plan or {}
    rules = {rule for name, rule in plan.items() if name.startswith("layers.")}
    return bool(rules) and rules <= {*SUMMED, GATHERED, *LOCAL}


def require_tp_divisible(
    path: Path, model_type: str, has_tp_plan: bool, heads: int, members: int, *, quantized: bool
) -> None:
    """Raise ModelError unless the layers of a model can be divided among `members` devices;
    `has_tp_plan`: see `has_plan`."""
    if not has_tp_plan:
        raise ModelError(
            f"{path} cannot be computed by {members} devices together: Transformers has no "
            f"tensor-parallel plan for {model_type} with known rules; make each device a stage of "
            "its own"
        )
    if quantized:
        raise ModelError(
            f"the weights of {path} are quantised, and parts of a matrix would be rounded "
            f"differently from the whole; {members} devices together need plain weights"
        )
    if heads % members:
        raise ModelError(
            f"the {heads} attention heads of {path} cannot be divided among {members} devices; "
            "take a number that divides them"
        )


def local_kv_heads(heads: int, kv_heads: int, member: int, members: int) -> tuple[int, ...]:
    """The KV heads that a member's query heads attend to, one for each equal run of them."""
    mine = heads // members
    own = [head * kv_heads // heads for head in range(member * mine, (member + 1) * mine)]
    distinct = sorted(set(own))
    even = len({own.count(head) for head in distinct}) == 1
    return tuple(distinct if even else own)
