"""What a step costs beyond the slowest stage, against the number of stages.

    python -m benchmarks.step [--stages 1 2 4 8] [--pace 40] [--tokens 60] [--json FILE]

Every stage is held to `--pace` milliseconds, so that ranks which share a core do not wait for
one another's computing: what a step takes beyond that is the runtime. This is an emulated
pipeline; where the machine has fewer cores than ranks, the real computing of some stages may
still over-run the pace, and the over-runs are counted.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.report import store
from pipespec.compose import compose
from pipespec.generate import generate

PROMPT = "Once upon a time there was a king who had three sons"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--pace", type=float, default=40.0, help="milliseconds per stage and step")
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for stages in args.stages:
        result = generate(
            compose(
                [
                    f"cluster.stages={stages}",
                    f"decode.max_new_tokens={args.tokens}",
                    "decode.ignore_eos=true",
                    "pace=fixed",
                    f"pace.stage_ms={args.pace}",
                    "feed=best_first",
                    "feed.width=16",
                ]
            ),
            PROMPT,
        )
        stats = result.stats
        rows.append(
            {
                "stages": stages,
                "step_ms": stats["step_ms"],
                "beyond_pace_ms": stats["step_ms"] - args.pace,
                "control_ms_per_step": stats["control_ms_per_step"],
                "tokens_per_step": stats["tokens_per_step"],
                "overruns": stats["overruns"],
            }
        )
    table = Table(title=f"EMULATED: a step beyond a pace of {args.pace:g} ms (budget 1 ms)")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()))
    Console().print(table)
    if args.json:
        store(args.json, {"title": "step", "emulated": True, "pace_ms": args.pace, "rows": rows})


if __name__ == "__main__":
    main()
