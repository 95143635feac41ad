"""Some cells of the frontier in real processes: the default beside the best fixed policy.

    python -m benchmarks.pipeline.frontier_emulated --cells 12 --scale 5 --json FILE

EMULATED: the whole product with ranks held to the times of a cell, and a SYNTHETIC draft of its
accuracy, as `benchmarks.pipeline.frontier` simulates them. The best fixed policy of a cell is the
one that its stored result names. Both decode the same prompts by turns; a ratio above 1 means that
the default is faster, `simulated` is the stored one. Cells of more than eight stages are left out:
so many ranks over-run on few cores.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import experiment, run_options
from benchmarks.load.throughput import Window, merged, varied_prompts
from benchmarks.pipeline.frontier import CURVES, DRAFTS, FIRST_MS, MAX_ROWS, Cell, stored
from pipespec.config.compose import compose
from pipespec.instruments.bench.measurement import bench
from pipespec.instruments.bench.reference import record_reference

MOST_STAGES = 8


def policy_overrides(name: str) -> list[str]:
    """The settings of a policy of `frontier.FIXED`, or of the default."""
    policy, _, width = name.partition(" ")
    if policy == "default":
        return ["policy=best_first"]
    sized = [f"policy.width={width}"] if width else []
    return [f"policy={policy}", *sized, *(["policy.row_cost=0"] if policy == "best_first" else [])]


def machine_overrides(cell: Cell, scale: float) -> list[str]:
    """The stages, their times and the draft's."""
    points = " ".join(f"{rows}:{ms:.6g}" for rows, ms in CURVES[cell.curve].points)
    return [
        f"cluster.stages={cell.stages}",
        "cluster.devices=[cpu]",
        "emulate=fixed",
        f'emulate.stage_ms=["{points}"]',
        f"emulate.draft_ms={FIRST_MS * cell.draft_steps:g}",
        f"emulate.scale={scale:g}",
    ]


def measured(
    cell: Cell, policy: str, options: argparse.Namespace, folder: Path
) -> tuple[Window, float]:
    """The tokens that a policy decodes in a cell while all requests run, and over-runs per step."""
    accuracy = DRAFTS[cell.draft]
    samples = varied_prompts(cell.requests, options)
    tokens = max(options.tokens // cell.requests, options.least)
    truth = folder / f"truth_{cell.requests}_{tokens}.jsonl"
    answer = run_options.answer(tokens)
    if not truth.exists():
        record_reference(samples, truth, *answer, prompt_tokens=options.prompt_tokens)
    curve = ",".join(f"{rank}:{hit:g}" for rank, hit in accuracy.curve.items())
    config = compose(
        [
            *machine_overrides(cell, options.scale),
            *run_options.synthetic(truth, curve, accuracy.spread),
            *policy_overrides(policy),
            *answer,
            f"scheduler.max_num_seqs={cell.requests}",
            f"scheduler.max_num_batched_tokens={MAX_ROWS}",
            f"decode.prefill_chunk={MAX_ROWS}",
        ]
    )
    result = bench(config, samples, concurrency=cell.requests, prompt_tokens=options.prompt_tokens)
    figures = result.summary()
    return Window.of(result), figures["overruns"] / figures["pipeline_steps"]


def compare(row: Mapping[str, Any], options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The default beside the best fixed policy of a cell, by its stored row."""
    cell = Cell.of(row)
    windows: dict[str, list[Window]] = {"default": [], row["best"]: []}
    overruns = 0.0
    for _ in range(options.rounds):
        for policy, found in windows.items():
            window, over = measured(cell, policy, options, folder)
            found.append(window)
            overruns = max(overruns, over)
    default, best = (merged(found) for found in windows.values())
    default_ms, best_ms = default.ms / default.tokens, best.ms / best.tokens
    return {
        **asdict(cell),
        "best": row["best"],
        "default_ms": default_ms,
        "best_ms": best_ms,
        "over_best": best_ms / default_ms,
        "simulated": row["over_best"],
        "overruns_per_step": overruns,
    }


def chosen(count: int) -> list[Mapping[str, Any]]:
    """Stored cells, evenly from those in which the default is slowest to those where it is
    fastest."""
    rows = [row for row in stored((1, 8)) if row["stages"] <= MOST_STAGES]
    rows.sort(key=lambda row: row["over_best"])
    return [rows[i * (len(rows) - 1) // max(count - 1, 1)] for i in range(count)]


def main() -> None:
    """Run the cells, show and store."""
    parser = experiment.parser(__doc__)
    parser.add_argument("--dataset", type=Path, default=run_options.DATA)
    parser.add_argument("--num-prompts", type=int, default=8, help="different ones (8)")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="cut to (32)")
    parser.add_argument("--cells", type=int, default=12)
    parser.add_argument("--scale", type=float, default=5.0, help="emulate so much slower (5)")
    parser.add_argument("--tokens", type=int, default=400, help="of all requests together (400)")
    parser.add_argument("--least", type=int, default=64, help="tokens of each request (64)")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each policy (1)")
    options = experiment.parse(parser, cells=2, tokens=64, least=24)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in chosen(options.cells):
            rows.append(compare(row, options, Path(folder)))
            print(rows[-1], flush=True)
    title = f"EMULATED ({options.scale:g} times slower), SYNTHETIC drafts: cells of the frontier"
    experiment.publish(options, title, rows, unit="ms")


if __name__ == "__main__":
    main()
