"""SpecPipe: Figures 10, 11 and 13, simulated under their conditions.

`level` that cuts before the verdict is SpecPipe's method, `static_tree` is SpecInfer over the same
pipeline, `root` the plain one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from benchmarks.papers.cells import Cell, Run, Runs
from benchmarks.papers.machines import (
    FAST_DRAFT_MS,
    PP_MS,
    VLLM_MS,
    drafting,
    papers_pipeline,
    two_servers,
    vllm_pipeline,
)
from benchmarks.papers.tables import (
    GIVEN,
    OTHER_TIMES,
    PLOT_ONLY,
    Experiment,
    Grid,
    Row,
    claimed,
    compared,
    ours_alone,
)
from pipespec.head.policies.best_first import BestFirst
from pipespec.head.policies.level import BEFORE, Level
from pipespec.head.policies.policy import SpeculationPolicy
from pipespec.head.policies.root import Root
from pipespec.head.policies.static_tree import StaticTree
from pipespec.instruments.plan.pipeline_times import Machine
from pipespec.instruments.plan.simulation import specpipe_ms

PAPER = "SpecPipe"
WIDTH, CHILDREN = 64, 16
WIDTHS = (1, 2, 4, 8, 16, 32, 48, 64, 80, 112, 128)
CHILDREN_OF = (2, 4, 8, 16, 32)
# Tokens of a cell that a speed-up is stated of, and of one beside which a goal is set.
CLOSELY, MOST_CLOSELY = 5000, 10000

SPECPIPE = Level(WIDTH, CHILDREN, cut=BEFORE)
PIPEDEC_CUT = Level(WIDTH, CHILDREN)
OURS = BestFirst(WIDTH, CHILDREN)

OURS_WIDE = "best_first, 16 children"
FAST = "draft of 4 ms"
PP = "SpecPipe's PP, 302.4 ms"
VLLM = "vLLM's pipeline, 181.6 ms (181.41 printed)"
SLOW, QUICK = "stages of 37.8 ms", "stages of 22.7 ms"


def _single(policy: SpeculationPolicy, machine: Machine, tokens: int = CLOSELY) -> Cell:
    return Cell(policy, machine, tokens=tokens)


# --- Figure 10: width and children --------------------------------------------------------------


def figure_10_cells() -> dict[str, dict[int, Cell]]:
    """By children, and those of `best_first`, by width."""
    slow = papers_pipeline()
    found = {
        f"{k} children": {w: Cell(Level(w, k, cut=BEFORE), slow) for w in WIDTHS}
        for k in CHILDREN_OF
    }
    return found | {OURS_WIDE: {w: Cell(BestFirst(w, CHILDREN), slow) for w in WIDTHS}}


def figure_10() -> Experiment:
    by_size = figure_10_cells()
    ours = by_size[OURS_WIDE]
    cells = {(w, k): by_size[f"{k} children"][w] for w, k in product(WIDTHS, CHILDREN_OF)}

    def rows(runs: Runs) -> Sequence[Row]:
        tbt = {size: runs[cell].tbt.value for size, cell in cells.items()}
        by_width = [tbt[w, CHILDREN] for w in WIDTHS]
        best = min(WIDTHS, key=lambda w: tbt[w, CHILDREN])
        chosen = runs[cells[WIDTH, CHILDREN]]
        two, four, most = (runs[cells[WIDTH, k]] for k in (2, 4, 32))
        over_best = tbt[WIDTH, CHILDREN] / min(tbt.values())
        wide = runs[ours[WIDTH]]
        return [
            claimed(
                "Fig. 10",
                "TBT by width, 16 children, `level` cut before",
                f"{PLOT_ONLY}; falls, then rises",
                f"{by_width[0]:.0f} ms at width 1, {min(by_width):.0f} at {best}, "
                f"{by_width[-1]:.0f} at 128",
                by_width[0] > min(by_width) < by_width[-1],
                SLOW,
            ),
            claimed(
                "Fig. 10",
                "2 children beside 4: TBT at width 64",
                f"{PLOT_ONLY}; k = 2 sharply worse",
                f"{four.over(two)}×",
                four.over(two).low > 1.1,
                SLOW,
            ),
            claimed(
                "Fig. 10",
                "4 children beside 32: TBT at width 64",
                f"{PLOT_ONLY}; k ≥ 4 alike",
                f"{most.over(four)}×",
                most.over(four).low < 1.05,
                SLOW,
            ),
            claimed(
                "Fig. 10",
                "width 64 and 16 children beside the best of the grid",
                "64 and 16 chosen",
                f"{over_best:.2f} times the best TBT",
                over_best < 1.05,
                SLOW,
            ),
            ours_alone(
                "Fig. 10",
                "TBT at width 64 and 16 children, `level` cut before, ms",
                chosen.tbt,
                baseline=SLOW,
                paper=PLOT_ONLY,
            ),
            ours_alone(
                "Fig. 10",
                "the same, `best_first`, ms",
                wide.tbt,
                baseline=SLOW,
                paper="not in the paper",
            ),
        ]

    def grid(runs: Runs) -> Grid:
        found: list[dict[str, Any]] = []
        for w in WIDTHS:
            of_width = {name: runs[of[w]] for name, of in by_size.items()}
            shown = {
                name: f"{run.tbt} ({run.hit_rate.value:.2f})" for name, run in of_width.items()
            }
            found.append({"width": w, **shown})
        return Grid(
            "specpipe_10",
            "SpecPipe Fig. 10: TBT in ms [95 %] (hit rate), `level` cut before",
            found,
        )

    listed = [cell for of in by_size.values() for cell in of.values()]
    return Experiment("specpipe_10", PAPER, ("Fig. 10",), listed, rows, grid)


# --- Figures 11 and 13: time between tokens -----------------------------------------------------


def figure_11() -> Experiment:
    slow, quick = papers_pipeline(), vllm_pipeline()
    pp, vllm = _single(Root(), slow), _single(Root(), quick)
    specinfer, specpipe = _single(StaticTree(), slow), _single(SPECPIPE, slow)
    after, ours = _single(PIPEDEC_CUT, slow), _single(OURS, slow)
    ours_fast = _single(OURS, drafting(slow, FAST_DRAFT_MS))
    level_quick, ours_quick = _single(SPECPIPE, quick), _single(OURS, quick, MOST_CLOSELY)
    ours_quick_fast = _single(OURS, drafting(quick, FAST_DRAFT_MS), MOST_CLOSELY)
    cells = [pp, vllm, specinfer, specpipe, after, ours, ours_fast]
    cells += [level_quick, ours_quick, ours_quick_fast]

    def rows(runs: Runs) -> Sequence[Row]:
        return [
            *_times(runs[pp], runs[vllm], runs[specinfer], runs[specpipe]),
            *_our_times(runs[after], runs[ours], runs[ours_fast]),
            *_speed_ups(
                "Fig. 11",
                {
                    "`level` cut before": runs[specpipe],
                    "`level` cut after": runs[after],
                    "`best_first`": runs[ours],
                    f"`best_first`, {FAST}": runs[ours_fast],
                },
                (runs[pp], PP, (4.19, 5.53)),
                (runs[vllm], VLLM, (2.50, 3.32)),
                (runs[specinfer], "SpecInfer (`static_tree`), draft of 17 ms", (2.09, 2.38)),
            ),
            *_on_quick_stages(
                runs[vllm],
                {
                    "`level` cut before": runs[level_quick],
                    "`best_first`": runs[ours_quick],
                    f"`best_first`, {FAST}": runs[ours_quick_fast],
                },
            ),
        ]

    return Experiment("specpipe_11", PAPER, ("Fig. 11",), cells, rows)


def _times(pp: Run, vllm: Run, specinfer: Run, specpipe: Run) -> list[Row]:
    """TBT of the printed bars, which are HumanEval-X's."""
    stage_ms = papers_pipeline().stages[0].ms(WIDTH)
    equation = specpipe_ms(specpipe.hit_rate.value, [stage_ms] * 8)
    return [
        compared("Fig. 11", "TBT, PP (`root`), ms", PP_MS, pp.tbt, verdict=GIVEN, baseline=SLOW),
        compared(
            "Fig. 11", "TBT, PP-vLLM (`root`), ms", VLLM_MS, vllm.tbt, verdict=GIVEN, baseline=QUICK
        ),
        compared(
            "Fig. 11",
            "TBT, SpecInfer (`static_tree`), ms",
            117.92,
            specinfer.tbt,
            baseline=SLOW,
            verdict="a quicker baseline",
        ),
        compared(
            "Fig. 11",
            "TBT, SpecPipe (`level` cut before), ms",
            54.67,
            specpipe.tbt,
            baseline=SLOW,
            lower_is_better=True,
        ),
        Row(
            "Eq. 2",
            "the same by SpecPipe's equation with our hit rate, ms",
            "54.67",
            f"{equation:.1f} (hit rate {specpipe.hit_rate})",
            "behind" if equation > 54.67 else "ahead",
            SLOW,
        ),
    ]


