"""Greedy against sampled decoding, time between tokens per method: SpecPipe's Figure 15.

    python -m benchmarks.sampled --json benchmarks/results/sampled.json \\
        --plot benchmarks/results/sampled

The draft proposes what it finds probable in either case; a drawn token is more often one that
it did not have. One seed gives one text, whatever the method: the answers at each temperature
are compared with those of `root`, token for token.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks import emulated
from benchmarks.emulated import Ran
from benchmarks.report import publish_table
from benchmarks.tbt import ALL, table

SEED = 1


def verifier(temperature: float) -> list[str]:
    """The overrides that decode at this temperature; 0 is greedy."""
    if not temperature:
        return ["verify=greedy"]
    return ["verify=sample", f"verify.temperature={temperature:g}", f"verify.seed={SEED}"]


def called(temperature: float) -> str:
    return f"temperature {temperature:g}" if temperature else "greedy"


def draw(title: str, rows: list[dict[str, Any]], path: Path) -> None:
    from benchmarks import plot

    methods = list(dict.fromkeys(row["method"] for row in rows))

    def of(method: str, figure: str) -> list[float]:
        return [row[figure] for row in rows if row["method"] == method]

    with plot.figure(path, title, size=(7.2, 3.6), note="On the bars: speed-up over root.") as (
        axes,
    ):
        plot.bars(
            axes,
            list(dict.fromkeys(row["verify"] for row in rows)),
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
    emulated.add_prompts(parser, prompts=4, tokens=24)
    parser.add_argument("--methods", type=emulated.names, default=emulated.METHODS)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--width", type=int, default=64, help="(64)")
    parser.add_argument("--children", type=int, default=16, help="(16)")
    parser.add_argument("--rounds", default="auto", help="draft rounds per step (auto)")
    options = parser.parse_args()
    if options.quick:
        options.tokens = 8
        options.methods, options.temperatures = ("root", "best_first"), [0.0, 1.0]
    if options.methods[0] != "root":
        parser.error("--methods must begin with root, with which the others are compared.")

    prompts = emulated.samples(options)
    rows: list[dict[str, Any]] = []
    requests: list[dict[str, Any]] = []
    done: dict[str, Ran] = {}
    differing: dict[str, int] = {}
    for temperature in options.temperatures:
        verify = called(temperature)
        runs = {
            method: emulated.run(
                f"{verify}, {method}",
                [
                    *emulated.cluster(options),
                    "source=draft_model",
                    f"source.rounds={options.rounds}",
                    *emulated.method(method, options.width, options.children),
                    *verifier(temperature),
                    *emulated.answer(options),
                ],
                prompts,
                prompt_tokens=options.prompt_tokens,
            )
            for method in options.methods
        }
        for row in table(runs):
            if row["data_set"] == ALL:
                del row["data_set"]
                rows.append({"verify": verify, **row})
        for method, ran in runs.items():
            differing[f"{verify}, {method}"] = ran.differing(runs["root"])
            done[f"{verify}, {method}"] = ran
            requests += emulated.per_request({"verify": verify, "method": method}, ran)
    title = (
        f"{emulated.tags(options)}: greedy and sampled, {options.stages} stages, width "
        f"{options.width}, {len(prompts)} prompts × {options.tokens} tokens"
    )
    publish_table(
        title,
        rows,
        path=options.json,
        seed=SEED,
        differing_answers=differing,
        requests=requests,
        overrides={name: ran.given for name, ran in done.items()},
        settings={name: ran.settings for name, ran in done.items()},
    )
    if options.plot:
        draw(title, rows, options.plot)
    if any(differing.values()):
        sys.exit(f"Answers differ from those of root: {differing}.")
    print("The answers of all methods are equal, token for token.")


if __name__ == "__main__":
    main()
