"""SpecPipe: Figures 10, 11, 13, 16 and 17, simulated under their conditions.

`level` that cuts before the verdict is SpecPipe's method, `static_tree` is SpecInfer over the same
pipeline, `root` the plain one, with stages as quick as vLLM's or SpecPipe's own. In Figures 16 and
17 as many requests as stated are there all the time; how wide the tree of each is SpecPipe does not
say, here all of them share 64 rows (ASSUMED).
"""

from __future__ import annotations

from collections.abc import Sequence
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
    cross,
    ours_alone,
    time_and_hits,
)
from pipespec.head.policies.best_first import BestFirst
from pipespec.head.policies.level import BEFORE, Level
from pipespec.head.policies.root import Root
from pipespec.head.policies.static_tree import StaticTree

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
SPECINFER = "SpecInfer (`static_tree`), draft of 17 ms"
SLOW, QUICK = "stages of 37.8 ms", "stages of 22.7 ms"
NOT_THERE = "not in the paper"
# Fig. 11, HumanEval-X, and the range of all data sets over vLLM's pipeline.
SPECPIPE_MS, OVER_VLLM = 54.67, (2.50, 3.32)

REQUESTS = (1, 2, 4, 8, 16, 32)
CROWD_TOKENS = 4000  # of all requests
PERCENTILES = (50, 90, 99)
SPECPIPE_DB = Level(WIDTH, CHILDREN, cut=BEFORE, shared=True)
PLAIN_VLLM, PLAIN_PP = "vLLM's pipeline", "SpecPipe's PP"
CROWD_METHODS = {
    f"`level` cut before, {SLOW}": (SPECPIPE_DB, papers_pipeline),
    f"`best_first`, {SLOW}": (OURS, papers_pipeline),
    f"`best_first`, {QUICK}": (OURS, vllm_pipeline),
}
CROWD_BASELINES = {PLAIN_VLLM: (Root(), vllm_pipeline), PLAIN_PP: (Root(), papers_pipeline)}


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

    def rows(runs: Runs) -> Sequence[Row]:
        found = {
            (w, int(name.split()[0])): runs[cell]
            for name, of in by_size.items()
            if name != OURS_WIDE
            for w, cell in of.items()
        }
        tbt = {size: run.tbt.value for size, run in found.items()}
        first, *_, last = by_width = [tbt[w, CHILDREN] for w in WIDTHS]
        best = WIDTHS[by_width.index(min(by_width))]
        two, four, most = (found[WIDTH, k] for k in (2, 4, 32))
        over_best = tbt[WIDTH, CHILDREN] / min(tbt.values())
        claims = (
            (
                "TBT by width, 16 children, `level` cut before",
                f"{PLOT_ONLY}; falls, then rises",
                f"{first:.0f} ms at width 1, {min(by_width):.0f} at {best}, {last:.0f} at 128",
                first > min(by_width) < last,
            ),
            (
                "2 children beside 4: TBT at width 64",
                f"{PLOT_ONLY}; k = 2 sharply worse",
                f"{four.over(two)}×",
                four.over(two).low > 1.1,
            ),
            (
                "4 children beside 32: TBT at width 64",
                f"{PLOT_ONLY}; k ≥ 4 alike",
                f"{most.over(four)}×",
                most.over(four).low < 1.05,
            ),
            (
                "width 64 and 16 children beside the best of the grid",
                "64 and 16 chosen",
                f"{over_best:.2f} times the best TBT",
                over_best < 1.05,
            ),
        )
        at_64 = "TBT at width 64 and 16 children, `level` cut before, ms"
        ours = runs[by_size[OURS_WIDE][WIDTH]].tbt
        return [
            *(claimed("Fig. 10", *claim, SLOW) for claim in claims),
            ours_alone("Fig. 10", at_64, PLOT_ONLY, found[WIDTH, CHILDREN].tbt, SLOW),
            ours_alone("Fig. 10", "the same, `best_first`, ms", NOT_THERE, ours, SLOW),
        ]

    title = "SpecPipe Fig. 10: TBT in ms [95 %] (hit rate), `level` cut before"
    grid = cross("specpipe_10", title, "width", by_size, time_and_hits)
    return Experiment("specpipe_10", PAPER, ("Fig. 10",), by_size, rows, grid)


# --- Figures 11 and 13: time between tokens -----------------------------------------------------


