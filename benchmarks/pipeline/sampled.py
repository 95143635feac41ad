"""Greedy against sampled decoding, time between tokens per method: SpecPipe's Figure 15.

    python -m benchmarks.pipeline.sampled --json benchmarks/results/sampled.json \\
        --plot benchmarks/results/sampled

Temperature .6, top-p .9, top-k 80 and five repeats are the paper's; a repeat is another seed. A
seed gives the same text with every method: the answers of each are compared with those of `root`,
token for token.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import mean
from typing import Any

from benchmarks.common import comparison, experiment, plot, run_options
from benchmarks.common.comparison import Case

GREEDY = "greedy"
MEANS = ("tbt_ms", "tokens_per_step", "hit_rate", "overruns_per_step")


def sampling_overrides(options: argparse.Namespace, seed: int) -> list[str]:
    """The overrides that sample with a seed as the options say; seed 0 is greedy."""
    if not seed:
        return ["sampling.temperature=0"]
    return [
        f"sampling.temperature={options.temperature:g}",
        f"sampling.top_p={options.top_p:g}",
        f"sampling.top_k={options.top_k}",
        f"sampling.seed={seed}",
    ]


def describe(options: argparse.Namespace, seed: int) -> str:
    if not seed:
        return GREEDY
    return f"temperature {options.temperature:g}, top-p {options.top_p:g}, top-k {options.top_k}"


def means(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for all repeats of a method: means, and the smallest and largest time."""
    found = []
    plain: dict[str, float] = {}
    for verify, method in dict.fromkeys((row["verify"], row["method"]) for row in rows):
        repeats = [row for row in rows if (row["verify"], row["method"]) == (verify, method)]
        values = {name: mean(row[name] for row in repeats) for name in MEANS}
        times = [row["tbt_ms"] for row in repeats]
        found.append(
            {"verify": verify, "method": method, "repeats": len(repeats)}
            | {"speed_up": plain.setdefault(verify, values["tbt_ms"]) / values["tbt_ms"]}
            | {**values, "least_ms": min(times), "most_ms": max(times)}
        )
    return found


def main() -> None:
    parser = experiment.parser(__doc__, plot=True)
    run_options.add_cluster(parser, machine="rtx3090_8")
    run_options.add_prompts(parser, prompts=4, tokens=24)
    run_options.add_methods(parser)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--top-k", type=int, default=80)
    parser.add_argument("--repeats", type=int, default=5, help="seeds (5)")
    parser.add_argument("--rounds", default="auto", help="draft rounds per step (auto)")
    parser.set_defaults(proposer="demo")
    options = experiment.parse(parser, tokens=8, methods=["root", "best_first"], repeats=1)

    machine = run_options.cluster(options)
    cases = [
        Case(
            {"verify": describe(options, seed), "seed": seed, "method": method},
            machine,
            [*run_options.method(method, options), *sampling_overrides(options, seed)],
            compared_with=f"{describe(options, seed)}, {seed} seed, root",
        )
        for seed in range(options.repeats + 1)
        for method in options.methods
    ]
    compared = comparison.decode(options, cases)
    rows = means(compared.rows())
    title = (
        f"{run_options.tags(options)}: greedy and sampled, {options.stages} stages, width "
        f"{options.width}, {len(compared.prompts)} prompts × {options.tokens} tokens"
    )
    drawn = partial(plot.speed_ups, title, rows, by="verify", size=(7.2, 3.6))
    comparison.publish(options, title, rows, compared, draw=drawn, runs=compared.rows())


if __name__ == "__main__":
    main()
