"""Greedy against sampled decoding, time between tokens per method: SpecPipe's Figure 15.

    python -m benchmarks.sampled --json benchmarks/results/sampled.json \\
        --plot benchmarks/results/sampled

Temperature .6, top-p .9, top-k 80 and five repeats are the paper's; a repeat is another seed. One
seed gives one text, whatever the method: the answers of each are compared with those of `root`,
token for token.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import mean
from typing import Any

from benchmarks import comparison, emulated, experiment, plot
from benchmarks.comparison import Case

GREEDY = "greedy"
MEANS = ("tbt_ms", "tokens_per_step", "hit_rate", "overruns_per_step")


def verifier(options: argparse.Namespace, seed: int) -> list[str]:
    """The overrides that draw with a seed as the options say; 0 is greedy."""
    if not seed:
        return ["verify=greedy"]
    return [
        "verify=sample",
        f"verify.temperature={options.temperature:g}",
        f"verify.top_p={options.top_p:g}",
        f"verify.top_k={options.top_k}",
        f"verify.seed={seed}",
    ]


def called(options: argparse.Namespace, seed: int) -> str:
    if not seed:
        return GREEDY
    return f"temperature {options.temperature:g}, top-p {options.top_p:g}, top-k {options.top_k}"


def means(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for all repeats of a method: means, and the least and the greatest time."""
    found = []
    plain: dict[str, float] = {}
    for verify, method in dict.fromkeys((row["verify"], row["method"]) for row in rows):
        mine = [row for row in rows if (row["verify"], row["method"]) == (verify, method)]
        values = {name: mean(row[name] for row in mine) for name in MEANS}
        times = [row["tbt_ms"] for row in mine]
        found.append(
            {"verify": verify, "method": method, "repeats": len(mine)}
            | {"speed_up": plain.setdefault(verify, values["tbt_ms"]) / values["tbt_ms"]}
            | {**values, "least_ms": min(times), "most_ms": max(times)}
        )
    return found


def main() -> None:
    parser = experiment.parser(__doc__, plot=True)
    emulated.add_cluster(parser, pace="rtx3090_8")
    emulated.add_prompts(parser, prompts=4, tokens=24)
    emulated.add_methods(parser)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--top-k", type=int, default=80)
    parser.add_argument("--repeats", type=int, default=5, help="seeds (5)")
    parser.add_argument("--rounds", default="auto", help="draft rounds per step (auto)")
    parser.set_defaults(source="demo")
    options = experiment.parse(parser, tokens=8, methods=["root", "best_first"], repeats=1)

    machine = emulated.cluster(options)
    cases = [
        Case(
            {"verify": called(options, seed), "seed": seed, "method": method},
            machine,
            [*emulated.method(method, options), *verifier(options, seed)],
            like=f"{called(options, seed)}, {seed} seed, root",
        )
        for seed in range(options.repeats + 1)
        for method in options.methods
    ]
    compared = comparison.decode(options, cases)
    rows = means(compared.rows())
    title = (
        f"{emulated.tags(options)}: greedy and sampled, {options.stages} stages, width "
        f"{options.width}, {len(compared.prompts)} prompts × {options.tokens} tokens"
    )
    drawn = partial(plot.speed_ups, title, rows, by="verify", size=(7.2, 3.6))
    comparison.publish(options, title, rows, compared, draw=drawn, runs=compared.rows())


if __name__ == "__main__":
    main()
