"""The time of one layer's attention by launch of our Triton kernel, on a GPU. MEASURED.

    python -m benchmarks.budgets.attention_launch --json FILE

Calls on several KV pools, one after another in a CUDA graph, microseconds for one: storing K and V,
attention, merging. Rows are a path of nodes behind a text, heads of 128 in bfloat16. A launch is
`Launch` of `pipespec.engine.attention.launch_table`; the one in use is marked.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.common import experiment
from benchmarks.common.experiment import numbers
from pipespec.engine.attention import triton_backend
from pipespec.engine.attention.attention_plan import LayerOptions, LayerPool, causal_plan
from pipespec.engine.attention.launch_table import Launch, attend_launch
from pipespec.engine.graphs import capture_cuda_graph

DIM, KV_HEADS = 128, 8
BUCKET = 64  # rows of the graph
POOLS, TIMES = 6, 5
# Rows and tokens before them.
BATCHES = ((1, 2048), (64, 128), (64, 2048), (64, 8192), (64, 32768), (16, 32768))
QUICK = 2048  # tokens at most


def layer_us(
    launch: Launch, group: int, batch: tuple[int, int], pools: Sequence[LayerPool]
) -> float:
    """Microseconds of attention in one layer with `group` query heads for each KV head."""
    num_slots = len(pools[0].keys) - 1
    device = pools[0].keys.device
    query, key, value = (
        torch.randn(BUCKET, heads, DIM, device=device).bfloat16()
        for heads in (KV_HEADS * group, KV_HEADS, KV_HEADS)
    )
    options = LayerOptions(DIM**-0.5)
    with mock.patch.object(triton_backend, "attend_launch", return_value=launch):
        backend = triton_backend.TritonBackend(device, num_slots)
        rows, context = batch
        slots = np.arange(context + rows)
        plan = causal_plan(slots[:context], slots[context:], imagined=True)
        backend.prepare(plan, backend.reserve(BUCKET))

        def attend() -> torch.Tensor:
            for pool in pools:
                out = backend.attend(query, key, value, pool, options)
            return out

        attend()  # compiles
        replay, _ = capture_cuda_graph(attend)
    replay()
    took = []
    for _ in range(TIMES):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        replay()
        ended.record()
        torch.cuda.synchronize()
        took.append(began.elapsed_time(ended) / len(pools) * 1e3)
    return statistics.median(took)


def measure(group: int, batches: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """A row for each launch, the fastest with most rows first."""
    num_slots = max(map(sum, batches))
    shape = (num_slots + 1, KV_HEADS, DIM)
    pools = [
        LayerPool(*(torch.randn(shape, device="cuda").bfloat16() for _ in "kv"))
        for _ in range(POOLS)
    ]
    used = attend_launch(torch.cuda.get_device_capability(), 2, DIM, group)
    tried = [
        Launch(rows, group, keys, warps, stages)
        for rows, keys, warps, stages in product((8, 16), (32, 64, 128), (4, 8), (2, 3))
    ]
    found = []
    for launch in dict.fromkeys((used, *tried)):
        times = {
            f"{rows}/{context}": layer_us(launch, group, (rows, context), pools)
            for rows, context in batches
        }
        found.append({"group": group, **launch._asdict(), "used": launch == used, **times})
    return sorted(found, key=lambda row: row[f"{batches[-1][0]}/{batches[-1][1]}"])


def main() -> None:
    parser = experiment.parser(__doc__)
    parser.add_argument("--groups", type=numbers, default=[8, 4], help="query heads per KV head")
    options = experiment.parse(parser, groups=[8])
    batches = [each for each in BATCHES if not options.quick or each[1] <= QUICK]
    with torch.inference_mode():
        rows = [row for group in options.groups for row in measure(group, batches)]
    device = torch.cuda.get_device_name()
    title = f"MEASURED: attention of one layer on {device}, us by rows/context"
    experiment.publish(options, title, rows, device=device, torch=torch.__version__)


if __name__ == "__main__":
    main()