def figure_11() -> Experiment:
    slow, quick = papers_pipeline(), vllm_pipeline()
    fast = f"`best_first`, {FAST}"
    methods = {
        "`level` cut before": SPECPIPE,
        "`level` cut after": PIPEDEC_CUT,
        "`best_first`": OURS,
    }
    on_slow = {name: Cell(policy, slow, tokens=CLOSELY) for name, policy in methods.items()}
    on_slow[fast] = Cell(OURS, drafting(slow, FAST_DRAFT_MS), tokens=CLOSELY)
    on_quick = {
        "`level` cut before": Cell(SPECPIPE, quick, tokens=CLOSELY),
        "`best_first`": Cell(OURS, quick, tokens=MOST_CLOSELY),
        fast: Cell(OURS, drafting(quick, FAST_DRAFT_MS), tokens=MOST_CLOSELY),
    }
    plain = {
        PP: Cell(Root(), slow, tokens=CLOSELY),
        VLLM: Cell(Root(), quick, tokens=CLOSELY),
        SPECINFER: Cell(StaticTree(), slow, tokens=CLOSELY),
    }

    def rows(runs: Runs) -> Sequence[Row]:
        pp, vllm, specinfer = (runs[cell] for cell in plain.values())
        specpipe, after, ours, ours_fast = (runs[cell] for cell in on_slow.values())
        stage_ms = papers_pipeline().stages[0].ms(WIDTH)
        equation = specpipe_ms(specpipe.hit_rate.value, [stage_ms] * 8)
        beside = {
            "`level` cut after, as PipeDec": after,
            "`best_first`": ours,
            fast: ours_fast,
        }
        quicker = "a quicker baseline"
        return [
            compared("Fig. 11", "TBT, PP (`root`), ms", PP_MS, pp.tbt, SLOW, GIVEN),
            compared("Fig. 11", "TBT, PP-vLLM (`root`), ms", VLLM_MS, vllm.tbt, QUICK, GIVEN),
            compared(
                *("Fig. 11", "TBT, SpecInfer (`static_tree`), ms", 117.92),
                *(specinfer.tbt, SLOW, quicker),
            ),
            _time("TBT, SpecPipe (`level` cut before), ms", specpipe),
            Row(
                "Eq. 2",
                "the same by SpecPipe's equation with our hit rate, ms",
                f"{SPECPIPE_MS}",
                f"{equation:.1f} (hit rate {specpipe.hit_rate})",
                "behind" if equation > SPECPIPE_MS else "ahead",
                SLOW,
            ),
            *(_time(f"TBT, SpecPipe's beside {name}, ms", run) for name, run in beside.items()),
            *_speed_ups(
                "Fig. 11",
                {name: runs[cell] for name, cell in on_slow.items()},
                (pp, PP, (4.19, 5.53)),
                (vllm, VLLM, OVER_VLLM),
                (specinfer, SPECINFER, (2.09, 2.38)),
            ),
            *(
                compared(
                    "Fig. 11",
                    f"speed-up, {name}, {QUICK} (24.0 with 64 rows), TBT {runs[cell].tbt} ms",
                    OVER_VLLM,
                    runs[cell].over(vllm),
                    VLLM,
                    OTHER_TIMES,
                    unit="×",
                )
                for name, cell in on_quick.items()
            ),
        ]

    cells = {"slow": on_slow, "quick": on_quick, "plain": plain}
    return Experiment("specpipe_11", PAPER, ("Fig. 11",), cells, rows)


def _time(quantity: str, run: Run) -> Row:
    """A time beside SpecPipe's printed bar, which is HumanEval-X's. A draft that is quicker than
    the paper's is said to be."""
    verdict = OTHER_TIMES if FAST in quantity else None
    return compared("Fig. 11", quantity, SPECPIPE_MS, run.tbt, SLOW, verdict, lower_is_better=True)


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
            label,
            OTHER_TIMES if name.endswith(FAST) else None,
            unit="×",
        )
        for baseline, label, printed in baselines
        for name, run in methods.items()
    ]


def figure_13() -> Experiment:
    slow, quick = two_servers(papers_pipeline()), two_servers(vllm_pipeline())
    cells = {
        name: Cell(policy, machine, tokens=CLOSELY)
        for name, (policy, machine) in {
            "pp": (Root(), slow),
            "vllm": (Root(), quick),
            "specinfer": (StaticTree(), slow),
            "`level` cut before": (SPECPIPE, slow),
            "`best_first`": (OURS, slow),
            "quick": (OURS, quick),
        }.items()
    }

    def rows(runs: Runs) -> Sequence[Row]:
        of = {name: runs[cell] for name, cell in cells.items()}
        pp_ms, vllm_ms = of["pp"].tbt.value, of["vllm"].tbt.value
        plain = f"PP over two servers, {pp_ms:.1f} ms (no time printed)"
        vllm = f"vLLM's pipeline over two servers, {vllm_ms:.1f} ms (ASSUMED)"
        as_quick = "speed-up, `best_first`, stages as quick as vLLM's"
        over = of["quick"].over(of["vllm"])
        return [
            *_speed_ups(
                "Fig. 13",
                {name: of[name] for name in ("`level` cut before", "`best_first`")},
                (of["pp"], plain, (3.89, 5.23)),
                (of["vllm"], vllm, (2.38, 3.16)),
                (of["specinfer"], "SpecInfer (`static_tree`)", (2.08, 2.37)),
            ),
            compared("Fig. 13", as_quick, (2.38, 3.16), over, vllm, OTHER_TIMES, unit="×"),
        ]

    return Experiment("specpipe_13", PAPER, ("Fig. 13",), cells, rows)


