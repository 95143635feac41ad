"""Tables of docs/benchmarks.md and docs/peers.md, from the stored results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from tools.docs.stored_results import Column, columns, command_of, result, row, table, with_range

# Between tokens of vLLM's pipeline on the GPUs of `rtx3090_8`: SpecPipe, Fig. 11, HumanEval-X.
VLLM_MS = 181.41
TBT = ("TBT, ms", "{tbt_ms:.1f}")
OVER_ROOT = ("over `root`", "{speed_up:.2f}")
OVER_VLLM = ("over vLLM's 181.4 ms", "{over_vllm:.2f}×")
TOKENS = ("tokens per step", "{tokens_per_step:.3f}")
HITS = ("hit rate", "{hit_rate:.2f}")
OVERRUNS = ("over-runs per step", "{overruns_per_step:.3f}")
# Of a data set, where all of them together have a row of their own.
MEAN = "**mean**"
Rows = Callable[[Mapping[str, Any]], Iterable[Mapping[str, Any]]]


def rows_of(stored: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of a result, each with its gain over vLLM's pipeline."""
    for each in stored["rows"]:
        yield each | {"over_vllm": VLLM_MS / each["tbt_ms"]}


def plain(name: str, rows: Rows, *listed: Column) -> str:
    """A table of one stored result with the command under it."""
    stored = result(name)
    return columns(listed, rows(stored)) + command_of(stored)


def time_between_tokens(name: str, *, specpipes_gpus: bool = True) -> str:
    """The tables of `pipeline.tbt`: time between tokens by data set and method."""
    stored = result(name)
    methods = list(dict.fromkeys(each["method"] for each in stored["rows"]))
    lines = []
    for data_set in dict.fromkeys(each["data_set"] for each in stored["rows"]):
        root, *others = [row(stored, data_set=data_set, method=method) for method in methods]
        cells = [f"{each['tbt_ms']:.1f} ({each['speed_up']:.2f}×)" for each in others]
        lines.append([MEAN if data_set == "all" else data_set, f"{root['tbt_ms']:.1f}", *cells])
    means = [each for each in rows_of(stored) if each["data_set"] == "all"]
    if specpipes_gpus:
        heading, cell = OVER_VLLM
        lines.append([heading, *(cell.format_map(each) for each in means)])

    def listed(cell: str) -> str:
        return ", ".join(f"`{each['method']}` {cell.format_map(each)}" for each in means)

    return (
        table(["TBT, ms", *(f"`{method}`" for method in methods)], lines)
        + f"\nTokens per step: {listed(TOKENS[1])}; hit rates {listed(HITS[1])}; "
        + f"over-runs per step {listed(OVERRUNS[1])}.\n"
        + command_of(stored)
    )


