"""Speculative decoding at Meta: Figure 8 and the tokens per call, simulated.

A target of one stage and a draft that works before it, not beside it. Meta prints no times of a
draft pass; one is ASSUMED to take a tenth of a target step. Its drafts are EAGLE heads that are
trained for the target; here they have the accuracy of the other papers' 1B and 8B (ASSUMED).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul
from typing import Any

from benchmarks.papers.cells import Cell, Run, Runs
from benchmarks.papers.intervals import Interval
from benchmarks.papers.machines import one_stage
from benchmarks.papers.swiftspec import ACCURACIES, ACCURACY_TEXT
from benchmarks.papers.tables import PLOT_ONLY, Experiment, Grid, Row, claimed, compared
from pipespec.head.policies.best_first import BestFirst
from pipespec.head.policies.static_tree import StaticTree

PAPER = "Meta"
TARGET_MS, DRAFT_MS = 10.0, 1.0
CHAINS = {3: (2.64, 2.80), 5: (3.03, 3.32), 7: (3.20, 3.57)}
# Trees of 8 and 12 nodes, as in production; Meta does not print their shapes.
SHAPES = (
    (1,),
    (1, 1),
    (1, 1, 1),
    (1, 1, 1, 1, 1),
    (1, 1, 1, 1, 1, 1, 1),
    (2, 1, 1),
    (4, 1),
    (2, 1, 1, 1),
    (4, 2),
    (3, 1, 1, 1),
    (4, 1, 1, 1),
    (2, 2, 1, 1),
)
BUDGETS = (3, 8, 12)
PASSES = 3  # draft passes a call of `best_first`


def nodes(shape: Sequence[int]) -> int:
    """Of a static tree, without its root."""
    return sum(accumulate(shape, mul))


def _chain(length: int, name: str) -> Cell:
    return _static((1,) * length, name)


def _static(shape: tuple[int, ...], name: str) -> Cell:
    policy = StaticTree(list(shape))
    return Cell(policy, one_stage(TARGET_MS, DRAFT_MS), ACCURACIES[name])


def _best_first(budget: int, name: str) -> Cell:
    machine = replace(one_stage(TARGET_MS, DRAFT_MS), overlap=False)
    policy = BestFirst(budget + 1, 8)
    return Cell(policy, machine, ACCURACIES[name], rounds=PASSES)


def _target_steps(run: Run, passes: int) -> Interval:
    """Time per token in target steps, with so many draft passes before each."""
    return run.tokens_per_step.inverse.scaled(1 + passes * DRAFT_MS / TARGET_MS)


def tokens_per_call() -> Experiment:
    cells = {(length, name): _chain(length, name) for length in CHAINS for name in ACCURACIES}

    def rows(runs: Runs) -> Sequence[Row]:
        made = []
        for name in ACCURACIES:
            of = ACCURACY_TEXT[name]
            heads = {(3, "Meta's heads, four models"): (2.75, 2.94)}
            others = {(n, "EAGLE3 in vLLM, 70B to 8B"): printed for n, printed in CHAINS.items()}
            for (length, baseline), printed in (heads | others).items():
                quantity = f"tokens per call, chain of {length}, {of}"
                ours = runs[cells[length, name]].tokens_per_step
                made.append(compared("Table 1", quantity, printed, ours, baseline))
        return made

    return Experiment("meta_tpc", PAPER, ("Table 1",), cells, rows)


def figure_8() -> Experiment:
    static = {(shape, name): _static(shape, name) for shape in SHAPES for name in ACCURACIES}
    ours = {(budget, name): _best_first(budget, name) for budget in BUDGETS for name in ACCURACIES}

    def rows(runs: Runs) -> Sequence[Row]:
        made = []
        for name in ACCURACIES:
            tpc = {shape: runs[static[shape, name]].tokens_per_step for shape in SHAPES}
            of = ACCURACY_TEXT[name]
            for budget in BUDGETS[1:]:
                best = max(
                    (shape for shape in SHAPES if nodes(shape) <= budget and len(shape) <= 4),
                    key=lambda shape: tpc[shape].value,
                )
                dynamic = runs[ours[budget, name]].tokens_per_step
                made.append(
                    claimed(
                        "Fig. 8",
                        f"tokens per call, {budget} nodes, {of}",
                        f"{PLOT_ONLY}; N{budget} in production",
                        f"{tpc[1, 1, 1]} for a chain of 3, {tpc[best]} for the static tree "
                        f"{list(best)}, {dynamic} for `best_first` with {PASSES} passes",
                        tpc[best].low > tpc[1, 1, 1].high,
                        "that a tree beats the chain of 3",
                    )
                )
        return made

    def line(
        tree: str, size: int, passes: int | str, of: Mapping[str, tuple[Run, Interval]]
    ) -> dict[str, Any]:
        found: dict[str, Any] = {"tree": tree, "nodes": size, "passes": passes}
        for name, (run, steps) in of.items():
            found[f"{name}: tokens per call"] = str(run.tokens_per_step)
            found[f"{name}: target steps per token"] = str(steps)
        return found

    def grid(runs: Runs) -> Grid:
        found = []
        for shape in SHAPES:
            of = {name: runs[static[shape, name]] for name in ACCURACIES}
            steps = {name: (run, _target_steps(run, len(shape))) for name, run in of.items()}
            found.append(line(str(list(shape)), nodes(shape), len(shape), steps))
        for budget in BUDGETS:
            of = {name: runs[ours[budget, name]] for name in ACCURACIES}
            steps = {name: (run, run.tbt.scaled(1 / TARGET_MS)) for name, run in of.items()}
            found.append(line("`best_first`", budget, f"at most {PASSES}", steps))
        title = "Meta Fig. 8: tokens per call and time per token by static tree [95 %]"
        return Grid("meta_8", title, found)

    return Experiment("meta_8", PAPER, ("Fig. 8",), {**static, **ours}, rows, grid)
