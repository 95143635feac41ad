"""Tables of docs/benchmarks.md, docs/gpus.md and docs/peers.md, from the stored results."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from statistics import fmean
from typing import Any

from benchmarks.pages.stored_results import (
    Column,
    columns,
    command_of,
    result,
    row,
    source,
    with_range,
)
from tools.docs.markdown import table

TOKENS = ("tokens per step", "{tokens_per_step:.3f}")
HITS = ("hit rate", "{hit_rate:.2f}")
OVERRUNS = ("over-runs per step", "{overruns_per_step:.3f}")
# Of a data set, where all of them together have a row of their own.
ALL, MEAN = "all", "**mean**"
Row = Mapping[str, Any]


def plain(name: str, *listed: Column) -> str:
    """A table of one stored result with the command under it."""
    stored = result(name)
    return columns(listed, stored["rows"]) + command_of(stored)


def time_between_tokens(name: str) -> str:
    """The table of `pipeline.tbt`: time between tokens by data set and method."""
    stored = result(name)
    methods = list(dict.fromkeys(each["method"] for each in stored["rows"]))
    lines = []
    for data_set in dict.fromkeys(each["data_set"] for each in stored["rows"]):
        root, *others = [row(stored, data_set=data_set, method=method) for method in methods]
        cells = [f"{each['tbt_ms']:.1f} ({each['speed_up']:.2f}×)" for each in others]
        lines.append([MEAN if data_set == ALL else data_set, f"{root['tbt_ms']:.1f}", *cells])
    means = [each for each in stored["rows"] if each["data_set"] == ALL]
    for heading, cell in (TOKENS, HITS, OVERRUNS):
        lines.append([heading, *(cell.format_map(each) for each in means)])
    headings = ["TBT, ms", *(f"`{method}`" for method in methods)]
    return table(headings, lines) + command_of(stored)


def predictions() -> str:
    """`pipeline.plan_check`: time between tokens as predicted and measured, and their ratios."""
    stored = result("plan_check")
    keys = dict.fromkeys((each["stages"], each["policy"]) for each in stored["rows"])
    sets = list(dict.fromkeys(each["data_set"] for each in stored["rows"]))
    lines = []
    for stages, policy in keys:
        of = {name: row(stored, stages=stages, policy=policy, data_set=name) for name in sets}
        whole = of.pop(ALL)
        times = (f"{whole[name]:.1f}" for name in ("predicted_ms", "measured_ms"))
        ratios = (f"{each['ratio']:.2f}" for each in of.values())
        lines.append([str(stages), f"`{policy}`", *times, *ratios])
    headings = ["stages", "policy", "predicted, ms", "measured, ms", *(x for x in sets if x != ALL)]
    return table(headings, lines) + command_of(stored)


def sizes_of_trees() -> str:
    """The table of `pipeline.methods`: policies by width, with 16 children."""
    stored = result("methods")
    widths = (4, 8, 16, 32, 64)
    cells: dict[str, dict[int, str]] = {}
    for each in stored["rows"]:
        if each["policy"] in ("root", "static_tree") or each["children"] == 16:
            shown = f"{each['tokens_per_step']:.3f} ({each['hit_rate']:.2f})"
            cells.setdefault(each["policy"], {})[each["width"]] = shown
    lines = [
        [policy, *(found.get(width, "") for width in widths)]
        if len(found) > 1
        else [f"{policy}: {next(iter(found.values()))}", *[""] * len(widths)]
        for policy, found in cells.items()
    ]
    headings = ["policy", *(f"width {width}" for width in widths)]
    return table(headings, lines) + command_of(stored)


def many_requests() -> str:
    """`load.throughput`: every method by the number of requests, as multiples of `root`."""
    stored = result("load")
    counts = sorted({each["requests"] for each in stored["rows"]})
    methods = list(dict.fromkeys(each["method"] for each in stored["rows"]))
    lines = []
    for method in methods:
        of = [row(stored, method=method, requests=count) for count in counts]
        shown = "tokens_per_s" if method == "root" else "speed_up"
        name = "`root`, tokens/s" if method == "root" else f"`{method}`"
        lines.append([name, *(f"{each[shown]:.{1 + (shown == 'speed_up')}f}" for each in of)])
    return table(["requests", *map(str, counts)], lines) + command_of(stored)


def sample_of_cells() -> str:
    """`pipeline.frontier`: the default beside the best fixed policy, by requests."""
    stored = result("frontier")
    lines = []
    for requests in sorted({each["requests"] for each in stored["rows"]}):
        of = [each for each in stored["rows"] if each["requests"] == requests]
        found = ([each[f"over_{other}"] for each in of] for other in ("best", "root"))
        ratios = (f"{value:.2f}" for over in found for value in (fmean(over), min(over), max(over)))
        lines.append([str(requests), str(len(of)), *ratios])
    over = ("over the best fixed policy", "over `root`")
    headings = [heading for each in over for heading in (each, "least", "most")]
    return table(["requests", "cells", *headings], lines) + command_of(stored)


def accuracy() -> str:
    """`drafts.accuracy_curves` of both recorded pairs."""
    found = {"Qwen2.5-Coder 0.5B before 1.5B": "curves_real", "the demo pair": "curves"}
    ranks = (1, 2, 4, 8, 16)
    lines = [
        [
            f"{pair}, {each['data_set']}",
            *(f"{each[f'top_{k}']:.3f}" for k in ranks),
            *(f"{each[name]:.2f}" for name in ("confidence", "spread")),
        ]
        for pair, name in found.items()
        for each in result(name)["rows"]
    ]
    headings = ["pair, prompts", *(f"top-{k}" for k in ranks), "mean confidence", "spread"]
    return table(headings, lines) + command_of(*map(result, found.values()))


def faults(name: str) -> str:
    """`faults.chaos`: seconds from a fault to a complete cluster whose requests make progress."""
    listed = (
        ("fault", "{fault}"),
        ("times", "{times}"),
        ("median s", "{median_s:.2f}"),
        ("90th percentile s", "{p90_s:.2f}"),
        ("worst s", "{worst_s:.2f}"),
    )
    stored = result(name)
    return f"{columns(listed, stored['rows'])}\n{survived(stored)}\n{command_of(stored)}"


def survived(stored: Row) -> str:
    return (
        f"{stored['requests_finished']} requests: {stored['texts_differ']} texts differ, "
        f"{stored['requests_lost']} lost, {stored['tokens_lost']} tokens lost; left behind: "
        f"{sum(map(len, stored['left_behind'].values()))}."
    )


def faults_in_short(name: str) -> str:
    """The same as a sentence, without the kinds."""
    stored = result(name)
    every = row(stored, fault=ALL)
    return (
        f"{every['times']} faults, {every['median_s']:.1f} s in the median, "
        f"{every['worst_s']:.1f} at worst. {survived(stored)}\n" + command_of(stored)
    )


def met(figure: float, budget: float) -> str:
    return "met" if figure <= budget else "missed"


def measured() -> str:
    """Figures that are no table's, beside what to compare them with."""
    controller, memory, startup = result("controller"), result("memory"), result("startup")
    hop = row(controller, name="hop: complete -> ready elsewhere")["value"]
    ping = row(controller, name="Redis PING round trip")["value"]
    four = row(startup, what="generate, 4 stages")["first_s"]
    imports = row(startup, what="imports")["first_s"]
    drawn = row(result("foresight"), sampling="temperature 1")
    own, resident = (
        max(each[name] for each in memory["rows"]) for name in ("uss_beyond", "rss_beyond")
    )
    lines = [
        (
            "controller: from one rank's report to another's start",
            f"{hop:.0f} µs",
            f"Redis PING {ping:.0f} µs, budget {2 * ping:.0f} µs, {met(hop, 2 * ping)}",
            "controller",
        ),
        (
            "from the command to the first token, 4 stages, demo pair",
            f"{four:.1f} s",
            f"torch, Transformers and a model's class, of which ranks import less, {imports:.1f} s",
            "startup",
        ),
        (
            "memory of a rank beyond weights and KV cache: its own, and with what ranks share",
            f"{own:.0f} and {resident:.0f} MiB",
            f"budget of the latter 300 MiB, {met(resident, 300)}",
            "memory",
        ),
        (
            "a token drawn at temperature 1 is the draft's first, ranked with the shared noise",
            f"{drawn['top_1']:.2f}",
            f"{drawn['plain_top_1']:.2f} without it",
            "foresight",
        ),
    ]
    rows = [[*figure, source(name)] for *figure, name in lines]
    return table(["measured", "figure", "beside", "from `benchmarks/results/`"], rows)


