"""Throughput and time between tokens by how many requests are decoded at once.

    python -m benchmarks.load.throughput --json benchmarks/results/load.json \\
        --plot benchmarks/results/load
    python -m benchmarks.load.throughput --emulate --scale 3 \\
        --json benchmarks/results/load_emulated.json ...

SpecPipe's Figures 16 and 17, PipeDec's Figure 8. Simulated: the head's own scheduler with stages
that only take time, and a synthetic draft of a stated accuracy. With --emulate the whole product
runs too, on ranks held to those times: all requests begin together, and tokens are counted from the
last first token to the first last one. Speed-ups are over `root`, batched plain decoding, with as
many requests.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from benchmarks.common import experiment, plot, run_options
from benchmarks.common.experiment import names, numbers
from benchmarks.common.reference_texts import record_reference
from pipespec.config.compose import compose
from pipespec.config.schema import Config
from pipespec.extras.bench.dataset import Load, Sample, load
from pipespec.extras.bench.figures import BenchResult
from pipespec.extras.bench.measurement import bench
from pipespec.extras.emulation.machine import EmulatedMachine, TimeCurve
from pipespec.extras.emulation.synthetic_proposer import USUAL, Accuracy
from pipespec.extras.plan.pipeline_times import Machine
from pipespec.extras.plan.simulation import Simulation, simulate

PLAIN, BEST_FIRST = "root", "best_first"
# The width of `level` is for each request, or shared by all; SpecPipe-DB's paper does not say.
METHODS = {
    PLAIN: [],
    "static_tree": [f"policy.shape={run_options.SHAPE}"],
    "level": ["policy.width={width}", "policy.children={children}"],
    "level shared": ["policy.width={rows}", "policy.children={children}", "policy.shared=true"],
    "level, two a step": [
        "policy.width=32",
        "policy.children={children}",
        "policy.levels=2",
        "policy.shared=true",
    ],
    BEST_FIRST: ["policy.width={rows}", "policy.children={children}"],
}
# Tokens of each request in plain decoding, whose tokens all take equally long, and of all.
PLAIN_TOKENS = 16
PLAIN_LEAST = 64
# The most tokens of a request, so that prompt and answer fit into the demo pair's context.
MOST_TOKENS = 600
DECODED_PER_COUNTED = 1.4  # tokens decoded for each one that is counted


def overrides(method: str, options: argparse.Namespace) -> list[str]:
    """The settings of a method and of the batches."""
    given = [text.format(**vars(options)) for text in METHODS[method]]
    return [
        f"policy={method.split()[0].strip(',')}",
        *given,
        f"scheduler.max_num_batched_tokens={options.rows}",
        f"decode.prefill_chunk={options.rows}",
        f"proposer.rounds={options.rounds}",
    ]


def simulated(config: Config, requests: int, options: argparse.Namespace) -> Simulation:
    """The scheduler simulated with so many requests."""
    machine = config.emulate
    assert isinstance(machine, EmulatedMachine)
    stages = [TimeCurve.parse(str(text)) for text in np.resize(machine.stage_ms, options.stages)]
    plain = max(PLAIN_LEAST, PLAIN_TOKENS * requests)
    return simulate(
        config.policy,
        Machine(tuple(stages), draft_ms=machine.draft),
        Accuracy.parse(options.curve.split(","), options.spread),
        rounds=options.rounds,
        num_tokens=plain if config.policy.max_rows == 1 else max(plain, options.tokens),
        num_requests=requests,
        max_rows=options.rows,
    )


# --- emulated -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """The part of a run in which all requests were being decoded."""

    tokens: int
    ms: float
    gaps: np.ndarray
    worst_ms: float  # the largest mean gap of a request

    @classmethod
    def of(cls, result: BenchResult) -> Window:
        times = [r.started_ms + np.array(r.token_ms) for r in result.requests]
        begin, end = max(each[0] for each in times), min(each[-1] for each in times)
        inside = [each[(each >= begin) & (each <= end)] for each in times]
        gaps = [np.diff(each) for each in inside if len(each) > 1]
        means = [float(each.mean()) for each in gaps]
        tokens = sum(len(each[each > begin]) for each in inside)
        return cls(tokens, float(end - begin), np.concatenate(gaps), max(means))


def merged(windows: Sequence[Window]) -> Window:
    """Several runs as one."""
    return Window(
        sum(each.tokens for each in windows),
        sum(each.ms for each in windows),
        np.concatenate([each.gaps for each in windows]),
        max(each.worst_ms for each in windows),
    )


def varied_prompts(requests: int, options: argparse.Namespace) -> list[Sample]:
    """So many different prompts: the shipped ones, then the same without their first words."""
    shipped = load(options.dataset, min(requests, options.num_prompts))
    return [
        replace(
            sample,
            id=f"{sample.id} {start}",
            prompt=" ".join(sample.prompt.split()[start:] or sample.prompt.split()),
        )
        for start in range(-(-requests // len(shipped)))
        for sample in shipped
    ][:requests]


def tokens_each(method: str, requests: int, options: argparse.Namespace) -> int:
    """Tokens of each answer of a run."""
    if method == PLAIN:
        return max(PLAIN_TOKENS, int(PLAIN_LEAST / requests))
    return min(
        MOST_TOKENS,
        int(DECODED_PER_COUNTED * tokens_to_count(method, options) / requests) + PLAIN_TOKENS,
    )


def tokens_to_count(method: str, options: argparse.Namespace) -> int:
    """How many tokens to count; a quarter of them for methods other than `best_first`."""
    return options.tokens if method == BEST_FIRST else options.tokens // 4


def measured(
    method: str, requests: int, options: argparse.Namespace, folder: Path
) -> tuple[Window, float]:
    """The product run with so many requests, and over-runs per step."""
    samples = varied_prompts(requests, options)
    tokens = tokens_each(method, requests, options)
    truth = folder / f"truth_{requests}_{tokens}.jsonl"
    target = run_options.target(options.stages, folder)
    answer = run_options.answer(tokens)
    if not truth.exists():
        cut = options.prompt_tokens
        record_reference(samples, truth, *target, *answer, prompt_tokens=cut)
    config = compose(
        [
            *target,
            *run_options.cluster(options),
            *run_options.synthetic(truth, options.curve, options.spread),
            *overrides(method, options),
            *answer,
            f"scheduler.max_num_seqs={requests}",
        ]
    )
    windows, overruns, steps = [], 0, 0
    runs = (
        max(1, round(tokens_to_count(method, options) / (tokens * requests)))
        if method != PLAIN
        else 1
    )
    with Progress(transient=True) as shown:
        task = shown.add_task(f"{method}, {requests} requests")
        for _ in range(runs):
            result = bench(
                config,
                samples,
                load=Load(requests),
                prompt_tokens=options.prompt_tokens,
                on_done=lambda done, of: shown.update(task, completed=done, total=of),
            )
            windows.append(Window.of(result))
            figures = result.summary()
            overruns += figures["overruns"]
            steps += figures["pipeline_steps"]
    return merged(windows), overruns / steps


# --- the table ----------------------------------------------------------------------------------


def row(
    method: str, requests: int, options: argparse.Namespace, folder: Path, plain: dict[str, Any]
) -> dict[str, Any]:
    """One method with so many requests; `plain` is the row of plain decoding, or empty."""
    machine = [*run_options.cluster(options), "model=demo", "proposer=suffix"]
    found = simulated(compose([*machine, *overrides(method, options)]), requests, options)
    per_second = 1000 * found.tokens / found.ms
    figures = {
        "requests": requests,
        "method": method,
        "tokens_per_s": per_second,
        "speed_up": per_second / plain.get("tokens_per_s", per_second),
        "tokens_per_step": found.tokens_per_step,
        "rows_per_step": found.rows / found.steps,
        "rounds_per_step": found.rounds / found.steps,
    }
    if options.emulate:
        window, overruns = measured(method, requests, options, folder)
        per_second = 1000 * window.tokens / window.ms
        figures |= {
            "emulated_tokens": window.tokens,
            "emulated_tokens_per_s": per_second,
            "emulated_speed_up": per_second / plain.get("emulated_tokens_per_s", per_second),
            "tbt_ms": float(window.gaps.mean()),
            "p99_tbt_ms": float(np.percentile(window.gaps, 99)),
            "worst_request_tbt_ms": window.worst_ms,
            "overruns_per_step": overruns,
        }
    return figures


def draw(title: str, rows: list[dict[str, Any]], path: Path) -> None:
    """Throughput and the speed-up over plain decoding; emulated if that was measured."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    ours = "emulated_" if "emulated_speed_up" in rows[0] else ""
    panels = [("tokens_per_s", "tokens per second"), ("speed_up", f"multiple of {PLAIN}")]
    with plot.figure(path, title, columns=2, size=(8.4, 3.5)) as axes:
        for place, (figure, label) in zip(axes, panels, strict=True):
            plot.lines(
                place,
                {
                    m: [(r["requests"], r[ours + figure]) for r in rows if r["method"] == m]
                    for m in methods
                },
                xlabel="requests at once",
                ylabel=label,
                colours=plot.METHODS,
                log_x=True,
                legend=figure == "tokens_per_s",
            )


