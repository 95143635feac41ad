"""The members of a tensor-parallel slice as threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import HashStore, Store

from pipespec.errors import RankFailed
from pipespec.transport.group import MemberGroup
from tests.helpers.recording import notes

T = TypeVar("T")

_recordable: dict[int, RecordableGroup] = {}


@torch.library.custom_op("pipespec_tests::gather", mutates_args=())
def _gather(mine: Tensor, key: int) -> Tensor:
    group = _recordable[key]
    return torch.stack([mine] * group.size if notes() else MemberGroup.gather(group, mine))


@_gather.register_fake
def _(mine: Tensor, key: int) -> Tensor:
    return mine.new_empty(_recordable[key].size, *mine.shape)


class RecordableGroup(MemberGroup):
    """What its members add up is an operation of the device, as NCCL's is: `recording.stand_in`
    notes it like any other."""

    def __init__(self, store: Store, rank: int, size: int):
        super().__init__(store, rank, size)
        _recordable[id(self)] = self

    @property
    def records(self) -> bool:
        return True

    def gather(self, mine: Tensor) -> list[Tensor]:
        return list(_gather(mine, id(self)).unbind())


def together(size: int, do: Callable[[MemberGroup], T]) -> list[T]:
    """What each member of a group returns, by rank; raises what the first of them raised."""
    store = HashStore()

    def run(rank: int) -> T:
        group = MemberGroup(store, rank, size)
        try:
            return do(group)
        except BaseException:
            group.abort()  # nobody waits for one that has gone
            raise

    with ThreadPoolExecutor(max_workers=size) as pool:
        runs = [pool.submit(run, rank) for rank in range(size)]
    failures = [error for each in runs if (error := each.exception()) is not None]
    if failures:
        raise min(failures, key=lambda error: isinstance(error, RankFailed))
    return [each.result() for each in runs]
