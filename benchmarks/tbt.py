"""Time between tokens per data set and method: SpecPipe's Figure 11, PipeDec's Figure 5.

    python -m benchmarks.tbt --json benchmarks/results/tbt.json --plot benchmarks/results/tbt
    python -m benchmarks.tbt --source synthetic --curve "1:0.74,32:0.99" --spread 0.8 ...

Every method decodes the same prompts on a cluster of its own; the answers are compared with
those of `root`, token for token. The synthetic draft knows the answers, which are recorded
first, and errs as its curve says. Figures are those of the emulated machine; where a rank of
this one was too slow for its pace, the over-runs say so.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

from benchmarks import comparison, emulated, experiment, plot
from benchmarks.comparison import ALL, Case


def main() -> None:
    parser = experiment.parser(__doc__, plot=True)
    emulated.add_cluster(parser, pace="rtx3090_8")
    emulated.add_draft(parser)
    emulated.add_prompts(parser, prompts=8, tokens=32)
    emulated.add_methods(parser)
    options = experiment.parse(parser, num_prompts=4, tokens=12)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        machine = [*emulated.target(options.stages, folder), *emulated.cluster(options)]
        cases = [
            Case({"method": method}, machine, emulated.method(method, options))
            for method in options.methods
        ]
        compared = comparison.decode(options, cases, folder)
    rows = [
        {"data_set": emulated.short(name), **row}
        for name in (*compared.data_sets, ALL)
        for row in compared.rows(name)
    ]
    title = (
        f"{emulated.tags(options)}: time between tokens, {options.stages} stages, width "
        f"{options.width}, {len(compared.prompts)} prompts × {options.tokens} tokens"
    )
    drawn = partial(plot.speed_ups, title, rows, by="data_set", size=(8.4, 3.8))
    comparison.publish(options, title, rows, compared, draw=drawn)


if __name__ == "__main__":
    main()
