"""Tables of what `benchmarks.papers.demo_pair` measured, of those parts that are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks.papers.intervals import Interval
from benchmarks.papers.stored import MEASURED, source
from benchmarks.papers.tables import (
    AHEAD,
    ALIKE,
    BEHIND,
    NO_NUMBER,
    PLOT_ONLY,
    Row,
    StoredTable,
    claimed,
    compared,
)
from tools.docs.stored_results import result, stored_names

# What SpecPipe prints of sampling, in percent; of SpecInfer the first.
COST = {"static_tree": 2.54, "level cut before": 4.39}
CHAINS = {3: (2.64, 2.80), 5: (3.03, 3.32), 7: (3.20, 3.57)}
EAGLE3 = "EAGLE3 in vLLM, 70B to 8B; another model"


def sampled(name: str, paper: str, figure: str, costs: Mapping[str, float]) -> StoredTable:
    """Steps per token, sampled over greedy, by method."""
    return StoredTable(
        f"{paper.lower()}_pair",
        paper,
        MEASURED,
        f"{paper} {figure}, steps of the demo pair: temperature .6, top-p .9, top-k 80, 5 seeds",
        (figure,),
        [_sampled_row(figure, row, costs.get(row["method"])) for row in result(name)["rows"]],
        (source(name),),
    )


def _sampled_row(figure: str, row: Mapping[str, Any], cost: float | None) -> Row:
    ratio = _interval(row)
    percent = Interval(*(100 * (each - 1) for each in (ratio.value, ratio.low, ratio.high)))
    if cost is None:
        ours = "best_first" in row["method"]
        theirs, verdict = "not in the paper" if ours else f"{PLOT_ONLY}; small loss", NO_NUMBER
    else:
        theirs = f"+{cost} %"
        verdict = BEHIND if percent.low > cost else AHEAD if percent.high < cost else ALIKE
    return Row(
        figure,
        f"steps per token, sampled over greedy, `{row['method']}`, {row['stages']} stages",
        theirs,
        f"{percent.value:+.0f} % [{percent.low:+.0f}, {percent.high:+.0f}]",
        verdict,
        f"{row['greedy_tokens_per_step']:.2f} and {row['sampled_tokens_per_step']:.2f} tokens per "
        f"step; {row['tokens']} tokens",
        percent,
    )


def chains(name: str) -> StoredTable:
    """Tokens per call with drafts in fewer bits, and with longer chains."""
    rows = result(name)["rows"]
    plain = {row["chain"]: _interval(row) for row in rows if row["draft"] == "bfloat16"}
    made = [
        claimed(
            "Table 2",
            f"tokens per call, chain of 3, draft in {row['draft']} beside bfloat16",
            "FP8: 0 to -.7 %; INT4: +.3 to -1.1 %",
            f"{_interval(row)} beside {plain[3]}",
            "not told apart" if _interval(row).high >= plain[3].low else "behind",
            f"another model; {row['tokens']} tokens",
        )
        for row in rows
        if row["draft"] != "bfloat16"
    ]
    made += [
        compared(
            "Table 1",
            f"tokens per call, chain of {length}, demo draft in bfloat16",
            CHAINS[length],
            rate,
            baseline=EAGLE3,
        )
        for length, rate in plain.items()
    ]
    title = "Meta Table 2 and Table 1, the demo pair, equal texts for all formats of the draft"
    return StoredTable(
        "meta_pair", "Meta", MEASURED, title, ("Table 2", "Table 1"), made, (source(name),)
    )


def _interval(row: Mapping[str, Any]) -> Interval:
    return Interval(*(row[end] for end in ("value", "low", "high")))


# By the name of the stored result, and the name of its table.
TABLES: Mapping[str, tuple[str, Callable[[str], StoredTable]]] = {
    "papers_sampled_8": (
        "specpipe_pair",
        partial(sampled, paper="SpecPipe", figure="Fig. 15", costs=COST),
    ),
    "papers_sampled_14": (
        "pipedec_pair",
        partial(sampled, paper="PipeDec", figure="Fig. 7", costs={}),
    ),
    "papers_chains": ("meta_pair", chains),
}


def pair_tables() -> list[StoredTable]:
    """Those whose results are stored."""
    return [make(name) for name, (_, make) in TABLES.items() if name in stored_names()]
