"""SpecPipe-DB, many requests at once: Figures 16 and 17, simulated under their conditions.

As many requests as stated are there all the time. The baseline is `root`, batched plain decoding,
with as many requests, on stages as quick as vLLM's and on SpecPipe's own. How wide the tree of
each request is the paper does not say; here all of them share 64 rows (ASSUMED).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.papers.cells import Cell, Run, Runs
from benchmarks.papers.machines import papers_pipeline, vllm_pipeline
from benchmarks.papers.specpipe import CHILDREN, OURS, PAPER, QUICK, SLOW, WIDTH
from benchmarks.papers.tables import (
    OTHER_TIMES,
    PLOT_ONLY,
    Experiment,
    Grid,
    Row,
    claimed,
    compared,
)
from pipespec.head.policies.level import BEFORE, Level
from pipespec.head.policies.root import Root

REQUESTS = (1, 2, 4, 8, 16, 32)
TOKENS = 4000  # of all requests
PERCENTILES = (50, 90, 99)
SPECPIPE_DB = Level(WIDTH, CHILDREN, cut=BEFORE, shared=True)
VLLM, PP = "vLLM's pipeline", "SpecPipe's PP"
# The methods, and their labels.
METHODS = {
    f"`level` cut before, {SLOW}": (SPECPIPE_DB, papers_pipeline),
    f"`best_first`, {SLOW}": (OURS, papers_pipeline),
    f"`best_first`, {QUICK}": (OURS, vllm_pipeline),
}
BASELINES = {VLLM: (Root(), vllm_pipeline), PP: (Root(), papers_pipeline)}


def cells() -> dict[str, dict[int, Cell]]:
    """Those of both figures, by method or baseline and by requests."""
    return {
        name: {b: Cell(policy, machine(), tokens=TOKENS, requests=b) for b in REQUESTS}
        for name, (policy, machine) in (METHODS | BASELINES).items()
    }


def _listed(of_method: dict[str, dict[int, Cell]]) -> list[Cell]:
    return [cell for found in of_method.values() for cell in found.values()]


def figure_16() -> Experiment:
    of_method = cells()

    def rows(runs: Runs) -> Sequence[Row]:
        made = []
        for name in METHODS:
            gains = [runs[of_method[name][b]].over(runs[of_method[VLLM][b]]) for b in REQUESTS[1:]]
            ordered = sorted(gains, key=lambda gain: gain.value)
            ends = {"least": (ordered[0], 1.64), "most": (ordered[-1], 2.08)}
            made += [
                compared(
                    "Fig. 16",
                    f"throughput, {which} of 2 to 32 requests, {name}",
                    printed,
                    gain,
                    unit="×",
                    baseline=f"{VLLM} (`root`, {QUICK}) with as many requests",
                    verdict=OTHER_TIMES if name.endswith(QUICK) else None,
                )
                for which, (gain, printed) in ends.items()
            ]
        return made

    def grid(runs: Runs) -> Grid:
        return Grid(
            "specpipe_16",
            "SpecPipe Fig. 16: tokens per second of all requests [95 %], and over vLLM's pipeline "
            "and SpecPipe's PP with as many requests",
            [_throughputs(runs, of_method, b) for b in REQUESTS],
        )

    return Experiment("specpipe_16", PAPER, ("Fig. 16",), _listed(of_method), rows, grid)


def _throughputs(
    runs: Runs, of_method: dict[str, dict[int, Cell]], requests: int
) -> dict[str, Any]:
    of = {name: runs[found[requests]] for name, found in of_method.items()}
    found: dict[str, Any] = {"requests": requests}
    for name in BASELINES:
        found[name] = f"{of[name].tokens_per_second.value:.1f}"
    for name in METHODS:
        over = " and ".join(f"{of[name].over(of[plain]).value:.2f}×" for plain in BASELINES)
        found[name] = f"{of[name].tokens_per_second} ({over})"
    return found


def figure_17() -> Experiment:
    of_method = cells()

    def rows(runs: Runs) -> Sequence[Row]:
        return [
            _tail(percent, name, of_method, runs) for percent in PERCENTILES for name in METHODS
        ]

    def grid(runs: Runs) -> Grid:
        return Grid(
            "specpipe_17",
            "SpecPipe Fig. 17: percentiles of the time between tokens of a request, ms [95 %]",
            [
                {"percentile": f"p{percent}", "requests": b}
                | {name: str(runs[of_method[name][b]].percentile(percent)) for name in of_method}
                for percent in PERCENTILES
                for b in REQUESTS
            ],
        )

    return Experiment("specpipe_17", PAPER, ("Fig. 17",), _listed(of_method), rows, grid)


def _tail(percent: int, name: str, of_method: dict[str, dict[int, Cell]], runs: Runs) -> Row:
    """Whether a percentile of a method stays below that of vLLM's pipeline with any requests."""
    at: partial[float] = partial(_value, percent)
    ours, plain = ([at(runs[of_method[each][b]]) for b in REQUESTS] for each in (name, VLLM))
    below = all(a < b for a, b in zip(ours, plain, strict=True))
    return claimed(
        "Fig. 17",
        f"p{percent} of TBT, 1 to 32 requests, {name}",
        f"{PLOT_ONLY}; DB stays below vLLM",
        f"{min(ours):.0f} to {max(ours):.0f} ms beside {min(plain):.0f} to {max(plain):.0f}",
        OTHER_TIMES if below and name.endswith(QUICK) else below,
        f"{VLLM} (`root`, {QUICK}); {PP}, not in the figure, has 302 ms at every percentile here",
    )


def _value(percent: int, run: Run) -> float:
    return run.percentile(percent).value
