"""Time between tokens per data set and method: SpecPipe's Figure 11, PipeDec's Figure 5.

    python -m benchmarks.pipeline.tbt --json benchmarks/results/tbt.json \\
        --plot benchmarks/results/tbt
    python -m benchmarks.pipeline.tbt --proposer synthetic --scale 6 --num-prompts 4 --tokens 48 ...

Every method decodes the same prompts on a cluster of its own; the answers are compared with those
of `root`, token for token. The synthetic draft makes its tokens from the answers, which are
recorded first, with the accuracy of its curve. Figures are those of the emulated machine; the
over-runs count steps in which a rank of this machine was too slow.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

from benchmarks.common import comparison, experiment, plot, run_options
from benchmarks.common.comparison import ALL, Case


def main() -> None:
    parser = experiment.parser(__doc__, plot=True)
    run_options.add_cluster(parser, machine="rtx3090_8")
    run_options.add_draft(parser)
    run_options.add_prompts(parser, prompts=8, tokens=32)
    run_options.add_methods(parser)
    options = experiment.parse(parser, num_prompts=4, tokens=12)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        machine = [*run_options.target(options.stages, folder), *run_options.cluster(options)]
        cases = [
            Case({"method": method}, machine, run_options.method(method, options))
            for method in options.methods
        ]
        compared = comparison.decode(options, cases, folder)
    rows = [
        {"data_set": run_options.short(name), **row}
        for name in (*compared.data_sets, ALL)
        for row in compared.rows(name)
    ]
    title = (
        f"{run_options.tags(options)}: time between tokens, {options.stages} stages, width "
        f"{options.width}, {len(compared.prompts)} prompts × {options.tokens} tokens"
    )
    drawn = partial(plot.speed_ups, title, rows, by="data_set", size=(8.4, 3.8))
    comparison.publish(options, title, rows, compared, draw=drawn)


if __name__ == "__main__":
    main()
