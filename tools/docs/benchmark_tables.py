"""Tables of docs/benchmarks.md and of docs/how-it-works/, from the stored results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from tools.docs.stored_results import columns, command_of, result, row, source, table

# Between tokens of vLLM's pipeline on the GPUs of `rtx3090_8`: SpecPipe, Fig. 11, HumanEval-X.
VLLM_MS = 181.41
TBT = ("TBT, ms", "{tbt_ms:.1f}")
PLAIN = ("TBT `root`, ms", "{plain[tbt_ms]:.1f}")
OVER_ROOT = ("over `root`", "{speed_up:.2f}")
OVER_VLLM = ("over vLLM's 181.4 ms", "{over_vllm:.2f}×")
TOKENS = ("tokens per step", "{tokens_per_step:.3f}")
FEW_DIGITS = ("tokens per step", "{tokens_per_step:.2f}")
HITS = ("hit rate", "{hit_rate:.2f}")
OVERRUNS = ("over-runs per step", "{overruns_per_step:.3f}")
# Of a data set, where all of them together have a row of their own.
MEAN = "**mean**"


def rows_of(stored: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of a result, each with its gain over vLLM's pipeline."""
    for each in stored["rows"]:
        yield each | {"over_vllm": VLLM_MS / each["tbt_ms"]}


def beside_root(stored: Mapping[str, Any], *same: str) -> list[dict[str, Any]]:
    """The rows of `best_first`, each with that of `root`, which is equal in `same`, as `plain`."""
    return [
        each | {"plain": row(stored, method="root", **{name: each[name] for name in same})}
        for each in rows_of(stored)
        if each["method"] == "best_first"
    ]


def time_between_tokens(name: str, *, specpipes_gpus: bool = True) -> str:
    """The tables of `pipeline.tbt`: time between tokens by data set and method."""
    stored = result(name)
    methods = list(dict.fromkeys(each["method"] for each in stored["rows"]))
    lines = []
    for data_set in dict.fromkeys(each["data_set"] for each in stored["rows"]):
        plain, *others = [row(stored, data_set=data_set, method=method) for method in methods]
        cells = [f"{each['tbt_ms']:.1f} ({each['speed_up']:.2f}×)" for each in others]
        lines.append([MEAN if data_set == "all" else data_set, f"{plain['tbt_ms']:.1f}", *cells])
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


def beside_plain(name: str) -> str:
    """A table of `pipeline.tbt` of two methods: times, tokens per step and hits by data set."""
    stored = result(name)
    rows = beside_root(stored, "data_set")
    rows[-1]["data_set"] = MEAN
    listed = [
        ("TBT, ms", "{data_set}"),
        ("`root`", "{plain[tbt_ms]:.1f}"),
        ("`best_first`", "{tbt_ms:.1f} ({speed_up:.2f}×)"),
    ]
    return columns([*listed, OVER_VLLM, TOKENS, HITS, OVERRUNS], rows) + command_of(stored)


def sampled() -> str:
    """The table of `pipeline.sampled`: greedy beside sampled decoding, by method."""
    stored = result("sampled")
    spread = ("least and most", "{least_ms:.1f} to {most_ms:.1f}")
    listed = [("", "{verify}"), ("method", "`{method}`"), TBT, spread, OVER_ROOT, OVER_VLLM]
    return columns([*listed, TOKENS, HITS, OVERRUNS], rows_of(stored)) + command_of(stored)


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


def devices_of_a_stage() -> str:
    """The table of `pipeline.device_groups`: eight devices as more or fewer stages."""
    stored = result("groups")
    listed = [
        ("stages × devices", "{stages} × {devices_of_a_stage}"),
        PLAIN,
        ("`best_first`", "{tbt_ms:.1f}"),
        OVER_ROOT,
        OVER_VLLM,
        FEW_DIGITS,
        ("predicted `root`", "{plain[predicted_ms]:.1f}"),
        ("predicted `best_first`", "{predicted_ms:.1f}"),
        OVERRUNS,
    ]
    return columns(listed, beside_root(stored, "devices_of_a_stage")) + command_of(stored)


