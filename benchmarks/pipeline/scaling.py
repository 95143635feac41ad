"""One model over more and more stages: PipeDec's section 4.3.2.

    python -m benchmarks.pipeline.scaling --json benchmarks/results/scaling.json \\
        --plot benchmarks/results/scaling

The whole model takes the same time with any number of stages, so a plain pipeline gains nothing
from more stages, and speculation gains more with more stages to fill. The demo target has 16
layers; for more stages it is inflated by layers that change nothing (`tools.inflate`). EMULATED; by
default three times slower than real time (`--scale`), as 22 ranks share few cores.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import comparison, experiment, plot, run_options
from benchmarks.common.comparison import Case

# Of the whole model: plain pipeline parallelism of a 70B over RTX 3090, as in SpecPipe.
MODEL_MS = 302.4
# Of the plain pipeline, whose tokens all take the same time.
ROOT_PROMPTS, ROOT_TOKENS = 1, 6


def stage_ms(stages: int, model_ms: float = MODEL_MS) -> float:
    """A stage's share of the model's time."""
    return model_ms / stages


def draw(title: str, note: str, rows: list[dict[str, Any]], path: Path) -> None:
    methods = list(dict.fromkeys(row["method"] for row in rows))

    def of(figure: str) -> dict[str, list[tuple[float, float]]]:
        return {m: [(r["stages"], r[figure]) for r in rows if r["method"] == m] for m in methods}

    with plot.figure(path, title, columns=2, size=(8.4, 3.5), note=note) as (left, right):
        ideal = [(row["stages"], row["model_ms"]) for row in rows if row["method"] == "root"]
        plot.lines(
            left,
            of("tbt_ms") | {"the model alone": ideal},
            xlabel="stages",
            ylabel="time between tokens, ms",
            colours=plot.METHODS,
            dashed=["the model alone"],
        )
        plot.lines(
            right,
            of("speed_up"),
            xlabel="stages",
            ylabel="speed-up over root",
            colours=plot.METHODS,
            legend=False,
        )


def main() -> None:
    parser = experiment.parser(__doc__, plot=True)
    run_options.add_draft(parser)
    run_options.add_prompts(parser, prompts=4, tokens=16, prompt_tokens=48)
    run_options.add_methods(parser, ["root", "best_first"], width=32)
    parser.add_argument("--stages", type=experiment.numbers, default=[1, 2, 4, 8, 14, 16, 21])
    parser.add_argument("--model-ms", type=float, default=MODEL_MS, help=f"({MODEL_MS})")
    parser.add_argument("--draft-ms", type=float, default=17.0, help="a draft round (17)")
    parser.add_argument("--scale", type=float, default=3.0, help="emulate so much slower (3)")
    parser.add_argument("--sync", default="lockstep", help="lockstep or free (lockstep)")
    options = experiment.parse(parser, stages=[1, 4, 16], num_prompts=2, tokens=10)

    shorter = {"num_prompts": ROOT_PROMPTS, "tokens": min(options.tokens, ROOT_TOKENS)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases = [
            Case(
                {"stages": stages, "method": method},
                [
                    *run_options.target(stages, folder),
                    f"cluster.stages={stages}",
                    "cluster.devices=[cpu]",
                    f"cluster.sync={options.sync}",
                    "emulate=fixed",
                    f"emulate.stage_ms={stage_ms(stages, options.model_ms):.6g}",
                    f"emulate.draft_ms={options.draft_ms:g}",
                    f"emulate.scale={options.scale:g}",
                ],
                run_options.method(method, options),
                # The answer does not depend on the number of stages.
                compared_with=f"{options.stages[0]} stages, {options.methods[-1]}",
                **(shorter if method == "root" else {}),
            )
            for stages in options.stages
            for method in options.methods
        ]
        compared = comparison.decode(options, cases, folder)
    rows = [
        {
            "stages": row["stages"],
            "stage_ms": stage_ms(row["stages"], options.model_ms),
            "model_ms": options.model_ms,
            **row,
        }
        for row in compared.rows()
    ]
    title = (
        f"{run_options.tags(options)}: one model of {options.model_ms:g} ms over 1 to "
        f"{max(options.stages)} stages, width {options.width}"
    )
    note = (
        f"Draft round {options.draft_ms:g} ms; emulated {options.scale:g} times slower; "
        f"{len(compared.prompts)} prompts × {options.tokens} tokens, {options.sync}."
    )
    drawn = partial(draw, title, note, rows)
    comparison.publish(options, title, rows, compared, draw=drawn, note=note)


if __name__ == "__main__":
    main()