def beside_root(stored: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of `best_first` by data set, each with that of `root` as `plain`."""
    rows = [
        each | {"plain": row(stored, method="root", data_set=each["data_set"])}
        for each in rows_of(stored)
        if each["method"] == "best_first"
    ]
    rows[-1]["data_set"] = MEAN
    return rows


def sizes_of_trees() -> str:
    """The table of `pipeline.methods`: policies by width and children."""
    stored = result("methods")
    children = (2, 4, 8, 16)
    cells: dict[tuple[str, int], dict[int, str]] = {}
    for each in stored["rows"]:
        # Policies of one size stand in the first column.
        of_one_size = each["policy"] in ("root", "static_tree")
        found = cells.setdefault((each["policy"], each["width"]), {})
        count = children[0] if of_one_size else each["children"]
        found[count] = f"{each['tokens_per_step']:.3f} ({each['hit_rate']:.2f})"
    lines = []
    for policy in ("root", "static_tree", "level", "level, cut before", "best_first"):
        name, comma, how = policy.partition(",")
        lines += [
            [f"`{name}`{comma}{how}", str(width), *(found.get(count, "") for count in children)]
            for (of, width), found in cells.items()
            if of == policy
        ]
    headings = ["policy", "width", *(f"{count} children" for count in children)]
    return table(headings, lines) + command_of(stored)


def proposers() -> str:
    """The table of `pipeline.methods` with every proposer of the demo target."""
    stored = result("sources")
    names = {
        "demo": "the demo draft",
        "parallel": "the demo draft made parallel (`demo/draft_pard`)",
        "suffix": "`proposer=suffix`",
        "hybrid": "`proposer=hybrid` with the demo draft",
        "parallel_hybrid": "`proposer=hybrid` with the parallel one",
    }
    lines = []
    for proposer, name in names.items():
        found = [
            row(stored, policy="best_first", source=proposer, width=width, rounds=rounds)
            for width in (16, 64)
            for rounds in (1, 3)
        ]
        cells = [f"{each['tokens_per_step']:.3f} ({each['hit_rate']:.2f})" for each in found]
        lines.append([name, *cells])
    headings = ["proposer", "width 16, one round", "three rounds", "width 64, one round"]
    return table([*headings, "three rounds"], lines) + command_of(stored)


def many_requests() -> str:
    """`load.throughput`: plain decoding and `best_first` by the number of requests."""
    parts = [
        result(name)
        for name in ("load_emulated", "load_emulated_16", "load_emulated_many", "load_emulated_128")
    ]
    # What was measured again later replaces what was before.
    found = {
        (each["requests"], each["method"]): each for stored in parts for each in stored["rows"]
    }
    rows = []
    for (requests, method), each in found.items():
        if method == "best_first":
            root = found[requests, "root"]
            worst = each["worst_request_tbt_ms"] / root["worst_request_tbt_ms"]
            rows.append(each | {"plain": root, "worst": worst})
    listed = [
        ("requests", "{requests}"),
        ("`root`, tokens/s", "{plain[emulated_tokens_per_s]:.1f}"),
        ("`best_first`, tokens/s", "{emulated_tokens_per_s:.1f}"),
        ("speed-up", "{emulated_speed_up:.2f}"),
        ("simulated", "{speed_up:.2f}"),
        ("TBT `root`, ms", "{plain[tbt_ms]:.0f}"),
        ("TBT, ms", "{tbt_ms:.0f}"),
        ("p99 `root`", "{plain[p99_tbt_ms]:.0f}"),
        ("p99", "{p99_tbt_ms:.0f}"),
        ("worst", "{worst:.2f}"),
        ("tokens counted", "{emulated_tokens}"),
        OVERRUNS,
    ]
    return columns(listed, rows) + "".join(map(command_of, parts))


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
        ("× HF", "{times_hugging_face}"),
        ("equal", "{equal_answers} of {answers}"),
    ]
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
    headings = [engine.replace("pipespec root", "pipespec, `root`") for engine in names]
    return table(["one way", *headings], lines) + command_of(stored)


BLOCKS: Mapping[str, Callable[[], str]] = {
    **{name: partial(engines, name) for name in ("peers", "peers_bfloat16", "peers_h200")},
    "links": partial(race, "links"),
    "sampled": partial(
        plain,
        "sampled",
        rows_of,
        ("", "{verify}"),
        ("method", "`{method}`"),
        TBT,
        ("least and most", "{least_ms:.1f} to {most_ms:.1f}"),
        *(OVER_ROOT, OVER_VLLM, TOKENS, HITS, OVERRUNS),
    ),
    "methods": sizes_of_trees,
    "proposers": proposers,
    "load_emulated": many_requests,
    **{
        name: partial(
            plain,
            name,
            rows_of,
            ("method", "{method}"),
            *(TBT, OVER_ROOT, OVER_VLLM, TOKENS, HITS, OVERRUNS),
        )
        for name in ("cascade", "cascade_demo")
    },
    "tbt_hybrid": partial(
        plain,
        "tbt_hybrid",
        beside_root,
        ("TBT, ms", "{data_set}"),
        ("`root`", "{plain[tbt_ms]:.1f}"),
        ("`best_first`", "{tbt_ms:.1f} ({speed_up:.2f}×)"),
        *(OVER_VLLM, TOKENS, HITS, OVERRUNS),
    ),
    **{
        name: partial(time_between_tokens, name)
        for name in ("tbt", "tbt_synthetic_1b", "tbt_synthetic_8b", "tbt_vllm_stages")
    },
    **{
        name: partial(time_between_tokens, name, specpipes_gpus=False)
        for name in ("tbt_14", "tbt_21")
    },
}
