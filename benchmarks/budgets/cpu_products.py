"""A forward pass of few rows on this machine's CPU, with linear layers as they are and as chosen.

    python -m benchmarks.budgets.cpu_products --target build/target --json FILE

MEASURED: the whole target, by type, number of threads and rows; the least of some passes, as others
may use the machine. `chosen` is the pass with the products that the slice has chosen when it was
loaded (`pipespec.engine.cpu_products`).
"""

from __future__ import annotations

import json
import os
import time
from itertools import product
from pathlib import Path

import torch

from benchmarks.common import experiment
from pipespec.engine.model_slice import ModelSlice
from pipespec.system.folders import resource_dir

ROWS = (1, 2, 4, 8, 16, 32, 64)


def least_ms(model: ModelSlice, rows: int, times: int) -> float:
    """Milliseconds of a pass and its logits."""
    inputs, positions, plan = model.example_batch(rows)
    took = []
    for _ in range(times):
        start = time.perf_counter()
        model.logits(model.forward(inputs, positions, plan))
        took.append(time.perf_counter() - start)
    return 1e3 * min(took)


def main() -> None:
    parser = experiment.parser(__doc__)
    parser.add_argument("--target", type=Path, default=resource_dir("demo") / "target")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="of weights")
    parser.add_argument("--repeats", type=int, default=5, help="passes of each (5)")
    options = experiment.parse(parser, repeats=2)
    layers = json.loads((options.target / "config.json").read_text())["num_hidden_layers"]
    rows = []
    for dtype, threads in product(options.dtypes, sorted({1, len(os.sched_getaffinity(0))})):
        torch.set_num_threads(threads)
        model = ModelSlice.load(
            options.target, range(layers), dtype=getattr(torch, dtype), num_slots=2 * max(ROWS)
        )
        usual = [least_ms(model, count, options.repeats) for count in ROWS]
        model.use_fastest_products()
        for count, usual_ms in zip(ROWS, usual, strict=True):
            row = {
                "dtype": dtype,
                "threads": threads,
                "rows": count,
                "usual_ms": usual_ms,
                "chosen_ms": least_ms(model, count, options.repeats),
                "packed": model.products.packed,
                "is_swapped": not model.products.packed and count in model.products.swapped,
            }
            rows.append(row)
    title = f"Measured: a pass of {options.target.name}, least of {options.repeats}"
    experiment.publish(options, title, rows)


if __name__ == "__main__":
    main()
