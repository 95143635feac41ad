"""Checks whether a model's layers can be divided among tensor-parallel devices, without loading
it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipespec.errors import ModelError

# Rules of the supported architectures' plans: modules whose outputs are summed, whose input is
# split too, whose outputs are concatenated, and those without a collective.
SPLIT = "rowwise_split_input"
ROWWISE = ("rowwise", SPLIT)
SUMMED = (*ROWWISE, "moe_tp_experts")
GATHERED = "colwise_gather_output"
# Of gate and up of a mixture, one after the other in a matrix.
PACKED = "packed_colwise"
COLWISE = ("colwise", PACKED, GATHERED)
LOCAL = ("colwise", PACKED, "mla_kv_a_proj", "replicated_with_grad_allreduce")


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
    path: Path, model_type: str, has_tp_plan: bool, members: int, *, requantized: bool
) -> None:
    """Raise ModelError unless the layers of a model can be divided among `members` devices.

    Args:
        has_tp_plan: see `has_plan`.
        requantized: its weights are quantised while they load, or by a package that reads matrices
            as a whole.
    """
    if not has_tp_plan:
        raise ModelError(
            f"{path} cannot be computed by {members} devices together: Transformers has no "
            f"tensor-parallel plan for {model_type} with known rules; make each device a stage of "
            "its own"
        )
    if requantized:
        raise ModelError(
            f"{members} devices cannot compute {path} together: its matrices are quantised as a "
            "whole, by a package or while they load, and a part would get other scales; take plain "
            "weights, or AWQ, GPTQ, compressed-tensors, FP8 or GGUF"
        )
