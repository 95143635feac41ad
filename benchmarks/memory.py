"""Memory of each stage beyond its weights and its KV pool (budget: 300 MiB).

    python -m benchmarks.memory [--stages 8] [--json FILE]

Each rank loads its part of the demo pair, computes a batch of 64 rows, and then reports what
belongs to it alone (USS) and all that it maps (RSS, which counts the shared libraries of torch
in every rank anew).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import store
from pipespec import build
from pipespec.compose import compose
from pipespec.launch import launch
from pipespec.source import Context
from pipespec.stage import Stage
from pipespec.types import Batch

MIB = 2**20
ROWS = 64


def measure(plan: build.Plan) -> dict[str, float]:
    """The entrypoint of every rank: its memory in MiB after one batch."""
    rank = int(os.environ["RANK"])
    model = build.load_model(plan, rank)
    context = Context(1, [1] * ROWS, list(range(ROWS)))
    hidden = None if rank < 2 else torch.zeros(ROWS, model.hidden_size, dtype=model.dtype)
    Stage(model, model.num_slots).compute(Batch(0, context.rows(0), hidden))
    memory = psutil.Process().memory_full_info()
    held = (model.num_weight_bytes + model.num_kv_bytes) / MIB
    return {
        "rank": rank,
        "weights_and_kv": held,
        "uss_beyond": memory.uss / MIB - held,
        "rss_beyond": memory.rss / MIB - held,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    plan = build.plan(compose([f"cluster.stages={args.stages}", "cluster.devices=[cpu]"]))
    # A script's own functions cannot be found by the ranks; the module's can.
    from benchmarks.memory import measure as entrypoint

    with launch(entrypoint, (plan,), num_ranks=plan.num_ranks) as cluster:
        rows = cluster.wait()
    table = Table(title="Memory per rank, MiB (budget beyond weights and KV pool: 300)")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(
            *(f"{value:.1f}" if isinstance(value, float) else str(value) for value in row.values())
        )
    Console().print(table)
    print(f"median USS beyond: {np.median([row['uss_beyond'] for row in rows]):.0f} MiB")
    if args.json:
        store(args.json, {"title": "memory", "unit": "MiB", "rows": rows})


if __name__ == "__main__":
    main()
