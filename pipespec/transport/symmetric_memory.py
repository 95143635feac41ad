"""Gathers among the GPUs of one host through memory that each of them can read.

A member writes its tensor into a buffer of its own, and the others read it there, over NVLink or
PCIe (torch's *symmetric memory*). A sum over members is then one pass over all parts, as in a
one-shot all-reduce, but in the order of ranks (`engine.tensor_parallel.sum_parts`).

No GPU has run this. It is an option (`transport.symmetric_memory`), and is used only where it gives
the same bits as the process group when the members meet.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

# Bytes that a member can write at once; larger tensors, such as long prompts', go the other way.
NUM_BYTES = 16 << 20
# Milliseconds after which a member that waits for the others on its device fails.
WAIT_MS = 60_000
# The self-test: rows and columns, and how often they are gathered in turn.
TESTED_SHAPES = ((1, 64), (7, 256), (64, 1024))
TESTED_TIMES = 8
SEED = 0

log = logging.getLogger(__name__)


class PeerMemory(Protocol):
    """A buffer of each member, which all members can read, and what they wait for each other
    with, in the order of the device's stream."""

    def buffer(self, rank: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The beginning of a member's buffer."""
        ...

    def barrier(self) -> None:
        """Wait until all members are there."""
        ...


class SymmetricMemory:
    """Torch's, on one CUDA device. Raises RuntimeError if the devices cannot read one another's
    memory.

    Args:
        store: of the members alone.
    """

    def __init__(self, store: Store, rank: int, size: int, device: str):
        from torch._C._distributed_c10d import _SymmetricMemory

        if rank == 0:
            store.set("name", f"pipespec-{secrets.token_hex(8)}")
        name = store.get("name").decode()
        _SymmetricMemory.set_group_info(name, rank, size, store)
        self._own = _SymmetricMemory.empty_strided_p2p(
            (NUM_BYTES,), (1,), torch.uint8, torch.device(device), name
        )
        self._all: Any = _SymmetricMemory.rendezvous(self._own)

    def buffer(self, rank: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """See `PeerMemory`."""
        found: Tensor = self._all.get_buffer(rank, tuple(shape), dtype)
        return found

    def barrier(self) -> None:
        """See `PeerMemory`."""
        self._all.barrier(0, WAIT_MS)


class PeerGather:
    """Gathers through the memory of the members."""

    def __init__(self, memory: PeerMemory, rank: int, size: int):
        self._memory, self._rank, self._size = memory, rank, size

    def fits(self, mine: Tensor) -> bool:
        """Whether a buffer has room for a tensor."""
        return mine.numel() * mine.itemsize <= NUM_BYTES

    def gather(self, mine: Tensor) -> list[Tensor]:
        """Every member's tensor, by rank; they are valid until the next call."""
        self._memory.barrier()  # all have read what was gathered before
        self._memory.buffer(self._rank, mine.shape, mine.dtype).copy_(mine)
        self._memory.barrier()  # all have written
        members = range(self._size)
        return [self._memory.buffer(member, mine.shape, mine.dtype) for member in members]


def gives_same_bits(
    gather: Callable[[Tensor], Sequence[Tensor]],
    reference: Callable[[Tensor], Sequence[Tensor]],
    rank: int,
    device: str,
) -> bool:
    """Whether two ways to gather give the same, also several times in turn without a wait of the
    host between them."""
    random = torch.Generator().manual_seed(SEED + rank)
    same = True
    for dtype in (torch.float32, torch.bfloat16):
        for shape in TESTED_SHAPES:
            parts = [
                torch.randn(shape, generator=random).to(device, dtype) for _ in range(TESTED_TIMES)
            ]
            found = [torch.stack(list(gather(part))) for part in parts]
            expected = [torch.stack(list(reference(part))) for part in parts]
            same &= all(map(torch.equal, found, expected))
    return same


def peer_gather(
    make: Callable[[], PeerMemory],
    reference: Callable[[Tensor], Sequence[Tensor]],
    agree: Callable[[bool], bool],
    rank: int,
    size: int,
    device: str,
) -> PeerGather | None:
    """What gathers through the members' memory; None: it cannot, or gives other bits than
    `reference`, for one of them.

    Args:
        make: makes the memory.
        agree: whether all members say so; each of them calls it equally often.
    """
    try:
        made = PeerGather(make(), rank, size)
        problem = ""
    except (RuntimeError, AttributeError, TypeError) as error:  # also of another torch
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
    if not agree(not problem):
        log.warning("symmetric memory is not used: %s", problem or "another member cannot")
        return None
    if not agree(gives_same_bits(made.gather, reference, rank, device)):
        log.warning("symmetric memory is not used: it fails its self-test")
        return None
    return made
