"""Time between tokens per data set and method: SpecPipe's Figures 11 and 13, PipeDec's Figure 5.

    python -m benchmarks.tbt --json benchmarks/results/tbt.json --plot benchmarks/results/tbt
    python -m benchmarks.tbt --source synthetic --curve "1:0.74,8:0.99" --spread 0.8 ...

Every method decodes the same prompts on a cluster of its own; the answers are compared with
those of `root`, token for token. The synthetic draft knows the answers, which are recorded
first, and errs as its curve says. Figures are those of the emulated machine; where a rank of
this one was too slow for its pace, the over-runs say so.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import emulated
from benchmarks.emulated import Ran
from benchmarks.report import publish_table

ALL = "all"


def table(runs: dict[str, Ran]) -> list[dict[str, Any]]:
    """A row per data set and method, and at the end one per method over all of them."""
    root = runs["root"]
    sets = list(dict.fromkeys(request.benchmark for request in root.requests))
    rows = []
    for name in [*sets, ALL]:
        plain = None
        for method, ran in runs.items():
            mine = [r for r in ran.requests if name in (r.benchmark, ALL)]
            gaps = sum(len(request.token_ms) - 1 for request in mine)
            tbt = sum(request.token_ms[-1] - request.token_ms[0] for request in mine) / gaps
            plain = plain or tbt
            # Tokens of the first verdict cost no steps after it.
            later = [sum(at > request.token_ms[0] for at in request.token_ms) for request in mine]
            steps = sum(
                count / request.stats["tokens_per_step"]
                for count, request in zip(later, mine, strict=True)
                if count
            )
            rows.append(
                {
                    "data_set": emulated.short(name),
                    "method": method,
                    "tbt_ms": tbt,
                    "speed_up": plain / tbt,
                    "tokens_per_step": sum(later) / steps,
                    "hit_rate": sum(r.stats["hit_rate"] for r in mine) / len(mine),
                    "overruns": sum(r.stats["overruns"] for r in mine),
                    "overruns_per_step": sum(r.stats["overruns"] for r in mine)
                    / sum(r.stats["steps"] for r in mine),
                }
            )
    return rows


def draw(title: str, rows: list[dict[str, Any]], path: Path) -> None:
    from benchmarks import plot

    sets = list(dict.fromkeys(row["data_set"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))

    def of(method: str, figure: str) -> list[float]:
        return [row[figure] for row in rows if row["method"] == method]

    with plot.figure(path, title, size=(8.4, 3.8), note="On the bars: speed-up over root.") as (
        axes,
    ):
        plot.bars(
            axes,
            sets,
            {method: of(method, "tbt_ms") for method in methods},
            ylabel="time between tokens, ms",
            colours=plot.METHODS,
            labels={
                method: [f"{value:.2f}×" for value in of(method, "speed_up")]
                for method in methods
                if method != "root"
            },
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    emulated.add_output(parser)
    emulated.add_cluster(parser, pace="rtx3090_8")
    emulated.add_draft(parser)
    emulated.add_prompts(parser, prompts=8, tokens=32)
    parser.add_argument("--methods", type=emulated.names, default=emulated.METHODS)
    parser.add_argument("--width", type=int, default=64, help="(64)")
    parser.add_argument("--children", type=int, default=16, help="(16)")
    options = parser.parse_args()
    if options.quick:
        options.num_prompts, options.tokens = 4, 12
    if options.methods[0] != "root":
        parser.error("--methods must begin with root, with which the others are compared.")

    prompts = emulated.samples(options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        truth = emulated.record(options, folder, prompts)
        runs = {
            method: emulated.run(
                method,
                [
                    *emulated.cluster(options),
                    *emulated.draft(options, truth),
                    *emulated.method(method, options.width, options.children),
                    *emulated.answer(options),
                ],
                prompts,
                prompt_tokens=options.prompt_tokens,
                temporary=[folder],
            )
            for method in options.methods
        }
    differing = {method: ran.differing(runs["root"]) for method, ran in runs.items()}
    rows = table(runs)
    title = (
        f"{emulated.tags(options)}: time between tokens, {options.stages} stages, width "
        f"{options.width}, {len(prompts)} prompts × {options.tokens} tokens"
    )
    publish_table(
        title,
        rows,
        path=options.json,
        differing_answers=differing,
        requests=[
            row
            for method, ran in runs.items()
            for row in emulated.per_request({"method": method}, ran)
        ],
        overrides={method: ran.given for method, ran in runs.items()},
        settings={method: ran.settings for method, ran in runs.items()},
    )
    if options.plot:
        draw(title, rows, options.plot)
    if any(differing.values()):
        sys.exit(f"Answers differ from those of root: {differing}.")
    print("The answers of all methods are equal, token for token.")


if __name__ == "__main__":
    main()
