"""Tensor parallelism: several devices of a host compute every layer of a slice together.

The collectives are ours, as a sum must not depend on the batch (`sum_parts`) and must work with any
`TPGroup`. `tp_plan` says what each member has, and `tp_member` is what a slice knows of all this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pipespec.engine.formats.tp_cuts import Cut


class TPGroup(Protocol):
    """The members that compute a slice together; this one is number `rank` of `size`.

    `supports_graphs`: a CUDA graph can contain `gather`.
    """

    rank: int
    size: int

    @property
    def supports_graphs(self) -> bool: ...

    def gather(self, mine: Tensor) -> Sequence[Tensor]:
        """Every member's tensor, by rank; all have the same shape. Raises `RankFailed`."""
        ...


class TPRank:
    """The `TPGroup` of a loaded slice: a fixed rank, and a process group that differs in each
    epoch.

    Until the first epoch, `gather` repeats the member's own tensor. This has the right shape, which
    is all that loading needs, and members do not wait for one another while they load.
    """

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self._loading = True
        self._group: TPGroup | None = None

    @property
    def supports_graphs(self) -> bool:
        """See `TPGroup`."""
        return self._loading or self._joined.supports_graphs

    def gather(self, mine: Tensor) -> Sequence[Tensor]:
        """See `TPGroup`."""
        return [mine] * self.size if self._loading else self._joined.gather(mine)

    @property
    def _joined(self) -> TPGroup:
        assert self._group is not None, "the members do not meet"
        return self._group

    @contextmanager
    def joined(self, group: TPGroup) -> Iterator[None]:
        """Use this group within the block."""
        assert (group.rank, group.size) == (self.rank, self.size)
        self._loading, self._group = False, group
        try:
            yield
        finally:
            self._group = None


def sum_parts(parts: Sequence[Tensor]) -> Tensor:
    """The sum in the order of ranks, so that the bits of a row do not depend on its batch.

    The all-reduce of a library divides the batch into pieces that are added in different orders;
    with three members or more, the position of a row would matter.
    """
    result = parts[0]
    for part in parts[1:]:
        result = result + part
    return result


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
    values, columns = mine.new_full((len(mine),), -torch.inf), mine.new_zeros(len(mine))
    if part.size:
        values, columns = mine.max(-1)
    # In float64 as it holds all logits and tokens.
    own = torch.stack((values.double(), columns.double() + part.start))
    best, places = torch.stack(list(group.gather(own))).unbind(1)
    largest, member = best.max(0)
    return largest, places.gather(0, member[None])[0].long()