def _our_times(after: Run, ours: Run, fast: Run) -> list[Row]:
    """TBT of methods that the paper does not have, beside SpecPipe's."""
    of = {
        "`level` cut after, as PipeDec": after,
        "`best_first`": ours,
        f"`best_first`, {FAST}": fast,
    }
    return [
        compared(
            "Fig. 11",
            f"TBT, SpecPipe's beside {name}, ms",
            54.67,
            run.tbt,
            baseline=SLOW,
            lower_is_better=True,
            verdict=_other_times(name),
        )
        for name, run in of.items()
    ]


def _other_times(method: str) -> str | None:
    """The verdict on a method whose draft is quicker than the paper's."""
    return OTHER_TIMES if method.endswith(FAST) else None


def _speed_ups(
    figure: str, methods: dict[str, Run], *baselines: tuple[Run, str, tuple[float, float]]
) -> list[Row]:
    """How many times as fast methods are as each baseline, whose printed range is SpecPipe's."""
    return [
        compared(
            figure,
            f"speed-up, {name}, {SLOW}",
            printed,
            run.over(baseline),
            unit="×",
            baseline=label,
            verdict=_other_times(name),
        )
        for baseline, label, printed in baselines
        for name, run in methods.items()
    ]


def _on_quick_stages(vllm: Run, methods: dict[str, Run]) -> list[Row]:
    """Over vLLM's pipeline with stages as quick as its own, where SpecPipe's are its slow ones."""
    return [
        compared(
            "Fig. 11",
            f"speed-up, {name}, {QUICK} (24.0 with 64 rows), TBT {run.tbt} ms",
            (2.50, 3.32),
            run.over(vllm),
            unit="×",
            baseline=VLLM,
            verdict=OTHER_TIMES,
        )
        for name, run in methods.items()
    ]