def two_groups() -> str:
    """The table of `pipeline.two_groups`: a group for the target and one for the draft."""
    stored = result("two_groups")
    rows = []
    for each in stored["rows"]:
        plain = each["method"] == "root"
        none = plain or each["dearer_sum_us"] is None
        shown = {
            "draft": each["draft"] or "-",
            "round_shown": "-" if plain else f"{each['round_ms']:.1f}",
            "sum_shown": "-" if none else f"{each['dearer_sum_us']:.0f}",
        }
        rows.append(each | shown)
    listed = [
        ("target: stages × GPUs", "{target}"),
        ("draft: GPUs", "{draft}"),
        ("method", "`{method}`"),
        ("rows", "{rows}"),
        ("stage, ms", "{stage_ms:.1f}"),
        ("round, ms", "{round_shown}"),
        TBT,
        ("speed-up", "{speed_up:.2f}"),
        FEW_DIGITS,
        ("predicted, ms", "{predicted_ms:.1f}"),
        ("sums may take longer by, µs", "{sum_shown}"),
        OVERRUNS,
    ]
    return columns(listed, rows) + command_of(stored)


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
            plain = found[requests, "root"]
            worst = each["worst_request_tbt_ms"] / plain["worst_request_tbt_ms"]
            rows.append(each | {"plain": plain, "worst": worst})
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


def methods_with_many_requests() -> str:
    """`load.throughput`: every method with 8 and with 32 requests."""
    stored = result("load_emulated_methods")
    few, many = 8, 32
    names = {"level": "`level`, 16 rows each", "level shared": "`level`, its width for all"}
    rows = [
        {
            "name": names.get(method, f"`{method}`"),
            "few": row(stored, requests=few, method=method),
            "many": row(stored, requests=many, method=method),
        }
        for method in dict.fromkeys(each["method"] for each in stored["rows"])
    ]
    listed = [
        ("method", "{name}"),
        (f"{few} requests: speed-up", "{few[emulated_speed_up]:.2f}"),
        ("simulated", "{few[speed_up]:.2f}"),
        ("TBT, ms", "{few[tbt_ms]:.0f}"),
        (f"{many} requests: speed-up", "{many[emulated_speed_up]:.2f}"),
        ("simulated", "{many[speed_up]:.2f}"),
        ("TBT, ms", "{many[tbt_ms]:.0f}"),
        (OVERRUNS[0], "{few[overruns_per_step]:.3f}, {many[overruns_per_step]:.3f}"),
        ("tokens counted", "{few[emulated_tokens]}, {many[emulated_tokens]}"),
    ]
    return columns(listed, rows) + command_of(stored)


def long_prompt() -> str:
    """The table of `load.long_prompt`: a running answer beside a prompt of 8192 tokens."""
    stored = result("long_prompt")
    rows = [
        each | {"overruns_per_step": max(each["overruns_per_step"])} for each in stored["measured"]
    ]
    gaps = "{quiet[p50_gap_ms]:.0f}, {reading[p50_gap_ms]:.0f}"
    listed = [
        ("", "`{method}`"),
        ("longest step, median steps (at most 2)", "{step_ratio:.2f}"),
        ("p99 gap, of that without the prompt (1.5)", "{gap_ratio:.2f}"),
        ("TTFT, of that alone (1.5)", "{ttft_ratio:.2f}"),
        ("median gap without and with the prompt, ms", gaps),
        OVERRUNS,
    ]
    return columns(listed, rows) + command_of(stored)


def beyond_the_pace() -> str:
    """The table of `pipeline.overhead`: the parts of a step beyond its slowest stage."""
    stored = result("overhead")
    parts = ("neighbour", "verdict", "prune", "wire", "python", "late")
    listed = [
        ("varied", "{varies}"),
        ("", "{value}"),
        ("beyond the pace", "**{beyond_ms:.1f}**"),
        *((part, f"{{{part}_ms:.2f}}") for part in parts),
    ]
    rows = [each for each in stored["rows"] if not each["varies"].startswith("wait")]
    return columns(listed, rows) + f"\n{stored['note']}\n" + command_of(stored)


def bookkeeping() -> str:
    """What the head and a stage do in a step beside computing, of `pipeline.overhead`."""
    stored = result("overhead")
    parts = {
        "head_expand": "head: expand",
        "head_schedule": "schedule",
        "head_advance": "apply verdict",
        "stage_admit": "stage: admit",
        "stage_apply": "apply",
        "stage_prune": "prune",
    }
    rows = [
        each | {part: f"{1000 * each[part]:.0f}" for part in parts}
        for each in stored["books"]["rows"]
    ]
    listed = [("context", "{context}"), ("width", "{width}")]
    listed += [(name, f"{{{part}}}") for part, name in parts.items()]
    return columns(listed, rows) + command_of(stored)


def lossy() -> str:
    """The table of `drafts.lossy_acceptance`: what the rules gain and cost."""
    stored = result("lossy")
    listed = [
        ("policy", "`{policy}`"),
        ("sampling", "{sampling}"),
        ("acceptance", "{acceptance}"),
        FEW_DIGITS,
        HITS,
        TBT,
        OVER_ROOT,
        OVER_VLLM,
        OVERRUNS,
        ("agreement", "{agreement:.2f}"),
        ("loss per token", "{loss:.3f}"),
    ]
    return columns(listed, list(rows_of(stored))) + command_of(stored)


