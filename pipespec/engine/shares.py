"""What devices that share a model's layers can divide, for whoever loads nothing of it."""

from __future__ import annotations

from pathlib import Path

from pipespec.errors import ModelError


def require_shareable(
    path: Path, model_type: str, shareable: bool, heads: int, members: int, *, quantized: bool
) -> None:
    """Raise `ModelError` unless `members` devices can share the layers of a model; `shareable`:
    Transformers has a tensor-parallel plan for it."""
    if not shareable:
        raise ModelError(
            f"{path} cannot be computed by {members} devices together: Transformers has no "
            f"tensor-parallel plan for {model_type}; make each device a stage of its own"
        )
    if quantized:
        raise ModelError(
            f"the weights of {path} are quantised, and parts of a matrix would be rounded "
            f"otherwise than the whole; {members} devices can share plain weights alone"
        )
    if heads % members:
        raise ModelError(
            f"the {heads} attention heads of {path} cannot be divided among {members} devices; "
            "take a number that divides them"
        )


def own_heads(heads: int, kv_heads: int, member: int, members: int) -> tuple[int, ...]:
    """The KV heads that a member's query heads attend to, one for each equal run of them."""
    mine = heads // members
    own = [head * kv_heads // heads for head in range(member * mine, (member + 1) * mine)]
    distinct = sorted(set(own))
    even = len({own.count(head) for head in distinct}) == 1
    return tuple(distinct if even else own)
