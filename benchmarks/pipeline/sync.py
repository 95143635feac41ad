"""Lockstep and free running: equal and unequal stages, jitter, links.

    python -m benchmarks.pipeline.sync --json benchmarks/results/sync.json

The same prompts on the same emulated cluster, once with every rank waiting for the verdict of its
step and once without; the answers are compared token for token. `unequal`: stages from
70 % of the slowest one's time up to all of it; `jitter`: every step of every stage longer by a
random time, a tenth of a step on average; the others are links of conf/emulate_link/.
"""

from __future__ import annotations

from benchmarks.common import comparison, experiment, run_options
from benchmarks.common.comparison import Case

STAGE_MS = 37.8  # an RTX 3090 with 10 layers of a 70B, see conf/emulate/rtx3090_8.yaml
DRAFT_MS = 17.0
UNEQUAL = 0.7  # of the slowest stage's time, the fastest one's
JITTER = 0.1  # of a stage's time
CONDITIONS = ("equal", "unequal", "jitter", "10gbe", "wan")
SYNCS = ("lockstep", "free")
KEPT = ("stages", "condition", "sync", "tbt_ms", "tokens_per_step", "hit_rate", "overruns_per_step")


def condition_overrides(name: str, stages: int) -> list[str]:
    """The overrides of one condition."""
    times = [STAGE_MS] * stages
    if name == "unequal":
        share = (1 - UNEQUAL) / max(stages - 1, 1)
        times = [STAGE_MS * (UNEQUAL + share * ((7 * i) % stages)) for i in range(stages)]
    given = [
        "emulate=fixed",
        f"emulate.stage_ms=[{','.join(repr(f'{ms:.4g}') for ms in times)}]",
        f"emulate.draft_ms={DRAFT_MS:g}",
    ]
    if name == "jitter":
        given.append(f"emulate.jitter_ms={JITTER * STAGE_MS:.4g}")
    if name not in ("equal", "unequal", "jitter"):
        given.append(f"emulate_link={name}")
    return given


def main() -> None:
    parser = experiment.parser(__doc__)
    run_options.add_draft(parser)
    run_options.add_prompts(parser, prompts=4, tokens=32, prompt_tokens=48)
    run_options.add_size(parser)
    parser.add_argument("--stages", type=experiment.numbers, default=[4, 8, 14])
    parser.add_argument("--conditions", type=experiment.names, default=CONDITIONS)
    parser.add_argument("--method", default="best_first", help="(best_first)")
    parser.add_argument("--scale", type=float, default=2.0, help="emulate so much slower (2)")
    options = experiment.parse(
        parser, stages=[4], conditions=["equal", "jitter"], num_prompts=2, tokens=12
    )

    cases = [
        Case(
            {"stages": stages, "condition": condition, "sync": sync},
            [
                f"cluster.stages={stages}",
                "cluster.devices=[cpu]",
                f"cluster.sync={sync}",
                *condition_overrides(condition, stages),
                f"emulate.scale={options.scale:g}",
            ],
            run_options.method(options.method, options),
        )
        for stages in options.stages
        for condition in options.conditions
        for sync in SYNCS
    ]
    compared = comparison.decode(options, cases)
    rows = [
        {name: row[name] for name in KEPT} | {"step_ms": row["tbt_ms"] * row["tokens_per_step"]}
        for row in compared.rows()
    ]
    title = (
        f"{run_options.tags(options)}: lockstep and free running, {options.method}, width "
        f"{options.width}, {len(compared.prompts)} prompts × {options.tokens} tokens"
    )
    note = f"Emulated {options.scale:g} times slower."
    comparison.publish(options, title, rows, compared, note=note)


if __name__ == "__main__":
    main()