# --- Figures 16 and 17: many requests -----------------------------------------------------------


def crowds() -> dict[str, dict[int, Cell]]:
    """The cells of both figures, by method or baseline and by requests."""
    return {
        name: {b: Cell(policy, machine(), tokens=CROWD_TOKENS, requests=b) for b in REQUESTS}
        for name, (policy, machine) in (CROWD_METHODS | CROWD_BASELINES).items()
    }


def figure_16() -> Experiment:
    cells = crowds()
    baseline = f"{PLAIN_VLLM} (`root`, {QUICK}) with as many requests"

    def rows(runs: Runs) -> Sequence[Row]:
        made = []
        for name in CROWD_METHODS:
            gains = (runs[cells[name][b]].over(runs[cells[PLAIN_VLLM][b]]) for b in REQUESTS[1:])
            least, *_, most = sorted(gains, key=lambda gain: gain.value)
            verdict = OTHER_TIMES if name.endswith(QUICK) else None
            for which, gain, printed in (("least", least, 1.64), ("most", most, 2.08)):
                quantity = f"throughput, {which} of 2 to 32 requests, {name}"
                made.append(
                    compared("Fig. 16", quantity, printed, gain, baseline, verdict, unit="×")
                )
        return made

    def throughputs(runs: Runs, requests: int) -> dict[str, Any]:
        of = {name: runs[found[requests]] for name, found in cells.items()}
        found: dict[str, Any] = {"requests": requests}
        for name in CROWD_BASELINES:
            found[name] = f"{of[name].tokens_per_second.value:.1f}"
        for name in CROWD_METHODS:
            over = " and ".join(f"{of[name].over(of[each]).value:.2f}×" for each in CROWD_BASELINES)
            found[name] = f"{of[name].tokens_per_second} ({over})"
        return found

    def grid(runs: Runs) -> Grid:
        return Grid(
            "specpipe_16",
            "SpecPipe Fig. 16: tokens per second of all requests [95 %], and over vLLM's pipeline "
            "and SpecPipe's PP with as many requests",
            [throughputs(runs, b) for b in REQUESTS],
        )

    return Experiment("specpipe_16", PAPER, ("Fig. 16",), cells, rows, grid)


def figure_17() -> Experiment:
    cells = crowds()
    baseline = (
        f"{PLAIN_VLLM} (`root`, {QUICK}); {PLAIN_PP}, not in the figure, has 302 ms at every "
        "percentile here"
    )

    def tail(percent: int, name: str, runs: Runs) -> Row:
        """Whether a percentile of a method stays below that of vLLM's pipeline."""
        ours, plain = (
            [runs[cells[each][b]].percentile(percent).value for b in REQUESTS]
            for each in (name, PLAIN_VLLM)
        )
        below = all(a < b for a, b in zip(ours, plain, strict=True))
        return claimed(
            "Fig. 17",
            f"p{percent} of TBT, 1 to 32 requests, {name}",
            f"{PLOT_ONLY}; DB stays below vLLM",
            f"{min(ours):.0f} to {max(ours):.0f} ms beside {min(plain):.0f} to {max(plain):.0f}",
            OTHER_TIMES if below and name.endswith(QUICK) else below,
            baseline,
        )

    def rows(runs: Runs) -> Sequence[Row]:
        return [tail(percent, name, runs) for percent in PERCENTILES for name in CROWD_METHODS]

    def grid(runs: Runs) -> Grid:
        return Grid(
            "specpipe_17",
            "SpecPipe Fig. 17: percentiles of the time between tokens of a request, ms [95 %]",
            [
                {"percentile": f"p{percent}", "requests": b}
                | {name: str(runs[of[b]].percentile(percent)) for name, of in cells.items()}
                for percent in PERCENTILES
                for b in REQUESTS
            ],
        )

    return Experiment("specpipe_17", PAPER, ("Fig. 17",), cells, rows, grid)


def specpipe_ms(hit_rate: float, stage_ms: Sequence[float]) -> float:
    """SpecPipe's expected time of a token, E(T) = max t_i(w) + (1 - P(w)) sum t_i(w).

    There a miss costs a whole pipeline beyond its step; in this schedule it costs that in all.
    """
    return max(stage_ms) + (1 - hit_rate) * sum(stage_ms)
