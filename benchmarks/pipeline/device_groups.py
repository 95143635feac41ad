"""Eight devices of one host: each a stage by itself, or groups of them as one stage.

    python -m benchmarks.pipeline.device_groups --json benchmarks/results/groups.json \\
        --plot benchmarks/results/groups

The devices of a group compute every layer together (tensor parallelism) with two all-reduces in
each. Fewer stages make a miss cheaper, but each all-reduce costs time. The groups are EMULATED: a
stage is one process that takes the time of its devices together; the time of the all-reduces is
ASSUMED (`--sum-ms`). Each row has the prediction of `pipespec plan` too.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import comparison, experiment, plot, run_options
from benchmarks.common.comparison import Case
from pipespec.head.policies.draft_rounds import AUTO
from pipespec.instruments.emulation.machine import TimeCurve
from pipespec.instruments.emulation.synthetic_proposer import Accuracy
from pipespec.instruments.plan.advice import DecodingMethod, Prediction, choices, predict
from pipespec.instruments.plan.pipeline_times import Machine

# Of a device's ten layers of a 70B, from 1 to 64 rows: an RTX 3090, as in SpecPipe.
STAGE_MS, DRAFT_MS = 37.8, 17.0
# 64 rows of 8192 bfloat16 among cards on PCIe 4.0, some 25 GB/s: .1 ms, twice in each layer.
SUM_MS = 2.0
# Tokens of the plain pipeline, which all take the same time.
ROOT_TOKENS = 8
# Tokens that are simulated.
SIMULATED = 2000


def curve_text(curve: TimeCurve) -> str:
    return " ".join(f"{rows}:{ms:g}" for rows, ms in curve.points)


def overrides(shared: Machine, folder: Path, scale: float) -> list[str]:
    """The overrides that emulate a machine."""
    return [
        *run_options.target(shared.num_stages, folder),
        f"cluster.stages={shared.num_stages}",
        "cluster.devices=[cpu]",
        "emulate=fixed",
        f'emulate.stage_ms="{curve_text(shared.stages[0])}"',
        f"emulate.draft_ms={shared.draft_ms:g}",
        f"emulate.scale={scale:g}",
    ]


def draw(title: str, note: str, rows: list[dict[str, Any]], path: Path) -> None:
    with plot.figure(path, title, size=(5.2, 3.6), note=note) as (axes,):
        lines = {
            method: [(r["devices_of_a_stage"], r["tbt_ms"]) for r in rows if r["method"] == method]
            for method in ("root", "best_first")
        }
        predicted = [
            (r["devices_of_a_stage"], r["predicted_ms"]) for r in rows if r["method"] != "root"
        ]
        plot.lines(
            axes,
            lines | {"best_first, predicted": predicted},
            xlabel="devices of a stage",
            ylabel="time between tokens, ms",
            colours=plot.METHODS,
            log_x=True,
            dashed=["best_first, predicted"],
        )


def main() -> None:
    parser = experiment.parser(__doc__, plot=True)
    run_options.add_draft(parser)
    parser.set_defaults(proposer=run_options.SYNTHETIC)
    run_options.add_prompts(parser, prompts=4, tokens=48, prompt_tokens=48)
    run_options.add_size(parser)
    parser.add_argument("--sizes", type=experiment.numbers, default=[1, 2, 4, 8])
    parser.add_argument(
        "--sum-ms", type=float, default=SUM_MS, help=f"all-reduces of ten layers ({SUM_MS:g})"
    )
    parser.add_argument("--scale", type=float, default=3.0, help="emulate so much slower (3)")
    options = experiment.parse(parser, sizes=[2, 8], num_prompts=2, tokens=10)

    single = Machine((TimeCurve(((1, STAGE_MS), (64, STAGE_MS))),) * 8, draft_ms=DRAFT_MS)
    rounds = options.rounds if options.rounds == AUTO else int(options.rounds)
    (root,) = choices(["root"], [1], [1], [1])
    (best_first,) = choices(["best_first"], [options.width], [options.children], [rounds])
    methods: dict[str, DecodingMethod] = {"root": root, "best_first": best_first}
    accuracy = Accuracy.parse(options.curve.split(","), options.spread)

    machines = {size: single.shared(size, options.sum_ms) for size in options.sizes}

    def predicted(size: int, method: str) -> Prediction:
        return predict(methods[method], machines[size], accuracy, num_tokens=SIMULATED)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases = [
            Case(
                {"devices_of_a_stage": size, "method": method},
                overrides(machines[size], folder, options.scale),
                run_options.method(method, options),
                # The answer does not depend on the grouping.
                compared_with=f"{options.sizes[0]} devices_of_a_stage, best_first",
                **({"tokens": min(options.tokens, ROOT_TOKENS)} if method == "root" else {}),
            )
            for size in options.sizes
            for method in methods
        ]
        compared = comparison.decode(options, cases, folder)
    rows = [
        {
            **row,
            "stages": 8 // row["devices_of_a_stage"],
            "predicted_ms": predicted(row["devices_of_a_stage"], row["method"]).tbt_ms,
        }
        for row in compared.rows()
    ]
    for figure in ("tbt_ms", "predicted_ms"):
        best = min(rows, key=lambda row: row[figure])
        print(f"Smallest {figure}: {best['devices_of_a_stage']} devices of a stage.")
    title = f"{run_options.tags(options)}: 8 devices of one host, width {options.width}"
    note = (
        f"{STAGE_MS:g} ms for a device's ten layers, {options.sum_ms:g} ms for their all-reduces "
        f"(ASSUMED), draft round {DRAFT_MS:g} ms; {options.scale:g} times slower; "
        f"{len(compared.prompts)} prompts × {options.tokens} tokens."
    )
    drawn = partial(draw, title, note, rows)
    comparison.publish(options, title, rows, compared, draw=drawn, note=note)


if __name__ == "__main__":
    main()
