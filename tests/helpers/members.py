"""The members of a tensor-parallel slice as threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch.distributed import HashStore

from pipespec.errors import RankFailed
from pipespec.transport.group import MemberGroup

T = TypeVar("T")


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
