"""Time between tokens of a small draft alone, and with a mid-size model that scores its tree.

    python -m benchmarks.drafts.cascade_tbt --scale 2 --json benchmarks/results/cascade.json \\
        --plot benchmarks/results/cascade
    python -m benchmarks.drafts.cascade_tbt --proposer cascade --scale 4 \\
        --json benchmarks/results/cascade_demo.json

Both drafts are SYNTHETIC, of one seed, so their errors coincide, or with `--proposer cascade` those
of the demo pair. The machine is EMULATED: a pass of the mid-size model takes as long as the pace
says, beside the head. Answers are compared with those of `root`, which decodes fewer tokens.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

from benchmarks.common import comparison, experiment, plot, run_options
from benchmarks.common.comparison import Case
from pipespec.head.scoring import MID_ROWS

# Of the tokens that are decoded, `root` decodes one in so many: it is slow, and always the same.
OF_ROOT = 4


def main() -> None:
    parser = experiment.parser(__doc__, plot=True)
    run_options.add_cluster(parser, machine="rtx3090_8")
    run_options.add_draft(parser)
    parser.set_defaults(proposer="synthetic_cascade")
    parser.add_argument(
        "--mid-curve", default="1:0.81,8:0.99", help="of the mid-size model (1:0.81,8:0.99)"
    )
    parser.add_argument("--mid-ms", type=float, help="a pass of it (what the pace says)")
    run_options.add_size(parser)
    run_options.add_prompts(parser, prompts=8, tokens=64)
    options = experiment.parse(parser, num_prompts=2, tokens=16)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        machine = [*run_options.target(options.stages, folder), *run_options.cluster(options)]
        if options.mid_ms is not None:
            machine.append(f"emulate.mid_ms={options.mid_ms:g}")
        best_first = run_options.method("best_first", options)
        scored = [*best_first]
        if run_options.is_synthetic(options):
            scored.append(f"proposer.mid_curve=[{options.mid_curve}]")
        cases = [
            Case({"method": "root"}, machine, ["policy=root"], tokens=options.tokens // OF_ROOT),
            Case({"method": "small draft alone"}, machine, [*best_first, "proposer.mid_rows=0"]),
            Case({"method": "cascade"}, machine, [*scored, f"proposer.mid_rows={MID_ROWS}"]),
        ]
        compared = comparison.decode(options, cases, folder)
    rows = compared.rows()
    _, alone, cascade = (row["tbt_ms"] for row in rows)
    print(f"The cascade is {alone / cascade:.2f} times as fast as the small draft alone.")
    mid = options.mid_curve if run_options.is_synthetic(options) else "of the demo pair"
    title = (
        f"{run_options.tags(options)}, mid-size model {mid}: {options.stages} stages, "
        f"width {options.width}, {len(compared.prompts)} prompts × {options.tokens} tokens"
    )
    for row in rows:
        row["data_set"] = comparison.ALL
    drawn = partial(plot.speed_ups, title, rows, by="data_set", size=(4.2, 3.8))
    comparison.publish(options, title, rows, compared, draw=drawn)


if __name__ == "__main__":
    main()
