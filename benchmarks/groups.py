"""Eight devices of one host: each a stage by itself, or groups of them as one stage.

    python -m benchmarks.groups --json benchmarks/results/groups.json \\
        --plot benchmarks/results/groups

Devices of a group compute every layer together (tensor parallelism) and add up their parts twice in
each. Fewer stages make a miss cheaper, and each sum costs. The groups are EMULATED: a stage takes
the time that its devices would take together, on a process of its own; what adding up takes is
ASSUMED (`--sum-ms`). Beside each row stands what `pipespec plan` predicts of it.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import comparison, emulated, experiment, plot
from benchmarks.comparison import Case
from pipespec.emulation import TimeCurve
from pipespec.head.feed.rounds import AUTO
from pipespec.head.source.synthetic import Accuracy
from pipespec.planning.advice import Choice, Prediction, choices, predict
from pipespec.planning.simulation import Machine

# Of a device's ten layers of a 70B, from 1 to 64 rows: an RTX 3090, as in SpecPipe.
STAGE_MS, DRAFT_MS = 37.8, 17.0
# 64 rows of 8192 bfloat16 among cards on PCIe 4.0, some 25 GB/s: .1 ms, twice in each layer.
SUM_MS = 2.0
# Of the plain pipeline, whose tokens all take the same time.
ROOT_TOKENS = 8
# Tokens that are simulated.
SIMULATED = 2000


def curve_text(curve: TimeCurve) -> str:
    return " ".join(f"{rows}:{ms:g}" for rows, ms in curve.points)


def overrides(shared: Machine, folder: Path, scale: float) -> list[str]:
    """What emulates a machine."""
    return [
        *emulated.target(shared.num_stages, folder),
        f"cluster.stages={shared.num_stages}",
        "cluster.devices=[cpu]",
        "pace=fixed",
        f'pace.stage_ms="{curve_text(shared.stages[0])}"',
        f"pace.draft_ms={shared.draft_ms:g}",
        f"pace.scale={scale:g}",
    ]


def draw(title: str, note: str, rows: list[dict[str, Any]], path: Path) -> None:
    with plot.figure(path, title, size=(5.2, 3.6), note=note) as (axes,):
        lines = {
            method: [(r["devices_of_a_stage"], r["tbt_ms"]) for r in rows if r["method"] == method]
            for method in ("root", "best_first")
        }
        foretold = [
            (r["devices_of_a_stage"], r["predicted_ms"]) for r in rows if r["method"] != "root"
        ]
        plot.lines(
            axes,
            lines | {"best_first, predicted": foretold},
            xlabel="devices of a stage",
            ylabel="time between tokens, ms",
            colours=plot.METHODS,
            log_x=True,
            dashed=["best_first, predicted"],
        )


def main() -> None:
    parser = experiment.parser(__doc__, plot=True)
    emulated.add_draft(parser)
    parser.set_defaults(source=emulated.SYNTHETIC)
    emulated.add_prompts(parser, prompts=4, tokens=48, prompt_tokens=48)
    emulated.add_size(parser)
    parser.add_argument("--sizes", type=experiment.numbers, default=[1, 2, 4, 8])
    parser.add_argument(
        "--sum-ms", type=float, default=SUM_MS, help=f"adding up, for ten layers ({SUM_MS:g})"
    )
    parser.add_argument("--scale", type=float, default=3.0, help="emulate so much slower (3)")
    options = experiment.parse(parser, sizes=[2, 8], num_prompts=2, tokens=10)

    alone = Machine((TimeCurve(((1, STAGE_MS), (64, STAGE_MS))),) * 8, draft_ms=DRAFT_MS)
    rounds = options.rounds if options.rounds == AUTO else int(options.rounds)
    (root,) = choices(["root"], [1], [1], [1])
    (guessing,) = choices(["best_first"], [options.width], [options.children], [rounds])
    ways: dict[str, Choice] = {"root": root, "best_first": guessing}
    accuracy = Accuracy.parse(options.curve.split(","), options.spread)

    machines = {size: alone.shared(size, options.sum_ms) for size in options.sizes}

    def foretold(size: int, method: str) -> Prediction:
        return predict(ways[method], machines[size], accuracy, num_tokens=SIMULATED)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases = [
            Case(
                {"devices_of_a_stage": size, "method": method},
                overrides(machines[size], folder, options.scale),
                emulated.method(method, options),
                # However the devices are grouped, the model says the same.
                like=f"{options.sizes[0]} devices_of_a_stage, best_first",
                **({"tokens": min(options.tokens, ROOT_TOKENS)} if method == "root" else {}),
            )
            for size in options.sizes
            for method in ways
        ]
        compared = comparison.decode(options, cases, folder)
    rows = [
        {
            **row,
            "stages": 8 // row["devices_of_a_stage"],
            "predicted_ms": foretold(row["devices_of_a_stage"], row["method"]).tbt_ms,
        }
        for row in compared.rows()
    ]
    for figure in ("tbt_ms", "predicted_ms"):
        best = min(rows, key=lambda row: row[figure])
        print(f"Least {figure}: {best['devices_of_a_stage']} devices of a stage.")
    title = f"{emulated.tags(options)}: 8 devices of one host, width {options.width}"
    note = (
        f"{STAGE_MS:g} ms for a device's ten layers, {options.sum_ms:g} ms for the sums of so many "
        f"(ASSUMED), draft round {DRAFT_MS:g} ms; {options.scale:g} times slower; "
        f"{len(compared.prompts)} prompts × {options.tokens} tokens."
    )
    drawn = partial(draw, title, note, rows)
    comparison.publish(options, title, rows, compared, draw=drawn, note=note)


if __name__ == "__main__":
    main()
