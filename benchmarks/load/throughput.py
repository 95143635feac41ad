"""Throughput and time between tokens by how many requests are decoded at once.

    python -m benchmarks.load.throughput --json benchmarks/results/load.json

SpecPipe's Figures 16 and 17, PipeDec's Figure 8. Simulated: the head's own scheduler with stages
that only take time, and a synthetic draft of a stated accuracy. Speed-ups are over `root`, batched
plain decoding, with as many requests.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from benchmarks.common import experiment, run_options
from benchmarks.common.experiment import names, numbers
from pipespec.config.compose import compose
from pipespec.config.schema import Config
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
        "policy.width={half}",
        "policy.children={children}",
        "policy.levels=2",
        "policy.shared=true",
    ],
    BEST_FIRST: ["policy.width={rows}", "policy.children={children}"],
}
# Tokens of each request in plain decoding, whose tokens all take equally long, and of all.
PLAIN_TOKENS = 16
PLAIN_LEAST = 64


def overrides(method: str, options: argparse.Namespace) -> list[str]:
    """The settings of a method and of the batches."""
    given = [text.format(**vars(options), half=options.rows // 2) for text in METHODS[method]]
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


def row(
    method: str, requests: int, options: argparse.Namespace, plain: dict[str, Any]
) -> dict[str, Any]:
    """One method with so many requests; `plain` is the row of plain decoding, or empty."""
    machine = [*run_options.cluster(options), "model=demo", "proposer=suffix"]
    found = simulated(compose([*machine, *overrides(method, options)]), requests, options)
    per_second = 1000 * found.tokens / found.ms
    return {
        "requests": requests,
        "method": method,
        "tokens_per_s": per_second,
        "speed_up": per_second / plain.get("tokens_per_s", per_second),
        "tokens_per_step": found.tokens_per_step,
        "rows_per_step": found.rows / found.steps,
        "rounds_per_step": found.rounds / found.steps,
    }


def add_load(parser: argparse.ArgumentParser) -> None:
    """Options of many requests and of their draft."""
    parser.add_argument("--rows", type=int, default=64, help="of a batch (64)")
    parser.add_argument("--children", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2, help="draft rounds per step (2)")
    parser.add_argument("--curve", default=run_options.CURVE, help=f"({run_options.CURVE})")
    parser.add_argument("--spread", type=float, default=USUAL.spread)


def main() -> None:
    parser = experiment.parser(__doc__)
    run_options.add_cluster(parser, machine="rtx3090_8")
    parser.add_argument("--requests", type=numbers, default=[1, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--methods", type=names, default=list(METHODS)[1:])
    parser.add_argument("--width", type=int, default=16, help="of a level of one request (16)")
    parser.add_argument("--tokens", type=int, default=2000, help="of all requests (2000)")
    add_load(parser)
    options = experiment.parse(parser, requests=[1, 8], tokens=200)
    rows = []
    for requests in options.requests:
        plain = row(PLAIN, requests, options, {})
        rows.append(plain)
        others = [method for method in options.methods if method != PLAIN]
        rows += [row(method, requests, options, plain) for method in others]
    machine = options.machine if options.stage_ms is None else f"{options.stage_ms} (rows:ms)"
    title = (
        f"Simulated throughput, {machine}, {options.stages} stages, {options.rows} rows "
        f"a batch; synthetic draft ({options.curve}, spread {options.spread:g})"
    )
    experiment.publish(options, title, rows)


if __name__ == "__main__":
    main()