def figure_13() -> Experiment:
    slow, quick = two_servers(papers_pipeline()), two_servers(vllm_pipeline())
    pp, vllm, specinfer, specpipe, ours, ours_quick = cells = [
        _single(Root(), slow),
        _single(Root(), quick),
        _single(StaticTree(), slow),
        _single(SPECPIPE, slow),
        _single(OURS, slow),
        _single(OURS, quick),
    ]

    def rows(runs: Runs) -> Sequence[Row]:
        plain_ms, vllm_ms = runs[pp].tbt.value, runs[vllm].tbt.value
        return [
            *_speed_ups(
                "Fig. 13",
                {"`level` cut before": runs[specpipe], "`best_first`": runs[ours]},
                (
                    runs[pp],
                    f"PP over two servers, {plain_ms:.1f} ms (no time printed)",
                    (3.89, 5.23),
                ),
                (
                    runs[vllm],
                    f"vLLM's pipeline over two servers, {vllm_ms:.1f} ms (ASSUMED)",
                    (2.38, 3.16),
                ),
                (runs[specinfer], "SpecInfer (`static_tree`)", (2.08, 2.37)),
            ),
            compared(
                "Fig. 13",
                "speed-up, `best_first`, stages as quick as vLLM's",
                (2.38, 3.16),
                runs[ours_quick].over(runs[vllm]),
                unit="×",
                baseline=f"vLLM's pipeline over two servers, {vllm_ms:.1f} ms (ASSUMED)",
                verdict=OTHER_TIMES,
            ),
        ]

    return Experiment("specpipe_13", PAPER, ("Fig. 13",), cells, rows)
