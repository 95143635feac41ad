"""Tables from the stored results of other benchmarks: what was MEASURED, COMPUTED or EMULATED.

Their numbers never share a table with simulated ones. Each table has the commands, machines,
commits and dates of its numbers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from benchmarks.common.experiment import ROOT
from benchmarks.papers.intervals import Interval
from benchmarks.papers.tables import (
    NO_NUMBER,
    PLOT_ONLY,
    Row,
    Source,
    StoredTable,
    claimed,
    compared,
)

RESULTS = ROOT / "benchmarks" / "results"
MEASURED, EMULATED, COMPUTED = "MEASURED", "EMULATED", "COMPUTED"
# What makes a result today; the stored command has the names of its own commit.
TODAY = {
    "memory": "python -m benchmarks.budgets.rank_memory",
    "hits": "python -m benchmarks.pipeline.hits --stored benchmarks/results/tbt.json",
    "two_groups": "python -m benchmarks.pipeline.two_groups",
    "tbt_synthetic_1b": "python -m benchmarks.pipeline.tbt --proposer synthetic --scale 2",
    "tbt_14": (
        "python -m benchmarks.pipeline.tbt --machine rtx3090_14 --stages 14 --proposer synthetic "
        "--scale 6 --num-prompts 6"
    ),
    "tbt_21": (
        "python -m benchmarks.pipeline.tbt --machine mixed_21 --stages 21 --proposer synthetic "
        "--scale 6 --num-prompts 4"
    ),
}
SLOWER = "% slower sampled than greedy"
PP, VLLM = "the papers' PP", "vLLM's pipeline"


def load(name: str) -> dict[str, Any]:
    """A stored result: rows, hardware, commit, date and command."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def source(name: str) -> Source:
    found = load(name)
    command = TODAY.get(name, found["command"])
    hardware = found["hardware"].replace("Intel(R) Xeon(R) Processor", "Intel Xeon")
    return Source(f"{name}.json", command, hardware, found["commit"], found["date"])


def _interval(row: dict[str, Any]) -> Interval:
    return Interval(*(row[end] for end in ("value", "low", "high")))


def _percent(ratio: Interval) -> str:
    value, low, high = (100 * (each - 1) for each in (ratio.value, ratio.low, ratio.high))
    return f"{value:+.0f} % [{low:+.0f}, {high:+.0f}]"


# --- the demo pair ------------------------------------------------------------------------------


def sampled_table(paper: str) -> StoredTable:
    """Greedy beside sampled decoding, steps of the demo pair."""
    figure, stages = {"SpecPipe": ("Fig. 15", 8), "PipeDec": ("Fig. 7", 14)}[paper]
    name = f"papers_sampled_{stages}"
    printed = {
        ("SpecPipe", "static_tree"): 2.54,  # SpecInfer's
        ("SpecPipe", "level cut before"): 4.39,
    }
    made = []
    for row in load(name)["rows"]:
        ratio = _interval(row)
        rate = printed.get((paper, row["method"]))
        if rate is None:
            theirs = f"{PLOT_ONLY}; small loss" if paper == "PipeDec" else "not in the paper"
            verdict = NO_NUMBER
        else:
            theirs = f"+{rate:.2f} %"
            cost = 1 + rate / 100
            verdict = "behind" if ratio.low > cost else "ahead" if ratio.high < cost else "alike"
        made.append(
            Row(
                figure,
                f"steps per token, `{row['method']}`, {stages} stages: {SLOWER}",
                theirs,
                _percent(ratio),
                verdict,
                f"{row['greedy_tokens_per_step']:.2f} and {row['sampled_tokens_per_step']:.2f} "
                f"tokens per step; {row['tokens']} tokens",
                ratio,
            )
        )
    return StoredTable(
        f"{paper.lower()}_sampled",
        paper,
        MEASURED,
        f"{paper} {figure}, steps of the demo pair: temperature .6, top-p .9, top-k 80, 5 seeds",
        (figure,),
        made,
        (source(name),),
    )


