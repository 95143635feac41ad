"""Gathering through memory that all members can read, and what is done where that fails."""

from __future__ import annotations

from collections import defaultdict
from threading import Lock

import pytest
import torch
from torch import Tensor

from pipespec.engine.tensor_parallel import sum_parts
from pipespec.transport.symmetric_memory import NUM_BYTES, PeerGather, peer_gather
from pipespec.transport.tp_group import TPProcessGroup
from tests.helpers.members import together

SIZE = 3


class SharedMemory:
    """The buffers of all members, as threads of one process."""

    def __init__(self) -> None:
        self.buffers = [torch.zeros(NUM_BYTES, dtype=torch.uint8) for _ in range(SIZE)]
        self.uses: defaultdict[tuple[int, int], set[str]] = defaultdict(set)  # by phase, buffer
        self.lock = Lock()

    def note(self, phase: int, rank: int, use: str) -> None:
        """Between two barriers the others may read a buffer, or its owner write it."""
        with self.lock:
            uses = self.uses[phase, rank]
            uses.add(use)
            assert len(uses) == 1, f"buffer {rank} is written and read in phase {phase}"


class MemberMemory:
    """What one member sees of it; its barrier is a message over gloo."""

    def __init__(self, shared: SharedMemory, group: TPProcessGroup):
        self.shared, self.group, self.phase = shared, group, 0
        self.own = shared.buffers[group.rank]
        self.version = self.own._version

    def buffer(self, rank: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if rank != self.group.rank:
            self.shared.note(self.phase, rank, "read")
        count = shape.numel() * dtype.itemsize
        return self.shared.buffers[rank][:count].view(dtype).view(shape)

    def barrier(self) -> None:
        if self.own._version != self.version:
            self.shared.note(self.phase, self.group.rank, "written")
        self.version = self.own._version
        self.group.gather(torch.zeros(1))
        self.phase += 1


def agreed(group: TPProcessGroup, mine: bool) -> bool:
    return all(bool(each) for each in group.gather(torch.tensor([mine])))


def made(memory: object, group: TPProcessGroup, reference: object = None) -> PeerGather | None:
    return peer_gather(
        lambda: memory,  # type: ignore[arg-type,return-value]
        reference or group.gather,  # type: ignore[arg-type]
        lambda mine: agreed(group, mine),
        group.rank,
        SIZE,
        "cpu",
    )


def test_members_gather_what_the_process_group_gathers() -> None:
    shared = SharedMemory()

    def member(group: TPProcessGroup) -> bool:
        gather = made(MemberMemory(shared, group), group)
        assert gather is not None
        for rows in (1, 5, 64, 2):
            mine = torch.randn(rows, 96) + group.rank
            found = sum_parts(gather.gather(mine))
            assert torch.equal(found, sum_parts(group.gather(mine)))
        return True

    assert together(SIZE, member) == [True] * SIZE


def test_tensors_that_fill_no_buffer_go_the_other_way() -> None:
    gather = PeerGather(None, 0, SIZE)  # type: ignore[arg-type]
    assert gather.fits(torch.empty(NUM_BYTES, dtype=torch.uint8))
    assert not gather.fits(torch.empty(NUM_BYTES // 4 + 1, device="meta"))


def test_memory_that_gives_other_bits_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    shared = SharedMemory()

    def member(group: TPProcessGroup) -> PeerGather | None:
        def other(mine: Tensor) -> list[Tensor]:
            found = group.gather(mine)
            return [each.nextafter(each + 1) for each in found] if group.rank == 1 else found

        return made(MemberMemory(shared, group), group, other)

    assert together(SIZE, member) == [None] * SIZE
    assert "fails its self-test" in caplog.text


def test_no_member_uses_memory_that_one_of_them_cannot_have(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shared = SharedMemory()

    def member(group: TPProcessGroup) -> PeerGather | None:
        def make() -> MemberMemory:
            if group.rank == 2:
                raise RuntimeError("peer access is not supported\nbetween these devices")
            return MemberMemory(shared, group)

        return peer_gather(
            make, group.gather, lambda mine: agreed(group, mine), group.rank, SIZE, "cpu"
        )

    assert together(SIZE, member) == [None] * SIZE
    assert "not used: peer access is not supported" in caplog.text
    assert "not used: another member cannot" in caplog.text
