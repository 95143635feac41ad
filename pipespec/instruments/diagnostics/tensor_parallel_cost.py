"""Measures the all-reduce of a tensor-parallel group of this host, and a device's read rate."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch._C._distributed_c10d import HashStore

from pipespec.clock import monotonic_ns
from pipespec.engine.tensor_parallel import sum_parts
from pipespec.transport.tp_group import TPProcessGroup, can_use_nccl

WARM_UPS, SUMS = 2, 50
NS_PER_MS = 1e6
# More bytes than fit caches, and the number of copies, to measure how fast a device reads.
COPIED_BYTES, COPIES = 256 << 20, 5


def all_reduce_ms(devices: Sequence[str], rows: int, hidden: int, dtype: torch.dtype) -> float:
    """How long devices take to add up what each has computed of a batch of so many rows. The
    members are threads here, which takes no less."""
    store, size, nccl = HashStore(), len(devices), can_use_nccl(devices)

    def member(rank: int) -> list[float]:
        group = TPProcessGroup(store, rank, size, devices[rank] if nccl else None)
        part = torch.ones(rows, hidden, dtype=dtype, device=devices[rank])
        times = []
        for _ in range(WARM_UPS + SUMS):
            start = monotonic_ns()
            sum_parts(group.gather(part)).cpu()
            times.append((monotonic_ns() - start) / NS_PER_MS)
        return times[WARM_UPS:]

    with ThreadPoolExecutor(size) as pool:
        times, *_ = pool.map(member, range(size))
    return statistics.median(times)


def read_bytes_per_ms(device: str) -> float:
    """How fast a device reads its memory, by how fast it copies within it."""
    source = torch.ones(COPIED_BYTES // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(WARM_UPS + COPIES):
        start = monotonic_ns()
        target.copy_(source)
        target[:1].cpu()  # waits for the device
        times.append((monotonic_ns() - start) / NS_PER_MS)
    # What is copied is read and written.
    return COPIED_BYTES / statistics.median(times[WARM_UPS:])