def meta_table() -> StoredTable:
    """Tokens per call with drafts in fewer bits, and with longer chains."""
    stored = load("papers_chains")["rows"]
    first = {row["chain"]: _interval(row) for row in stored if row["draft"] == "bfloat16"}
    made = []
    for row in stored:
        if row["chain"] != 3:
            continue
        rate = _interval(row)
        fewer = row["draft"] != "bfloat16"
        made.append(
            claimed(
                "Table 2",
                f"tokens per call, chain of 3, draft in {row['draft']}",
                "FP8: 0 to -.7 %; INT4: +.3 to -1.1 %" if fewer else "2.79 to 2.95 (BF16)",
                f"{rate} ({100 * (rate.value / first[3].value - 1):+.1f} %)"
                if fewer
                else f"{rate}",
                rate.low <= first[3].high if fewer else NO_NUMBER,
                f"another model; {row['tokens']} tokens",
            )
        )
    made += [
        compared(
            "Table 1",
            f"tokens per call, chain of {length}, demo draft in bfloat16",
            {3: (2.64, 2.80), 5: (3.03, 3.32), 7: (3.20, 3.57)}[length],
            rate,
            baseline="EAGLE3 in vLLM, 70B to 8B; another model",
        )
        for length, rate in first.items()
    ]
    return StoredTable(
        "meta_pair",
        "Meta",
        MEASURED,
        "Meta Table 2 and Table 1, the demo pair: equal texts for all formats of the draft",
        ("Table 2", "Table 1"),
        made,
        (source("papers_chains"),),
    )


# --- memory -------------------------------------------------------------------------------------


def memory_table() -> StoredTable:
    """Memory of each rank for the 70B."""
    rows = {row["rank"]: row for row in load("memory")["computed"]["rows"]}
    made = []
    for stage, printed in (("stage 1", 23.5), ("stage 2", 21.5), ("stage 8", 23.5)):
        row = rows[stage]
        # 32,768 positions are stored; the paper's budget is 81,920.
        kv = row["kv_of_context"] * 81920 / 32768
        total = row["weights"] + kv + row["kv_of_tree"]
        made += [
            Row(
                "Table 1",
                f"weights, KV of 81,920 tokens and tree, {stage} of 8, GiB",
                f"{printed} (256 MiB kernel cache included)",
                f"{total:.1f} ({row['weights']:.1f}, {kv:.2f} and {row['kv_of_tree']:.3f})",
                "no kernel cache in ours",
                "GPU 0, 1 to 6 and 7" if stage == "stage 1" else "",
            )
        ]
    tree = 1024 * rows["stage 2"]["kv_of_tree"]
    made.append(
        Row(
            "Table 1",
            "tree, MiB a stage",
            "at most 4",
            f"{tree:.0f} (a KV slot for each of 64 rows in 10 steps)",
            "behind" if tree > 4 else "ahead",
            "ours is KV of all rows in flight; the paper does not say what it counts",
        )
    )
    return StoredTable(
        "specpipe_memory",
        "SpecPipe",
        COMPUTED,
        "SpecPipe Table 1, Llama-3.1-70B in bfloat16, 8 stages, width 64",
        ("Table 1",),
        made,
        (source("memory"),),
    )


# --- emulated runs ------------------------------------------------------------------------------


def _run(name: str, method: str) -> dict[str, Any]:
    (found,) = (
        row for row in load(name)["rows"] if (row["data_set"], row["method"]) == ("all", method)
    )
    return dict(found)


def _speed_up(
    figure: str, name: str, method: str, printed: tuple[float, float], baseline: str
) -> Row:
    row = _run(name, method)
    exact = Interval(row["speed_up"], row["speed_up"], row["speed_up"])
    plain = _run(name, "root")["tbt_ms"]
    label = f"speed-up, `{method}`, TBT {row['tbt_ms']:.1f} ms"
    return compared(
        figure, label, printed, exact, unit="×", baseline=f"{baseline} (`root`, {plain:.1f} ms)"
    )


