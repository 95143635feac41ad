"""Tokens per step of every method, policy × width × children (SpecPipe's Figure 10), and of every
proposer.

    python -m benchmarks.pipeline.methods --json benchmarks/results/methods.json
    python -m benchmarks.pipeline.methods --prompts 4 --tokens 32 --widths 16,64 --children 8
    python -m benchmarks.pipeline.methods --proposers demo,suffix,hybrid --policy best_first

What the demo target says after the shipped prompts of all four kinds is replayed through the head's
own scheduler, with the real draft (`drafts.replay`): a batch and a verdict a step, as many batches
in flight as stages. A step's number of draft rounds is fixed and the cost of a row is stated, so no
figure depends on the speed of the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from benchmarks.common import experiment, plot
from benchmarks.common.demo_pair import Pair
from benchmarks.common.experiment import names, numbers
from benchmarks.common.run_options import PROPOSERS, STATED_COST
from benchmarks.drafts.replay import Replay, proposer_of
from pipespec.config.compose import compose
from tools.rig import cluster

# Methods whose size this table does not vary.
FIXED = ("root", "static_tree")
# SpecPipe's cut of a level; `level` by itself is PipeDec's (docs/policies.md).
CUT_BEFORE = "level, cut before"


@dataclass(frozen=True)
class Method:
    """One row of the table, before it is measured."""

    policy: str
    width: int
    children: int
    rounds: int
    settings: tuple[str, ...] = ()
    proposer: str = "demo"

    @property
    def overrides(self) -> list[str]:
        policy = self.policy.partition(",")[0]
        proposer = PROPOSERS[self.proposer]
        return [f"policy={policy}", *proposer, f"proposer.rounds={self.rounds}", *self.settings]


def methods(
    widths: list[int], children: list[int], rounds: list[int], proposers: list[str]
) -> Iterator[Method]:
    """Every row of the table: all policies with the first proposer; `best_first` with the most
    children for the others."""
    yield Method("root", 1, 0, 1, (), proposers[0])
    first, *others = proposers
    yield Method("static_tree", 21, 8, max(rounds), (), first)
    for width in widths:
        for count in children:
            size = (f"policy.width={width}", f"policy.children={count}")
            yield Method("level", width, count, 1, size, first)
            if count == max(children):
                yield Method(CUT_BEFORE, width, count, 1, (*size, "policy.cut=before"), first)
            for most in rounds:
                costs = (*size, STATED_COST)
                yield Method("best_first", width, count, most, costs, first)
                if count == max(children):
                    for proposer in others:
                        yield Method("best_first", width, count, most, costs, proposer)


def draw(title: str, rows: list[dict[str, Any]], path: Path) -> None:
    """Tokens per step over the width and over the children, with the largest value of the other.

    Methods of a fixed size are dashed lines.
    """
    fixed = {row["policy"]: row for row in rows if row["policy"] in FIXED}
    of_first = [row for row in rows if row.get("source") == rows[0].get("source")]
    sized = [row for row in of_first if row["policy"] not in FIXED]
    if not sized:
        raise SystemExit("Only level and best_first can be drawn, and there is neither.")
    named: dict[str, list[dict[str, Any]]] = {}
    for row in sized:
        rounds = f", rounds {row['rounds']}" if row["policy"] == "best_first" else ""
        named.setdefault(row["policy"] + rounds, []).append(row)
    colours = dict(zip(named, plot.COLOURS[4::-2], strict=False)) | plot.METHODS
    with plot.figure(path, title, columns=2, size=(8.4, 3.6)) as panels:
        for axes, varies, other in (
            (panels[0], "width", "children"),
            (panels[1], "children", "width"),
        ):
            most = max(row[other] for row in sized)
            lines = {
                name: [(row[varies], row["tokens_per_step"]) for row in mine if row[other] == most]
                for name, mine in named.items()
            }
            ends = sorted({row[varies] for row in sized})
            level = {
                name: [(end, row["tokens_per_step"]) for end in (ends[0], ends[-1])]
                for name, row in fixed.items()
            }
            plot.lines(
                axes,
                lines | level,
                xlabel=f"{varies} ({other} {most})",
                ylabel="tokens per step",
                colours=colours,
                log_x=True,
                dashed=[*level],
                legend=varies == "width",
            )


def main() -> None:
    parser = experiment.parser(__doc__, plot=True)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--widths", type=numbers, default=[4, 8, 16, 32, 64])
    parser.add_argument("--children", type=numbers, default=[2, 4, 8, 16])
    parser.add_argument("--rounds", type=numbers, default=[1, 3], help="per step (1,3)")
    parser.add_argument("--prompts", type=int, help="how many of the shipped prompts (all)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="cut prompts to (128)")
    parser.add_argument("--tokens", type=int, default=64, help="decoded after each prompt (64)")
    parser.add_argument("--policy", help="only this one, and root")
    parser.add_argument(
        "--proposers", type=names, default=["demo"], help=f"of {', '.join(PROPOSERS)} (demo)"
    )
    options = experiment.parse(parser, prompts=4, tokens=16, widths=[16, 64], children=[8])
    if unknown := set(options.proposers) - PROPOSERS.keys():
        parser.error(
            f"--proposers names {', '.join(sorted(unknown))}; choose of {', '.join(PROPOSERS)}."
        )
    torch.set_num_threads(1)
    pair = Pair()
    prompts = pair.prompts(options.prompts, options.prompt_tokens)
    answers = cluster.reference(pair.target, prompts, options.tokens)
    chosen = [
        method
        for method in methods(options.widths, options.children, options.rounds, options.proposers)
        if method.policy == "root" or options.policy in (None, method.policy)
    ]
    rows = []
    for method in track(chosen, "replaying"):
        deployment = cluster.make_deployment(pair.target, pair.draft, *method.overrides)
        made, policy = proposer_of(deployment), deployment.config.policy
        replay = Replay(policy, made, stages=options.stages, rounds=method.rounds)
        for prompt, answer in zip(prompts, answers, strict=True):
            replay.decode(prompt, answer)
        found = replay.result
        rows.append(
            {
                "policy": method.policy,
                "source": method.proposer,
                "width": method.width,
                "children": method.children,
                "rounds": method.rounds,
                "tokens_per_step": found.tokens_per_step,
                "hit_rate": found.hits / found.tokens,
                "rows_per_step": found.rows / found.steps,
            }
        )
    title = f"{options.stages} stages, demo pair, {len(prompts)} prompts × {options.tokens} tokens"
    settings = [experiment.settings(compose(method.overrides)) for method in chosen]
    drawn = partial(draw, title, rows)
    experiment.publish(options, title, rows, draw=drawn, settings=settings)


if __name__ == "__main__":
    main()
