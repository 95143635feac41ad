"""Tensor parallelism: several devices of a host compute every layer of a slice together.

The collectives are ours, as a sum must not depend on the batch (`sum_parts`) and must work with any
`TPGroup`. `tp_plan` says what each member has, and `tp_member` is what a slice asks of all this.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pipespec.engine.tensor_parallel.tp_cuts import Cut


class TPGroup(Protocol):
    """The members that compute a slice together; this one is number `rank` of `size`."""

    rank: int
    size: int

    def gather(self, mine: Tensor) -> Sequence[Tensor]:
        """Every member's tensor, by rank; all have the same shape. Raises `RankFailed`."""
        ...


class TPBroadcastGroup(TPGroup, Protocol):
    """A group whose member 0 can broadcast messages to the others. `supports_graphs`: a CUDA graph
    can contain `gather`."""

    @property
    def supports_graphs(self) -> bool: ...

    def broadcast(self, message: Tensor) -> None:
        """Send bytes, uint8 `[length]`, from member 0. Raises `RankFailed`."""
        ...

    def receive(self) -> Tensor:
        """The next broadcast of member 0. Raises `RankFailed`."""
        ...


def sum_parts(parts: Sequence[Tensor]) -> Tensor:
    """The sum in the order of ranks, so that the bits of a row do not depend on its batch.

    The all-reduce of a library divides the batch into pieces that are added in different orders;
    with three members or more, the position of a row would matter.
    """
    return reduce(torch.add, parts)


def gather_columns(group: TPGroup, mine: Tensor, parts: Sequence[Cut]) -> Tensor:
    """The columns of all members, `[..., their own]` -> `[..., all]`, which have `parts` of
    them."""
    most = max(part.size for part in parts)
    gathered = group.gather(functional.pad(mine, (0, most - mine.shape[-1])))
    return torch.cat(
        [each[..., : part.size] for each, part in zip(gathered, parts, strict=True)], -1
    )


def gather_best(group: TPGroup, mine: Tensor, parts: Sequence[Cut]) -> tuple[Tensor, Tensor]:
    """The largest number of each row of the columns of all members, and the first column that has
    it, given this member's `[rows, its own]`. A NaN is the largest number."""
    part = parts[group.rank]
    values, columns = mine.max(-1)
    # In float64 as it holds all logits and tokens.
    own = torch.stack((values.double(), columns.double() + part.start))
    best, places = torch.stack(list(group.gather(own))).unbind(1)
    largest, member = best.max(0)
    return largest, places.gather(0, member[None])[0].long()
