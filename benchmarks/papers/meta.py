"""Speculative decoding at Meta: Figure 8 and the tokens per call, simulated.

A target of one stage and a draft that works before it, not beside it. Meta prints no times of a
draft pass; one is assumed to take a tenth of a target step. Its drafts are EAGLE heads that are
trained for the target; here it is a small model, as accurate as one that was recorded, so nothing
here is like for like.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul

from benchmarks.papers.cells import Cell, Runs
from benchmarks.papers.machines import one_stage
from benchmarks.papers.tables import PLOT_ONLY, UNLIKE, Experiment, Row, claimed, compared
from pipespec.head.policies.best_first import BestFirst
from pipespec.head.policies.static_tree import StaticTree

PAPER = "Meta"
MACHINE = one_stage(10.0, 1.0)
HEADS, EAGLE3 = "Meta's heads, four models", "EAGLE3 in vLLM, 70B to 8B"
CHAINS = {3: (2.64, 2.80), 5: (3.03, 3.32), 7: (3.20, 3.57)}
# Trees of 8 and 12 nodes, as in production; Meta does not print their shapes.
SHAPES = ((4, 1), (2, 1, 1, 1), (4, 2), (3, 1, 1, 1))
BUDGETS = (8, 12)
DEPTH = 4  # of the best of them
PASSES = 3  # draft passes a call of `best_first`


def nodes(shape: Sequence[int]) -> int:
    """Of a static tree, without its root."""
    return sum(accumulate(shape, mul))


def tokens_per_call() -> Experiment:
    chains = {length: Cell(StaticTree([1] * length), MACHINE) for length in (*CHAINS, DEPTH)}
    trees = {shape: Cell(StaticTree([*shape]), MACHINE) for shape in SHAPES}
    serial = replace(MACHINE, overlap=False)
    ours = {size: Cell(BestFirst(size + 1, 8), serial, rounds=PASSES) for size in BUDGETS}

    def rows(runs: Runs) -> Sequence[Row]:
        of = {length: runs[cell].tokens_per_step for length, cell in chains.items()}
        made = [
            compared("Table 1", f"tokens per call, chain of {length}", printed, of[length], *more)
            for length, printed, *more in (
                (3, (2.75, 2.94), HEADS, UNLIKE),
                *((length, printed, EAGLE3, UNLIKE) for length, printed in CHAINS.items()),
            )
        ]
        tpc = {shape: runs[cell].tokens_per_step for shape, cell in trees.items()}
        for size, cell in ours.items():
            best = max(
                (shape for shape in SHAPES if nodes(shape) <= size),
                key=lambda shape: tpc[shape].value,
            )
            made.append(
                claimed(
                    "Fig. 8",
                    f"tokens per call, {size} nodes",
                    f"{PLOT_ONLY}; N{size} in production",
                    f"{of[DEPTH]} for a chain of {DEPTH}, {tpc[best]} for the tree {list(best)}, "
                    f"{runs[cell].tokens_per_step} for `best_first` with {PASSES} passes",
                    len(best) == DEPTH and tpc[best].low > of[DEPTH].high,
                    "that a tree beats the chain as deep; longer chains beat both, above",
                )
            )
        return made

    cells = {"chains": chains, "trees": trees, "ours": ours}
    return Experiment("meta_tpc", PAPER, ("Table 1", "Fig. 8"), cells, rows)
