"""Whether a model can be divided among tensor-parallel members, without loading it, and which part
of each tensor a member has. Pure.

Heads, columns of an MLP and rows of the vocabulary are shared in whole units, such as groups of
weights with one scale. Heads are divided equally; other parts differ by a unit where their number
is no multiple.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipespec.engine.formats.stored import Part
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
# The sides of a matrix `[out, in]`. A bias `[out]` is cut like the rows of its matrix.
OUT, IN = "out", "in"
# Columns of an MLP and rows of the vocabulary are shared in multiples of this, of which every plain
# type makes a multiple of 16 bytes, as fast products require.
ALIGNMENT = 8

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """The part `start` to `stop` of the `total` rows (`side` OUT) or columns (IN) of a matrix."""

    side: str
    start: int
    stop: int
    total: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def part(self) -> Part:
        mine = slice(self.start, self.stop)
        return (mine, slice(None)) if self.side == OUT else (slice(None), mine)

    def dimension(self, shape: Sequence[int]) -> int:
        """The dimension that is cut, of a bias, a matrix, or a stack of matrices."""
        return max(len(shape) - 2, 0) if self.side == OUT else len(shape) - 1

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The shape of the part of a tensor of this shape, which may hold several matrices one
        after the other."""
        dim = self.dimension(whole)
        assert whole[dim] % self.total == 0, "whole matrices"
        return (*whole[:dim], whole[dim] // self.total * self.size, *whole[dim + 1 :])

    def indices(self, whole: Sequence[int]) -> list[Index]:
        """Where the part is in such a tensor: an index for each of the matrices."""
        dim = self.dimension(whole)
        before = (slice(None),) * dim
        return [
            (*before, slice(at + self.start, at + self.stop))
            for at in range(0, whole[dim], self.total)
        ]


def share(total: int, unit: int, members: int) -> list[range]:
    """The part of each member of `total`: whole units but for the last of all, and one unit more
    for the first members where they are no multiple. Raises ValueError if a part would be empty."""
    units = -(-total // unit)
    if units < members:
        raise ValueError(f"of {total} rows or columns, in units of {unit}, some would have none")
    counts = [units // members + (member < units % members) for member in range(members)]
    starts = [sum(counts[:member]) * unit for member in range(members)]
    stops = [*starts[1:], total]
    return [range(start, stop) for start, stop in zip(starts, stops, strict=True)]


def equal_parts(total: int, unit: int, members: int, parts: int) -> list[range]:
    """The part of each member of `total`, of so many parts in all: where there are fewer, members
    that follow one another have the same. Raises ValueError if the parts would not be equal, or
    not of whole units."""
    if total % (unit * parts) or members % parts:
        raise ValueError(
            f"{total // unit} heads, or groups of heads with one scale, are not divided equally"
        )
    size = total // parts
    return [
        range(at * size, (at + 1) * size) for at in (n * parts // members for n in range(members))
    ]


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
    """Raise ModelError unless the layers of a model can be divided among `members` devices;
    `has_tp_plan`: see `has_plan`, `requantized`: see `WholeSlice.require_divisible`."""
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
