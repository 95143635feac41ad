"""Eight GPUs of one host: a group for the target and one for the draft, or a pipeline.

    python -m benchmarks.pipeline.two_groups --json benchmarks/results/two_groups.json \\
        --plot benchmarks/results/two_groups

Two groups that work at the same time are the setting of SwiftSpec (arXiv 2506.11309). The times are
EMULATED, after those that gpt-fast publishes (the README of pytorch-labs/gpt-fast): Llama-2-70B and
Llama-2-7B in bfloat16 on 1 to 8 A100-80GB with NVLink, one row, with the all-reduces. That up to
64 rows take as long as one is ASSUMED, as is the draft's curve. Each row has the prediction of the
simulation too, and how much longer each all-reduce could take before the pipeline of single GPUs is
as fast.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import comparison, experiment, plot, run_options
from benchmarks.common.comparison import Case
from benchmarks.pipeline.device_groups import overrides
from pipespec.head.policies.draft_rounds import AUTO
from pipespec.instruments.emulation.machine import TimeCurve
from pipespec.instruments.emulation.synthetic_proposer import Accuracy
from pipespec.instruments.plan.advice import Prediction, choices, predict
from pipespec.instruments.plan.pipeline_times import Machine

# Tokens per second by GPUs that compute together, and GB per second that one reads by itself.
TARGET = {2: 21.32, 4: 38.01, 8: 62.50}
DRAFT = {1: 104.9, 2: 168.84, 4: 254.02}
RATE, RATE_OF_TWO = 1397.31, 1481.87
TARGET_GB = 2 * RATE_OF_TWO / TARGET[2]
# Two in each of 80 layers.
SUMS = 160
# An 8B draft's for a 70B, as SpecPipe has it.
CURVE = "1:0.81,8:0.99"
ROOT_TOKENS = 8
SIMULATED = 2000


@dataclass(frozen=True)
class Division:
    """A use of eight GPUs: stages of `members` GPUs each, and the draft's group."""

    stages: int
    members: int
    drafting: int
    method: str = "best_first"
    width: int = 64

    @property
    def target(self) -> str:
        return f"{self.stages} × {self.members}"

    @property
    def machine(self) -> Machine:
        """Milliseconds of each stage and of a draft round."""
        whole = 1e3 / TARGET[self.members] if self.members > 1 else 1e3 * TARGET_GB / RATE
        stages = (TimeCurve(((1, whole / self.stages),)),) * self.stages
        return Machine(stages, draft_ms=1e3 / DRAFT[self.drafting] if self.drafting else 0.0)


DIVISIONS = (
    Division(1, 8, 0, "root", 1),
    Division(1, 4, 4, width=8),
    Division(1, 4, 4),
    Division(2, 2, 4),
    Division(3, 2, 2),
    Division(7, 1, 1),
)


def draw(title: str, note: str, rows: Sequence[dict[str, Any]], path: Path) -> None:
    with plot.figure(path, title, size=(6.4, 3.6), note=note) as (axes,):
        names = [
            f"{row['target']}\n{'no draft' if row['method'] == 'root' else row['draft']}\n"
            f"{row['rows']} rows"
            for row in rows
        ]
        series = {name: [row[f"{name}_ms"] for row in rows] for name in ("tbt", "predicted")}
        plot.bars(axes, names, series, ylabel="time between tokens, ms")
        axes.set_xlabel("stages × GPUs of each, GPUs of the draft, rows of a step")


def main() -> None:
    parser = experiment.parser(__doc__, plot=True)
    run_options.add_draft(parser)
    parser.set_defaults(proposer=run_options.SYNTHETIC, curve=CURVE)
    run_options.add_prompts(parser, prompts=8, tokens=64, prompt_tokens=48)
    parser.add_argument("--children", type=int, default=16, help="(16)")
    parser.add_argument("--scale", type=float, default=4.0, help="emulate so much slower (4)")
    options = experiment.parse(parser, num_prompts=2, tokens=10)

    rounds = options.rounds if options.rounds == AUTO else int(options.rounds)
    accuracy = Accuracy.parse(options.curve.split(","), options.spread)

    def label(division: Division) -> dict[str, str | int]:
        return {
            "target": division.target,
            "draft": division.drafting,
            "method": division.method,
            "rows": division.width,
        }

    def predicted(division: Division, machine: Machine) -> Prediction:
        size = ([division.width], [options.children], [rounds])
        (choice,) = choices([division.method], *size)
        return predict(choice, machine, accuracy, num_tokens=SIMULATED)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases = [
            Case(
                label(division),
                overrides(division.machine, folder, options.scale),
                run_options.method(
                    division.method,
                    argparse.Namespace(width=division.width, children=options.children),
                ),
                # The answer does not depend on the division.
                compared_with=Case(label(DIVISIONS[1]), (), ()).name,
                tokens=min(options.tokens, ROOT_TOKENS) if division.method == "root" else None,
            )
            for division in DIVISIONS
        ]
        compared = comparison.decode(options, cases, folder)
    first, *_ = decoded = compared.rows()
    rows: list[dict[str, Any]] = []
    for division, row in zip(DIVISIONS, decoded, strict=True):
        machine = division.machine
        rows.append(
            {
                **row,
                "speed_up": first["tbt_ms"] / row["tbt_ms"],
                "stage_ms": machine.stages[0].ms(1),
                "round_ms": machine.round_ms(1),
                "predicted_ms": predicted(division, machine).tbt_ms,
            }
        )
    # How much longer an all-reduce may take until the pipeline of single GPUs is as fast.
    pipeline = rows[-1]
    for division, row in zip(DIVISIONS, rows, strict=True):
        allowed_ms = pipeline["tbt_ms"] * row["tokens_per_step"] - row["stage_ms"]
        sums = SUMS / division.stages if division.members > 1 else None
        row["dearer_sum_us"] = None if sums is None else allowed_ms / sums * 1e3
    title = f"{run_options.tags(options)}: eight A100 as groups and as a pipeline, Llama-2-70B"
    note = (
        "Times by gpt-fast's published tokens per second (batches of one row; 64 rows ASSUMED to "
        f"take as long); {options.scale:g} times slower; {len(compared.prompts)} prompts × "
        f"{options.tokens} tokens."
    )
    drawn = partial(draw, title, note, rows)
    comparison.publish(options, title, rows, compared, draw=drawn, note=note)


if __name__ == "__main__":
    main()
