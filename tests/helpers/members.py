"""The members of a tensor-parallel slice as threads of one process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import HashStore, Store

from pipespec.errors import RankFailed
from pipespec.transport.tp_group import TPProcessGroup
from tests.helpers.recording import notes

T = TypeVar("T")

_recordable: dict[int, "RecordableGroup"] = {}


@torch.library.custom_op("pipespec_tests::gather", mutates_args=())
def _gather(mine: Tensor, key: int) -> Tensor:
    group = _recordable[key]
    return torch.stack([mine] * group.size if notes() else TPProcessGroup.gather(group, mine))


@_gather.register_fake
def _(mine: Tensor, key: int) -> Tensor:
    return mine.new_empty(_recordable[key].size, *mine.shape)


class RecordableGroup(TPProcessGroup):
    """What its members add up is an operation of the device, as NCCL's is: `recording.stand_in`
    notes it like any other."""

    def __init__(self, store: Store, rank: int, size: int):
        super().__init__(store, rank, size)
        _recordable[id(self)] = self

    @property
    def supports_graphs(self) -> bool:
        return True

    def gather(self, mine: Tensor) -> list[Tensor]:
        return list(_gather(mine, id(self)).unbind())


def _is_consequence(error: BaseException) -> int:
    """0 for a cause, more for an error that another member's brought about."""
    return 2 if isinstance(error, BrokenBarrierError) else isinstance(error, RankFailed)


def together(size: int, do: Callable[[TPProcessGroup], T]) -> list[T]:
    """What each member of a group returns, by rank; raises what the first of them raised.

    No member begins before all have met, and none leaves before all have ended: gloo fails in a
    member that still connects when another one has closed its connections already.
    """
    store = HashStore()
    have_met = Barrier(size)
    groups: list[TPProcessGroup] = []

    def run(rank: int) -> T:
        try:
            groups.append(group := TPProcessGroup(store, rank, size))
            have_met.wait()
        except BaseException:
            have_met.abort()
            raise
        try:
            return do(group)
        except BaseException:
            group.abort()  # the others do not wait for one that has gone
            raise

    with ThreadPoolExecutor(max_workers=size) as pool:
        runs = [pool.submit(run, rank) for rank in range(size)]
    failures = [error for each in runs if (error := each.exception()) is not None]
    if failures:
        raise min(failures, key=_is_consequence)
    return [each.result() for each in runs]
