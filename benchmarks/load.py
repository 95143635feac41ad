"""Throughput by how many requests are decoded at once, as a multiple of batched plain decoding.

    python -m benchmarks.load --json benchmarks/results/load.json --plot benchmarks/results/load

SIMULATED: the head's own scheduler before stages that are a time, with the SYNTHETIC draft of a
stated accuracy. SpecPipe's Figure 16 has the same axes; its batches are measured on GPUs.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import emulated, experiment, plot
from benchmarks.experiment import names, numbers
from pipespec.config.compose import compose
from pipespec.emulation import TimeCurve
from pipespec.head.feed.policy import FeedPolicy
from pipespec.head.source.synthetic import Accuracy
from pipespec.planning.simulation import Machine, simulate

PLAIN = "root"
# Tokens of each request under plain decoding, which all take the same time.
PLAIN_TOKENS = 4
PLAIN_LEAST = 200


def policy(method: str, options: argparse.Namespace) -> FeedPolicy:
    """The method with the widths of the options."""
    wide = [f"feed.width={options.rows}", f"feed.children={options.children}"]
    return compose([f"feed={method}", *(wide if method != PLAIN else [])]).feed


def row(method: str, requests: int, options: argparse.Namespace, plain: float) -> dict[str, Any]:
    """One method with so many requests; `plain`: throughput without guesses, 0 if this is it."""
    accuracy = Accuracy.parse(options.curve.split(","), options.spread)
    stage = TimeCurve(((1, options.stage_ms),))
    tokens = max(PLAIN_LEAST, PLAIN_TOKENS * requests) if method == PLAIN else options.tokens
    found = simulate(
        policy(method, options),
        Machine((stage,) * options.stages, draft_ms=options.draft_ms),
        accuracy,
        rounds=options.rounds,
        num_tokens=tokens,
        num_requests=requests,
        max_rows=options.rows,
    )
    per_second = 1000 * found.tokens / found.ms
    return {
        "requests": requests,
        "method": method,
        "tokens_per_s": per_second,
        "speed_up": per_second / (plain or per_second),
        "tokens_per_step": found.tokens_per_step,
        "rows_per_step": found.rows / found.steps,
        "rounds_per_step": found.rounds / found.steps,
    }


def draw(title: str, rows: list[dict[str, Any]], path: Path) -> None:
    methods = list(dict.fromkeys(row["method"] for row in rows))
    with plot.figure(path, title, columns=2, size=(8.4, 3.5)) as axes:
        for place, figure, label in (
            (axes[0], "tokens_per_s", "tokens per second"),
            (axes[1], "speed_up", f"multiple of {PLAIN}"),
        ):
            plot.lines(
                place,
                {
                    m: [(r["requests"], r[figure]) for r in rows if r["method"] == m]
                    for m in methods
                },
                xlabel="requests at once",
                ylabel=label,
                colours=plot.METHODS,
                log_x=True,
                legend=figure == "tokens_per_s",
            )


def main() -> None:
    parser = experiment.parser(__doc__, plot=True)
    parser.add_argument("--requests", type=numbers, default=[1, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--methods", type=names, default=["level", "best_first"])
    parser.add_argument("--rows", type=int, default=64, help="of a batch, and of a level (64)")
    parser.add_argument("--children", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2, help="draft rounds per step (2)")
    parser.add_argument("--tokens", type=int, default=2000, help="of all requests (2000)")
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--stage-ms", type=float, default=37.8, help="(37.8, flat)")
    parser.add_argument("--draft-ms", type=float, default=17.0, help="a draft round (17)")
    parser.add_argument("--curve", default=emulated.CURVE, help=f"({emulated.CURVE})")
    parser.add_argument("--spread", type=float, default=0.8)
    options = experiment.parse(parser, requests=[1, 8], tokens=200)
    rows = []
    for requests in options.requests:
        plain = row(PLAIN, requests, options, 0.0)
        rows.append(plain)
        rows += [row(name, requests, options, plain["tokens_per_s"]) for name in options.methods]
    title = (
        f"SIMULATED throughput, {options.stages} stages of {options.stage_ms:g} ms, {options.rows} "
        f"rows a batch; SYNTHETIC draft ({options.curve}, spread {options.spread:g})"
    )
    experiment.publish(options, title, rows, draw=partial(draw, title, rows))


if __name__ == "__main__":
    main()