def engines(name: str) -> str:
    """A table of `peers.compare_engines`: every engine on one machine."""
    stored = result(name)
    rows: list[dict[str, Any]] = [
        {
            key: with_range(value) if isinstance(value, dict) else value
            for key, value in each.items()
        }
        for each in stored["rows"]
    ]
    listed = [
        ("engine", "{engine}"),
        ("load s", "{load_s}"),
        ("TTFT ms", "{ttft_ms}"),
        ("TBT ms", "{tbt_ms}"),
        ("tokens/s", "{tokens_per_s}"),
    ]
    if stored["rows"][0].get("kind"):
        listed = [("prompts", "{kind}"), *listed, ("memory MiB", "{memory_mib}")]
    else:
        listed.append(("× HF", "{times_hugging_face}"))
    listed.append(("equal", "{equal_answers} of {answers}"))
    return columns(listed, rows) + command_of(stored)


def race(name: str) -> str:
    """A table of `peers.links`: milliseconds between tokens by delay and engine."""
    stored = result(name)
    names = list(dict.fromkeys(each["engine"] for each in stored["rows"]))
    names.sort(key=lambda engine: engine.startswith("pipespec"))
    lines = [
        [
            f"{delay:g} ms",
            *(with_range(row(stored, delay_ms=delay, engine=engine)["tbt_ms"]) for engine in names),
        ]
        for delay in sorted({each["delay_ms"] for each in stored["rows"]})
    ]
    headings = [re.sub(r"^pipespec (\w+)", r"pipespec, `\1`", engine) for engine in names]
    return table(["one way", *headings], lines) + command_of(stored)


