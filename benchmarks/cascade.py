"""Time between tokens of a small draft alone, and with a mid-size model that scores its tree.

    python -m benchmarks.cascade --scale 2 --json benchmarks/results/cascade.json \\
        --plot benchmarks/results/cascade
    python -m benchmarks.cascade --source cascade --scale 4 \\
        --json benchmarks/results/cascade_demo.json

Both drafts are SYNTHETIC, of one seed, so their errors coincide, or with `--source cascade` those
of the demo pair. The machine is EMULATED: a pass of the mid-size model takes as long as the pace
says, beside the head. Answers are compared with those of `root`, which decodes fewer tokens.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

from benchmarks import comparison, emulated, experiment, plot
from benchmarks.comparison import Case
from pipespec.head.scoring import MID_ROWS

# Of the tokens that are decoded, `root` decodes one in so many: it is slow, and always the same.
OF_ROOT = 4


def main() -> None:
    parser = experiment.parser(__doc__, plot=True)
    emulated.add_cluster(parser, pace="rtx3090_8")
    emulated.add_draft(parser)
    parser.set_defaults(source="synthetic_cascade")
    parser.add_argument(
        "--mid-curve", default="1:0.81,8:0.99", help="of the mid-size model (1:0.81,8:0.99)"
    )
    parser.add_argument("--mid-ms", type=float, help="a pass of it (what the pace says)")
    emulated.add_size(parser)
    emulated.add_prompts(parser, prompts=8, tokens=64)
    options = experiment.parse(parser, num_prompts=2, tokens=16)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        machine = [*emulated.target(options.stages, folder), *emulated.cluster(options)]
        if options.mid_ms is not None:
            machine.append(f"pace.mid_ms={options.mid_ms:g}")
        best_first = emulated.method("best_first", options)
        scored = [*best_first]
        if emulated.is_synthetic(options):
            scored.append(f"source.mid_curve=[{options.mid_curve}]")
        cases = [
            Case({"method": "root"}, machine, ["feed=root"], tokens=options.tokens // OF_ROOT),
            Case({"method": "small draft alone"}, machine, [*best_first, "source.mid_rows=0"]),
            Case({"method": "cascade"}, machine, [*scored, f"source.mid_rows={MID_ROWS}"]),
        ]
        compared = comparison.decode(options, cases, folder)
    rows = compared.rows()
    _, alone, cascade = (row["tbt_ms"] for row in rows)
    print(f"The cascade is {alone / cascade:.2f} times as fast as the small draft alone.")
    mid = options.mid_curve if emulated.is_synthetic(options) else "of the demo pair"
    title = (
        f"{emulated.tags(options)}, mid-size model {mid}: {options.stages} stages, "
        f"width {options.width}, {len(compared.prompts)} prompts × {options.tokens} tokens"
    )
    for row in rows:
        row["data_set"] = comparison.ALL
    drawn = partial(plot.speed_ups, title, rows, by="data_set", size=(4.2, 3.8))
    comparison.publish(options, title, rows, compared, draw=drawn)


if __name__ == "__main__":
    main()
