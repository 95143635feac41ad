"""Time between tokens per data set and method: SpecPipe's Figures 11 and 15, PipeDec's Figure 5.

    python -m benchmarks.pipeline.tbt --json benchmarks/results/tbt.json \\
        --plot benchmarks/results/tbt
    python -m benchmarks.pipeline.tbt --proposer synthetic --scale 6 --num-prompts 4 --tokens 48 ...
    python -m benchmarks.pipeline.tbt --seeds 5 --num-prompts 4 --tokens 24     # greedy and sampled
    python -m benchmarks.pipeline.tbt --proposer synthetic_cascade --methods root,alone,cascade

Every method decodes the same prompts on a cluster of its own; the answers are compared with those
of `root`, token for token. The synthetic draft makes its tokens from the answers, which are
recorded first, with the accuracy of its curve. Figures are those of the emulated machine; the
over-runs count steps in which a rank of this machine was too slow.

`alone` and `cascade` are `best_first` without and with the mid-size model of a cascade, of the demo
pair or SYNTHETIC, of one seed so that the errors of both drafts coincide. With `--seeds N` each
method also samples with N seeds, and a row has the means; a seed gives the same text with every
method.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.common import comparison, experiment, plot, run_options
from benchmarks.common.comparison import ALL, Case
from pipespec.extras.emulation.synthetic_proposer import MID_CURVE
from pipespec.head.proposers.cascade import MID_ROWS

MEANS = ("tbt_ms", "tokens_per_step", "hit_rate", "overruns_per_step")
GREEDY = "greedy"
# What the papers sample with (SpecPipe, Fig. 15).
SAMPLING = {"temperature": 0.6, "top_p": 0.9, "top_k": 80}
SAMPLED = "temperature 0.6, top-p 0.9, top-k 80"
# Rows that the mid-size model scores in a pass.
CASCADES = {"alone": 0, "cascade": MID_ROWS}
METHODS = (*run_options.METHODS, *CASCADES)


def method_overrides(name: str, options: argparse.Namespace) -> list[str]:
    """The overrides of a method; `alone` and `cascade` need a cascade as proposer."""
    if name not in CASCADES:
        return run_options.method(name, options)
    curve = [f"proposer.mid_curve=[{options.mid_curve}]"] if name == "cascade" else []
    return [
        *run_options.method("best_first", options),
        f"proposer.mid_rows={CASCADES[name]}",
        *(curve if run_options.is_synthetic(options) else []),
    ]


def sampling_overrides(seed: int) -> list[str]:
    """The overrides that sample with a seed; 0 is greedy."""
    if not seed:
        return ["sampling.temperature=0"]
    return [
        *(f"sampling.{name}={value}" for name, value in SAMPLING.items()),
        f"sampling.seed={seed}",
    ]


def by_sampling(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for all seeds of a method: means, and the smallest and largest time."""
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
    run_options.add_draft(parser)
    parser.add_argument("--mid-curve", default=",".join(MID_CURVE), help="of a synthetic cascade")
    run_options.add_prompts(parser, prompts=8, tokens=32)
    run_options.add_methods(parser)
    parser.add_argument("--seeds", type=int, default=0, help="sample with so many, too (0)")
    options = experiment.parse(parser, num_prompts=4, tokens=12)
    if unknown := set(options.methods) - {*METHODS}:
        parser.error(f"--methods names {', '.join(unknown)}; choose of {', '.join(METHODS)}.")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        machine = [*run_options.target(options.stages, folder), *run_options.cluster(options)]
        cases = [
            Case(
                {"verify": SAMPLED if seed else GREEDY, "seed": seed, "method": method},
                machine,
                [*method_overrides(method, options), *sampling_overrides(seed)],
                compared_with=f"{SAMPLED if seed else GREEDY}, {seed} seed, root",
            )
            for seed in range(options.seeds + 1)
            for method in options.methods
        ]
        compared = comparison.decode(options, cases, folder)
    if options.seeds:
        rows, by = by_sampling(compared.rows()), "verify"
    else:
        rows, by = [], "data_set"
        for name in (*compared.data_sets, ALL):
            for row in compared.rows(name):
                del row["verify"], row["seed"]
                rows.append({"data_set": run_options.short(name), **row})
    title = (
        f"{run_options.tags(options)}: time between tokens, {options.stages} stages, width "
        f"{options.width}, {len(compared.prompts)} prompts × {options.tokens} tokens"
    )
    drawn = partial(plot.speed_ups, title, rows, by=by, size=(8.4, 3.8))
    comparison.publish(options, title, rows, compared, draw=drawn)


if __name__ == "__main__":
    main()