def emulated_specpipe() -> StoredTable:
    """Runs of the product on ranks held to the papers' times, without an interval."""
    over_pp, over_vllm = (4.19, 5.53), (2.50, 3.32)
    slow, quick = "tbt_synthetic_1b", "tbt_vllm_stages"
    methods = ("level", "best_first")
    made = [_speed_up("Fig. 11", slow, method, over_pp, PP) for method in methods]
    for method in methods:
        tbt = _run(slow, method)["tbt_ms"]
        gain = _run(quick, "root")["tbt_ms"] / tbt
        made.append(
            compared(
                "Fig. 11",
                f"speed-up, `{method}`, TBT {tbt:.1f} ms on stages of 37.8 ms",
                over_vllm,
                Interval(gain, gain, gain),
                unit="×",
                baseline=f"{VLLM} (`root`, {_run(quick, 'root')['tbt_ms']:.1f} ms)",
            )
        )
    made += [
        _speed_up("Fig. 11, stages of 22.7 ms", quick, method, over_vllm, VLLM)
        for method in methods
    ]
    hits = {row["method"]: row for row in load("hits")["rows"]}
    made.append(
        claimed(
            "Fig. 14",
            "hit rate of `level` beside SpecInfer's (`static_tree`), demo pair",
            f"{PLOT_ONLY}; SpecPipe's is higher",
            f"{hits['level']['hit_rate']:.2f} beside {hits['static_tree']['hit_rate']:.2f}",
            hits["level"]["hit_rate"] > hits["static_tree"]["hit_rate"],
            f"TBT {hits['level']['tbt_ms']:.0f} and {hits['static_tree']['tbt_ms']:.0f} ms",
        )
    )
    return StoredTable(
        "specpipe_emulated",
        "SpecPipe",
        EMULATED,
        "SpecPipe Fig. 11 and 14, runs of the product on emulated stages, no interval",
        ("Fig. 14",),
        made,
        (source(slow), source(quick), source("hits")),
    )


def emulated_pipedec() -> StoredTable:
    names = {14: "tbt_14", 21: "tbt_21"}
    made = [
        _speed_up("Fig. 5", names[14], method, (4.46, 7.79), "PipeDec's PP")
        for method in ("level", "best_first")
    ]
    for method in ("level", "best_first"):
        times = {stages: _run(name, method)["tbt_ms"] for stages, name in names.items()}
        gain = times[14] / times[21]
        made.append(
            claimed(
                "Fig. 5",
                f"21 stages beside 14, `{method}`",
                "gains flatten or fall; no figure",
                f"{gain:.2f}× ({times[14]:.1f} and {times[21]:.1f} ms)",
                gain < 1.05,
                "few prompts, no interval",
            )
        )
    return StoredTable(
        "pipedec_emulated",
        "PipeDec",
        EMULATED,
        "PipeDec Fig. 5, runs of the product on emulated stages, width 64, no interval",
        (),
        made,
        tuple(source(name) for name in names.values()),
    )


def emulated_swiftspec() -> StoredTable:
    rows = load("two_groups")["rows"]
    plain, *grouped = rows
    made = [
        Row(
            "Fig. 9",
            f"70B on {row['target']} A100, 7B on {row['draft']}, {row['rows']} rows",
            "other GPUs and weights",
            f"TBT {row['tbt_ms']:.1f} ms, {row['speed_up']:.2f}×",
            NO_NUMBER,
            f"no draft, 1 × 8 ({plain['tbt_ms']:.1f} ms)",
        )
        for row in grouped
    ]
    return StoredTable(
        "swiftspec_emulated",
        "SwiftSpec",
        EMULATED,
        "SwiftSpec's setting with eight A100 in bfloat16, runs of the product, no interval",
        (),
        made,
        (source("two_groups"),),
    )


def all_tables() -> Sequence[StoredTable]:
    return (
        sampled_table("SpecPipe"),
        memory_table(),
        emulated_specpipe(),
        sampled_table("PipeDec"),
        emulated_pipedec(),
        emulated_swiftspec(),
        meta_table(),
    )
