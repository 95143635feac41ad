"""How long a device takes for reading its memory, a draft round, and an all-reduce with others."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from pipespec.engine.attention.attention_plan import AttentionPlan
from pipespec.engine.slice.autotune import median_ms
from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.engine.tensor_parallel.tensor_parallel import sum_parts
from pipespec.timing.clock import monotonic_ns
from pipespec.transport.tp_group import TPProcessGroup, can_use_nccl

WARM_UPS, SUMS = 2, 50
# More bytes than fit caches, to measure how fast a device reads.
COPIED_BYTES = 256 << 20
NS_PER_MS = 1e6


def read_bytes_per_ms(device: torch.device) -> float:
    """How fast a device reads its memory, by how fast it copies within it."""
    source = torch.ones(COPIED_BYTES // 2, dtype=torch.uint8, device=device)
    # What is copied is read and written.
    return COPIED_BYTES / median_ms(device, torch.empty_like(source).copy_, source)


def round_ms(model: ModelSlice, rows: int, context: int, children: int) -> float:
    """How long a draft takes to expand so many nodes."""

    def expand(inputs: Tensor, positions: Tensor, plan: AttentionPlan) -> None:
        logits = model.logits(model.forward(inputs, positions, plan)).float()
        logits.log_softmax(-1).topk(children).indices.cpu()

    return median_ms(model.device, expand, *model.example_batch(rows, context))


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