# Races beside that of one request over even links, and what is other there.
OTHER_RACES = {
    "links_smollm2_hybrid": "SmolLM2 as above, with `proposer=hybrid`",
    "links_8_stages": "8 stages",
    "links_temperature": "temperature .7",
    "links_8_requests": "8 requests at a time",
    "links_32_requests": "32 requests at a time",
    "links_slow_link": "20 ms between the second and third stage",
    "links_slow_draft": "20 ms to and from the head and its draft",
    "links_slow_stage": "the second stage has .3 of a processor",
}


def other_races() -> str:
    """A table of races of pipespec alone, a line for each of their delays."""
    names = "pipespec root", "pipespec level", "pipespec"
    lines = []
    for name, what in OTHER_RACES.items():
        stored = result(name)
        for delay in sorted({each["delay_ms"] for each in stored["rows"]}):
            of = [row(stored, delay_ms=delay, engine=engine) for engine in names]
            equal = ", ".join(f"{each['equal_answers']} of {each['answers']}" for each in of)
            times = [with_range(each["tbt_ms"]) for each in of]
            lines.append([what, f"{delay:g} ms", *times, equal])
    headings = ["race", "one way", "`root`", "`level`", "default", "equal texts"]
    return table(headings, lines) + command_of(*map(result, OTHER_RACES))


BLOCKS: Mapping[str, Callable[[], str]] = {
    **{name: partial(engines, name) for name in ("peers_h200", "peers_real")},
    **{name: partial(race, name) for name in ("links", "links_smollm2")},
    "links_other": other_races,
    "acceptance": partial(
        plain,
        "lossy",
        ("policy", "`{policy}`"),
        ("sampling", "{sampling}"),
        ("acceptance", "{acceptance}"),
        ("tokens per step", "{tokens_per_step:.2f}"),
        HITS,
        ("agreement", "{agreement:.2f}"),
        ("loss per token", "{loss:.3f}"),
    ),
    "plan_check": predictions,
    "methods": sizes_of_trees,
    "load": many_requests,
    "frontier": sample_of_cells,
    "accuracy": accuracy,
    "measured": measured,
    "tbt": partial(time_between_tokens, "tbt"),
    "chaos": partial(faults, "chaos"),
    "chaos_delayed": partial(faults_in_short, "chaos_delayed"),
}