def add_load(parser: argparse.ArgumentParser) -> None:
    """Options of many requests and of their draft."""
    parser.add_argument("--rows", type=int, default=64, help="of a batch (64)")
    parser.add_argument("--children", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2, help="draft rounds per step (2)")
    parser.add_argument("--curve", default=run_options.CURVE, help=f"({run_options.CURVE})")
    parser.add_argument("--spread", type=float, default=USUAL.spread)
    parser.add_argument("--dataset", type=Path, default=run_options.DATA)
    parser.add_argument("--num-prompts", type=int, default=128, help="different ones (128)")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="cut to (32)")


def main() -> None:
    parser = experiment.parser(__doc__, plot=True)
    run_options.add_cluster(parser, machine="rtx3090_8")
    parser.add_argument("--emulate", action="store_true", help="run the product too")
    parser.add_argument("--requests", type=numbers, default=[1, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--methods", type=names, default=list(METHODS)[1:])
    parser.add_argument("--width", type=int, default=16, help="of a level of one request (16)")
    parser.add_argument("--tokens", type=int, default=2000, help="of all requests (2000)")
    add_load(parser)
    options = experiment.parse(parser, requests=[1, 8], tokens=200)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for requests in options.requests:
            plain = row(PLAIN, requests, options, Path(name), {})
            rows.append(plain)
            rows += [row(m, requests, options, Path(name), plain) for m in options.methods]
    kind = "Emulated and simulated" if options.emulate else "Simulated"
    machine = options.machine if options.stage_ms is None else f"{options.stage_ms} (rows:ms)"
    slower = f", {options.scale:g} times slower" if options.scale != 1 else ""
    title = (
        f"{kind} throughput, {machine}{slower}, {options.stages} stages, {options.rows} rows "
        f"a batch; synthetic draft ({options.curve}, spread {options.spread:g})"
    )
    experiment.publish(options, title, rows, draw=partial(draw, title, rows))


if __name__ == "__main__":
    main()
