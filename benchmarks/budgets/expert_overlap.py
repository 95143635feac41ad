"""How many experts the rows of real batches choose, and whether that predicts their time.

    python -m tools.train_toy_mixture --corpus CORPUS --out build/mixture
    python -m benchmarks.budgets.expert_overlap --target build/mixture --json FILE

TOY: a mixture that was trained for minutes, with the demo draft. Its stages count while they decode
shipped prompts with `best_first` at several widths (`pipespec.engine.expert_counts`). `overlap` is
fitted to the counts (`fit_overlap`). The times are MEASURED: passes of one whole slice over rows of
text, and what `with_experts` predicts with the share that is fitted to them (`fit_experts`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from benchmarks.common import experiment
from benchmarks.common.demo_pair import Pair
from pipespec.batch_times import mean_by_size
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.engine.attention.attention_plan import causal_plan
from pipespec.engine.model_slice import ModelSlice
from pipespec.instruments.emulation.machine import (
    TimeCurve,
    experts_read,
    fit_experts,
    fit_overlap,
    with_experts,
)

WIDTHS = (2, 4, 8, 16, 32, 64)
PROMPT_TOKENS = 64
# Rows whose passes are timed, and repetitions of each.
TIMED_ROWS, REPEATS = (1, 2, 4, 8, 16, 32), 7


def counts(pair: Pair, num_prompts: int, tokens: int) -> list[tuple[float, float]]:
    """Rows of batches with draft tokens, and experts that they chose in a layer."""
    prompts = pair.prompts(num_prompts, PROMPT_TOKENS)
    found = []
    with EmbeddedRedis() as server:
        for width in WIDTHS:
            settings = ("cluster.stages=2", f"policy.width={width}", "policy.row_cost=0")
            measured = pair.decode(server, prompts, tokens, *settings)
            found.append(measured.stats[-1]["experts_read"])
    points = mean_by_size(point for each in found for point in each)
    return [(rows, read) for rows, read in points if rows <= max(WIDTHS)]


def times(folder: Path, layers: int, text: Sequence[int]) -> list[tuple[int, float]]:
    """Milliseconds of a pass over so many rows of a text."""
    model = ModelSlice.load(
        folder, range(layers), dtype=torch.float32, num_slots=2 * max(TIMED_ROWS)
    )
    found = []
    for rows in TIMED_ROWS:
        slots = np.arange(rows)
        inputs, plan = torch.tensor(text[:rows]), causal_plan(slots[:0], slots)
        took = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            model.forward(inputs, torch.arange(rows), plan)
            took.append(time.perf_counter() - start)
        found.append((rows, 1e3 * min(took)))
    return found


def main() -> None:
    """Count, time, fit, show and store."""
    parser = experiment.parser(__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    options = experiment.parse(parser, prompts=2, tokens=32)
    config = AutoConfig.from_pretrained(options.target)
    experts, chosen = config.num_experts, config.num_experts_per_tok
    pair = Pair(target=options.target)
    points = counts(pair, options.prompts, options.tokens)
    overlap = fit_overlap(points, experts, chosen)
    text = pair.prompts(1, max(TIMED_ROWS))[0]
    measured = times(options.target, config.num_hidden_layers, text)
    first_ms, share = fit_experts(measured, experts, chosen, overlap)
    curve = with_experts(TimeCurve(((1, first_ms),)), experts, chosen, share, overlap)
    read: list[dict[str, Any]] = [
        {
            "rows": rows,
            "experts": seen,
            "fitted": experts_read(rows, experts, chosen, overlap),
            "independent": experts_read(rows, experts, chosen),
        }
        for rows, seen in points
    ]
    took = [{"rows": rows, "ms": ms, "fitted_ms": curve.ms(rows)} for rows, ms in measured]
    fit = {
        "experts": experts, "chosen": chosen, "overlap": overlap, "share": share,
    }  # fmt: skip
    title = f"TOY mixture: experts that the rows of a batch choose ({chosen} of {experts})"
    experiment.publish(options, title, read, times=took, fit=fit, unit="experts")
    experiment.show("MEASURED: a pass", took)
    experiment.show("Fitted", [fit])


if __name__ == "__main__":
    main()
