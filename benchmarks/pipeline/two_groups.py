"""Eight GPUs of one host: a group for the target and one for the draft, or a pipeline.

    python -m benchmarks.pipeline.two_groups --json benchmarks/results/two_groups.json
    python -m benchmarks.pipeline.two_groups --times swiftspec \\
        --json benchmarks/results/two_groups_swiftspec.json

Two groups that work at the same time are the setting of SwiftSpec (arXiv 2506.11309). The times are
EMULATED. `gpt_fast` are those that gpt-fast publishes (the README of pytorch-labs/gpt-fast):
Llama-2-70B and Llama-2-7B in bfloat16 on 1 to 8 A100-80GB with NVLink, one row, with the
all-reduces. That up to 64 rows take as long as one is ASSUMED, as is the draft's curve. Each row
has the prediction of the simulation too, and how much longer each all-reduce could take before the
pipeline of single GPUs is as fast.

`swiftspec` are those of SwiftSpec's Tables 1 and 6: Qwen2-72B and a 1.5B in 4 bits on H800, 8 rows;
the draft of a serial tree has the GPUs of the target, which waits for its rounds. The draft's curve
is fitted to Table 6 (`benchmarks.papers.swiftspec`).
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import comparison, experiment, run_options
from benchmarks.common.comparison import Case
from benchmarks.papers.swiftspec import FITTED, PARALLEL, SERIAL, TARGET_TABLE
from pipespec.head.policies.draft_rounds import AUTO
from pipespec.instruments.emulation.machine import TimeCurve
from pipespec.instruments.emulation.synthetic_proposer import Accuracy
from pipespec.instruments.plan.advice import choices
from pipespec.instruments.plan.pipeline_times import Machine
from pipespec.instruments.plan.simulation import simulate

# Tokens per second by GPUs that compute together, and GB per second that one reads by itself.
TARGET = {2: 21.32, 4: 38.01, 8: 62.50}
DRAFT = {1: 104.9, 2: 168.84, 4: 254.02}
RATE, RATE_OF_TWO = 1397.31, 1481.87
TARGET_GB = 2 * RATE_OF_TWO / TARGET[2]
# Two in each of 80 layers.
SUMS = 160
ROOT_TOKENS = 8
SIMULATED = 2000


@dataclass(frozen=True)
class Division:
    """A use of eight GPUs: stages of `members` GPUs each, and the draft's group.

    Attributes:
        target_ms: what a row takes through all stages.
        round_ms: what a draft round takes; 0: there is no draft.
        serial: the draft's group is the target's: rounds are made while the stage waits.
    """

    stages: int
    members: int
    drafting: int
    target_ms: float
    round_ms: float
    method: str = "best_first"
    width: int = 64
    serial: bool = False

    @property
    def target(self) -> str:
        return f"{self.stages} × {self.members}"

    @property
    def label(self) -> dict[str, str | int]:
        shared = f"the same {self.drafting}" if self.serial else self.drafting
        return {
            "target": self.target,
            "draft": shared,
            "method": self.method,
            "rows": self.width,
        }

    @property
    def stage_ms(self) -> float:
        return self.target_ms / self.stages

    @property
    def machine(self) -> Machine:
        stages = (TimeCurve(((1, self.stage_ms),)),) * self.stages
        return Machine(stages, draft_ms=self.round_ms, overlap=not self.serial)

    def overrides(self, folder: Path, scale: float) -> list[str]:
        """The overrides that emulate it."""
        return [
            *run_options.target(self.stages, folder),
            f"cluster.stages={self.stages}",
            "cluster.devices=[cpu]",
            "emulate=fixed",
            f'emulate.stage_ms="1:{self.stage_ms:g}"',
            f"emulate.draft_ms={self.round_ms:g}",
            f"emulate.scale={scale:g}",
        ]


def by_gpt_fast(
    stages: int, members: int, drafting: int, method: str = "best_first", width: int = 64
) -> Division:
    """A division at the times of gpt-fast."""
    target_ms = 1e3 / TARGET[members] if members > 1 else 1e3 * TARGET_GB / RATE
    round_ms = 1e3 / DRAFT[drafting] if drafting else 0.0
    return Division(stages, members, drafting, target_ms, round_ms, method, width)


@dataclass(frozen=True)
class Times:
    """Published times, and the divisions that they allow.

    Attributes:
        divisions: the first has no draft, and the second gives the answers that all must give.
        curve, children: of the draft.
        pipeline: whether the last division is a pipeline of single GPUs.
        text: what the times are, for the note.
    """

    divisions: tuple[Division, ...]
    curve: str
    children: int
    pipeline: bool
    models: str
    text: str


TIMES = {
    "gpt_fast": Times(
        (
            by_gpt_fast(1, 8, 0, "root", 1),
            by_gpt_fast(1, 4, 4, width=8),
            by_gpt_fast(1, 4, 4),
            by_gpt_fast(2, 2, 4),
            by_gpt_fast(3, 2, 2),
            by_gpt_fast(7, 1, 1),
        ),
        # Llama 3.1's 8B before its 70B (SpecPipe, Fig. 7).
        curve="1:0.81,8:0.99",
        children=16,
        pipeline=True,
        models="eight A100, Llama-2-70B",
        text="gpt-fast's published tokens per second (batches of one row; 64 rows ASSUMED to take "
        "as long)",
    ),
    "swiftspec": Times(
        (
            Division(1, 8, 0, SERIAL[0], 0.0, "root", 1),
            Division(1, 6, 2, *PARALLEL, width=8),
            # Table 1's time of a 70B on two; that of the draft on six is ASSUMED to be that on two.
            Division(1, 2, 6, TARGET_TABLE[2], PARALLEL[1], width=8),
            Division(1, 8, 8, *SERIAL, width=8, serial=True),
        ),
        curve=",".join(f"{rank}:{share}" for rank, share in FITTED.curve.items()),
        children=8,
        pipeline=False,
        models="eight H800, Qwen2-72B in 4 bits",
        text="SwiftSpec's Tables 1 and 6 (8 rows)",
    ),
}


def main() -> None:
    parser = experiment.parser(__doc__)
    parser.add_argument("--times", choices=TIMES, default="gpt_fast", help="whose (gpt_fast)")
    run_options.add_draft(parser)
    parser.set_defaults(proposer=run_options.SYNTHETIC, curve=None)
    run_options.add_prompts(parser, prompts=8, tokens=64, prompt_tokens=48)
    parser.add_argument("--children", type=int, help="(those of the times)")
    parser.add_argument("--scale", type=float, default=4.0, help="emulate so much slower (4)")
    options = experiment.parse(parser, num_prompts=2, tokens=10)
    times = TIMES[options.times]
    options.curve = options.curve or times.curve
    options.children = options.children or times.children

    rounds = options.rounds if options.rounds == AUTO else int(options.rounds)
    accuracy = Accuracy.parse(options.curve.split(","), options.spread)

    def predicted_ms(division: Division) -> float:
        size = ([division.width], [options.children], [rounds])
        (choice,) = choices([division.method], *size)
        return simulate(
            choice.policy,
            division.machine,
            accuracy,
            rounds=choice.rounds,
            num_tokens=SIMULATED,
        ).tbt_ms

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases = [
            Case(
                division.label,
                division.overrides(folder, options.scale),
                [
                    *run_options.method(
                        division.method,
                        argparse.Namespace(width=division.width, children=options.children),
                    ),
                    *(["proposer.overlap=no"] if division.serial else []),
                ],
                # The answer does not depend on the division.
                compared_with=Case(times.divisions[1].label, (), ()).name,
                tokens=min(options.tokens, ROOT_TOKENS) if division.method == "root" else None,
            )
            for division in times.divisions
        ]
        compared = comparison.decode(options, cases, folder)
    first, *_ = decoded = compared.rows()
    rows: list[dict[str, Any]] = []
    for division, row in zip(times.divisions, decoded, strict=True):
        rows.append(
            {
                **row,
                "speed_up": first["tbt_ms"] / row["tbt_ms"],
                "stage_ms": division.stage_ms,
                "round_ms": division.round_ms,
                "predicted_ms": predicted_ms(division),
            }
        )
    if times.pipeline:
        # How much longer an all-reduce may take until the pipeline of single GPUs is as fast.
        pipeline = rows[-1]
        for division, row in zip(times.divisions, rows, strict=True):
            allowed_ms = pipeline["tbt_ms"] * row["tokens_per_step"] - row["stage_ms"]
            sums = SUMS / division.stages if division.members > 1 else None
            row["dearer_sum_us"] = None if sums is None else allowed_ms / sums * 1e3
    title = f"{run_options.tags(options)}: {times.models}, as groups and as a pipeline"
    note = (
        f"Times by {times.text}; {options.scale:g} times slower; {len(compared.prompts)} prompts × "
        f"{options.tokens} tokens."
    )
    comparison.publish(options, title, rows, compared, note=note)


if __name__ == "__main__":
    main()
