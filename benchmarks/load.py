"""Throughput and time between tokens by how many requests are decoded at once.

    python -m benchmarks.load --json benchmarks/results/load.json --plot benchmarks/results/load
    python -m benchmarks.load --emulate --scale 3 --json benchmarks/results/load_emulated.json ...

SpecPipe's Figures 16 and 17, PipeDec's Figure 8. SIMULATED: the head's own scheduler before stages
that are a time, with the SYNTHETIC draft of a stated accuracy. With --emulate the whole product
does the same beside it, on ranks held to those times; all requests begin together, and what is
counted lies between the last first token and the first last one. All are multiples of `root`,
batched plain decoding, with as many requests.
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

from benchmarks import emulated, experiment, plot
from benchmarks.experiment import names, numbers
from pipespec.client.bench import bench
from pipespec.client.dataset import Sample
from pipespec.client.figures import BenchResult
from pipespec.client.truth import record_truth
from pipespec.config.compose import compose
from pipespec.config.schema import Config
from pipespec.emulation import TimeCurve
from pipespec.head.source.synthetic import Accuracy
from pipespec.planning.simulation import Machine, Simulation, simulate

PLAIN, OURS = "root", "best_first"
# Level's width is each request's own, as SpecPipe-DB has it, or shared by all.
METHODS = {
    PLAIN: [],
    "static_tree": [],
    "level": ["feed.width={width}", "feed.children={children}"],
    "level shared": ["feed.width={rows}", "feed.children={children}", "feed.shared=true"],
    OURS: ["feed.width={rows}", "feed.children={children}"],
}
# Tokens of each request under plain decoding, which all take the same time, and of all.
PLAIN_TOKENS = 16
PLAIN_LEAST = 64
# Tokens of one request at most, so that prompt and answer fit into the demo pair's context.
MOST_TOKENS = 600
MORE = 1.4  # tokens are decoded for each one that is counted


def overrides(method: str, options: argparse.Namespace) -> list[str]:
    """The settings of a method, and of the batches of all."""
    given = [text.format(**vars(options)) for text in METHODS[method]]
    return [
        f"feed={method.split()[0]}",
        *given,
        f"scheduler.max_num_batched_tokens={options.rows}",
        f"decode.prefill_chunk={options.rows}",
        f"source.rounds={options.rounds}",
    ]


def simulated(config: Config, requests: int, options: argparse.Namespace) -> Simulation:
    """What the scheduler does with so many requests."""
    stages = [
        TimeCurve.parse(str(text)) for text in np.resize(config.pace.stage_ms, options.stages)
    ]
    plain = max(PLAIN_LEAST, PLAIN_TOKENS * requests)
    return simulate(
        config.feed,
        Machine(tuple(stages), draft_ms=config.pace.draft_ms),
        Accuracy.parse(options.curve.split(","), options.spread),
        rounds=options.rounds,
        num_tokens=plain if config.feed.max_rows == 1 else max(plain, options.tokens),
        num_requests=requests,
        max_rows=options.rows,
    )


# --- emulated -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """What a run of requests that began together did while all of them were running."""

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


def together(windows: Sequence[Window]) -> Window:
    """Several runs as one."""
    return Window(
        sum(each.tokens for each in windows),
        sum(each.ms for each in windows),
        np.concatenate([each.gaps for each in windows]),
        max(each.worst_ms for each in windows),
    )


def crowd(requests: int, options: argparse.Namespace) -> list[Sample]:
    """So many different prompts: the shipped ones, then what follows their first words."""
    shipped = emulated.load(options.dataset, min(requests, options.num_prompts))
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
    """How long the answers of a run are."""
    if method == PLAIN:
        return max(PLAIN_TOKENS, int(PLAIN_LEAST / requests))
    return min(MOST_TOKENS, int(MORE * wanted(method, options) / requests) + PLAIN_TOKENS)


def wanted(method: str, options: argparse.Namespace) -> int:
    """How many tokens are to be counted; of the methods beside ours a quarter."""
    return options.tokens if method == OURS else options.tokens // 4


def measured(
    method: str, requests: int, options: argparse.Namespace, folder: Path
) -> tuple[Window, float]:
    """What the product does with so many requests, and over-runs per step."""
    samples = crowd(requests, options)
    tokens = tokens_each(method, requests, options)
    truth = folder / f"truth_{requests}_{tokens}.jsonl"
    target = emulated.target(options.stages, folder)
    answer = emulated.answer(tokens)
    if not truth.exists():
        cut = options.prompt_tokens
        record_truth(samples, truth, *target, *answer, prompt_tokens=cut)
    config = compose(
        [
            *target,
            *emulated.cluster(options),
            *emulated.synthetic(truth, options.curve, options.spread),
            *overrides(method, options),
            *answer,
            f"scheduler.max_num_seqs={requests}",
        ]
    )
    windows, overruns, steps = [], 0, 0
    runs = max(1, round(wanted(method, options) / (tokens * requests))) if method != PLAIN else 1
    with Progress(transient=True) as shown:
        task = shown.add_task(f"{method}, {requests} requests")
        for _ in range(runs):
            result = bench(
                config,
                samples,
                concurrency=requests,
                prompt_tokens=options.prompt_tokens,
                on_done=lambda done, of: shown.update(task, completed=done, total=of),
            )
            windows.append(Window.of(result))
            figures = result.summary()
            overruns += figures["overruns"]
            steps += figures["pipeline_steps"]
    return together(windows), overruns / steps


# --- the table ----------------------------------------------------------------------------------


def row(
    method: str, requests: int, options: argparse.Namespace, folder: Path, plain: dict[str, Any]
) -> dict[str, Any]:
    """One method with so many requests; `plain`: that of batched plain decoding, empty if this
    is it."""
    machine = [*emulated.cluster(options), "model=demo", "source=suffix"]
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
    """Throughput and its multiple of plain decoding; emulated where that was measured."""
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


def add_crowd(parser: argparse.ArgumentParser) -> None:
    """Options that say what many requests ask for, and how it is guessed."""
    parser.add_argument("--rows", type=int, default=64, help="of a batch (64)")
    parser.add_argument("--children", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2, help="draft rounds per step (2)")
    parser.add_argument("--curve", default=emulated.CURVE, help=f"({emulated.CURVE})")
    parser.add_argument("--spread", type=float, default=0.8)
    parser.add_argument("--dataset", type=Path, default=emulated.DATA)
    parser.add_argument("--num-prompts", type=int, default=128, help="different ones (128)")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="cut to (32)")


def main() -> None:
    parser = experiment.parser(__doc__, plot=True)
    emulated.add_cluster(parser, pace="rtx3090_8")
    parser.add_argument("--emulate", action="store_true", help="run the product beside it")
    parser.add_argument("--requests", type=numbers, default=[1, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--methods", type=names, default=list(METHODS)[1:])
    parser.add_argument("--width", type=int, default=16, help="of a level of one request (16)")
    parser.add_argument("--tokens", type=int, default=2000, help="of all requests (2000)")
    add_crowd(parser)
    options = experiment.parse(parser, requests=[1, 8], tokens=200)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for requests in options.requests:
            plain = row(PLAIN, requests, options, Path(name), {})
            rows.append(plain)
            rows += [row(m, requests, options, Path(name), plain) for m in options.methods]
    kind = "EMULATED and SIMULATED" if options.emulate else "SIMULATED"
    machine = options.pace if options.stage_ms is None else f"{options.stage_ms} (rows:ms)"
    slower = f", {options.scale:g} times slower" if options.scale != 1 else ""
    title = (
        f"{kind} throughput, {machine}{slower}, {options.stages} stages, {options.rows} rows "
        f"a batch; SYNTHETIC draft ({options.curve}, spread {options.spread:g})"
    )
    experiment.publish(options, title, rows, draw=partial(draw, title, rows))


if __name__ == "__main__":
    main()
