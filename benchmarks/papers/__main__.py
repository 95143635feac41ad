"""The papers' figures beside ours under their conditions, one table per paper.

    python -m benchmarks.papers --json benchmarks/results/papers.json
    python -m benchmarks.papers --only specpipe_11,pipedec_5

Simulated with the head's own scheduler and a synthetic draft that is as accurate as a recorded one,
as no paper prints the accuracy of a data set. Intervals are of 95 %, by batch means.
`python -m benchmarks.papers.page` writes the tables into docs/papers.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks.common import experiment
from benchmarks.papers import meta, pipedec, specpipe, swiftspec
from benchmarks.papers.cells import BATCHES, Runs, code_version, num_jobs
from benchmarks.papers.missing import MISSING
from benchmarks.papers.tables import Experiment, as_json

PAPERS = ("SpecPipe", "PipeDec", "SwiftSpec", "Meta")
MAKERS = (
    specpipe.figure_10,
    specpipe.figure_11,
    specpipe.figure_13,
    specpipe.figures_16_and_17,
    pipedec.figure_4,
    pipedec.figures_5_and_6,
    pipedec.figure_8,
    swiftspec.figure_2,
    swiftspec.figure_8,
    swiftspec.figure_9,
    meta.tokens_per_call,
)
QUICK_SHARE = 0.04  # of the tokens


def experiments(names: Sequence[str] = ()) -> list[Experiment]:
    """All of them, or those with these names. Raises SystemExit."""
    known = {each.name: each for each in (make() for make in MAKERS)}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(
            f"--only names {', '.join(unknown)}, but the experiments are {', '.join(known)}."
        )
    return [each for name, each in known.items() if not names or name in names]


def simulated(chosen: Sequence[Experiment], options: argparse.Namespace) -> Runs:
    """The runs of all cells, each of which is simulated once."""
    runs = Runs(options.share, options.resume, code_version())
    cells = [cell for each in chosen for cell in each.cells]
    with Progress(transient=True) as shown:
        task = shown.add_task("cells", total=None)
        for left in runs.simulate(cells, options.jobs):
            done = shown.tasks[0].completed + 1
            shown.update(task, completed=done, total=done + left)
    return runs


def simulated_tables(chosen: Sequence[Experiment], runs: Runs) -> list[dict[str, Any]]:
    """One for each paper of the chosen experiments."""
    return [
        {
            "paper": paper,
            "title": f"Simulated: {paper} beside ours",
            "rows": [as_json(row) for each in of_paper for row in each.rows(runs)],
        }
        for paper in PAPERS
        if (of_paper := [each for each in chosen if each.paper == paper])
    ]


def show(tables: Sequence[dict[str, Any]]) -> None:
    columns = ("figure", "quantity", "paper", "ours", "verdict", "conditions")
    for table in tables:
        experiment.show(
            table["title"], [{name: row[name] for name in columns} for row in table["rows"]]
        )


def parse() -> argparse.Namespace:
    parser = experiment.parser(__doc__ or "")
    parser.add_argument("--only", type=experiment.names, default=[], help="experiments (all)")
    parser.add_argument("--jobs", type=int, default=num_jobs(), help="processes (one per core)")
    parser.add_argument("--resume", type=Path, help="file that keeps what is known of cells")
    parser.set_defaults(share=1.0)
    return experiment.parse(parser, share=QUICK_SHARE)


def main() -> None:
    options = parse()
    chosen = experiments(options.only)
    tables = simulated_tables(chosen, simulated(chosen, options))
    show(tables)
    experiment.show("Not to be had here", [asdict(each) for each in MISSING])
    if options.json:
        rows = [{"of": table["paper"], **row} for table in tables for row in table["rows"]]
        title = f"Simulated, recorded accuracy, {BATCHES} batches a cell"
        experiment.store(options.json, {"title": title, "rows": rows})


if __name__ == "__main__":
    main()