def lockstep_or_free() -> str:
    """The table of `pipeline.sync`: both ways over several links."""
    stored = result("sync")
    rows = []
    for each in [each for each in stored["rows"] if each["sync"] == "lockstep"]:
        cell = {name: each[name] for name in ("stages", "condition")}
        free = row(stored, sync="free", **cell)
        rows.append(each | {"free": free, "gain": each["tbt_ms"] / free["tbt_ms"]})
    listed = [
        ("stages", "{stages}"),
        ("condition", "{condition}"),
        ("TBT lockstep, ms", "{tbt_ms:.1f}"),
        ("free", "{free[tbt_ms]:.1f}"),
        ("gain", "{gain:.2f}"),
        ("step lockstep, ms", "{step_ms:.1f}"),
        ("free", "{free[step_ms]:.1f}"),
        ("tokens per step lockstep", "{tokens_per_step:.2f}"),
        ("free", "{free[tokens_per_step]:.2f}"),
        ("over-runs per step lockstep", "{overruns_per_step:.3f}"),
        ("free", "{free[overruns_per_step]:.3f}"),
    ]
    return columns(listed, rows) + f"\n{source('sync')}\n"


def stages() -> str:
    """The table of `pipeline.scaling`: one model cut into ever more stages."""
    stored = result("scaling")
    listed = [
        ("stages", "{stages}"),
        ("stage, ms", "{stage_ms:.1f}"),
        PLAIN,
        ("`best_first`", "{tbt_ms:.1f}"),
        ("speed-up", "{speed_up:.2f}"),
        FEW_DIGITS,
        OVERRUNS,
    ]
    return columns(listed, beside_root(stored, "stages")) + command_of(stored)


def cascade(name: str) -> str:
    """The table of `drafts.cascade_tbt`."""
    stored = result(name)
    rows = [
        each | {"shown": "`root`" if each["method"] == "root" else each["method"]}
        for each in rows_of(stored)
    ]
    listed = [("method", "{shown}"), TBT, OVER_ROOT, OVER_VLLM, TOKENS, HITS, OVERRUNS]
    return columns(listed, rows) + command_of(stored)


def running_states() -> str:
    """What a tree costs in layers with a running state, by kind of layer."""
    stored = result("running_states")
    rows = [
        each
        | {"node": each["node_bytes"] / 1024, "state": each["state_bytes"] / 1024}
        | {"percent": 100 * each["node_of_state"]}
        for each in stored["rows"]
    ]
    by_kernel = "64 tokens by the model's kernel for prompts, ms (times)"
    listed = [
        ("layer", "`{model_type}`"),
        ("a node", "{node:.0f} KiB"),
        ("a state", "{state:.0f} KiB"),
        ("of it", "{percent:.1f} %"),
        ("a tree of 64 nodes, ms", "{step_ms:.1f}"),
        (by_kernel, "{chunk_ms:.1f} ({of_chunk:.2f})"),
        ("one by one, ms (times)", "{one_by_one_ms:.0f} ({of_one_by_one:.2f})"),
    ]
    return (
        columns(listed, rows)
        + "\nOne layer's recurrence at the sizes of the published model, MEASURED on a CPU in "
        + "float32.\n"
        + command_of(stored)
    )


BLOCKS: Mapping[str, Callable[[], str]] = {
    "running_states": running_states,
    "sync": lockstep_or_free,
    "scaling": stages,
    "sampled": sampled,
    "methods": sizes_of_trees,
    "proposers": proposers,
    "groups": devices_of_a_stage,
    "two_groups": two_groups,
    "load_emulated": many_requests,
    "load_emulated_methods": methods_with_many_requests,
    "long_prompt": long_prompt,
    "overhead": beyond_the_pace,
    "bookkeeping": bookkeeping,
    "lossy": lossy,
    **{name: partial(cascade, name) for name in ("cascade", "cascade_demo")},
    **{name: partial(beside_plain, name) for name in ("tbt_hybrid", "tbt_parallel")},
    **{
        name: partial(time_between_tokens, name)
        for name in (
            "tbt",
            "tbt_synthetic_1b",
            "tbt_synthetic_8b",
            "tbt_synthetic_8b_33",
            "tbt_vllm_stages",
        )
    },
    **{
        name: partial(time_between_tokens, name, specpipes_gpus=False)
        for name in ("tbt_14", "tbt_14_8b", "tbt_21")
    },
}
