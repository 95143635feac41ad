"""Tables of docs/benchmarks.md and of docs/how-it-works/, from the stored results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from tools.docs.stored_results import command_of, result, row, source, table

# Between tokens of vLLM's pipeline on the GPUs of `rtx3090_8`: SpecPipe, Fig. 11, HumanEval-X.
VLLM_MS = 181.41
OVER_VLLM = "over vLLM's 181.4 ms"


def over_vllm(tbt_ms: float) -> str:
    """How many times as fast as vLLM's pipeline on SpecPipe's GPUs."""
    return f"{VLLM_MS / tbt_ms:.2f}×"


def time_between_tokens(name: str, *, specpipes_gpus: bool = True) -> str:
    """The tables of `pipeline.tbt`: time between tokens by data set and method."""
    stored = result(name)
    methods = list(dict.fromkeys(each["method"] for each in stored["rows"]))
    sets = list(dict.fromkeys(each["data_set"] for each in stored["rows"]))
    rows = []
    for data_set in sets:
        found = [row(stored, data_set=data_set, method=method) for method in methods]
        cells = [f"{each['tbt_ms']:.1f} ({each['speed_up']:.2f}×)" for each in found]
        cells[0] = f"{found[0]['tbt_ms']:.1f}"
        rows.append(f"| {'**mean**' if data_set == 'all' else data_set} | {' | '.join(cells)} |")
    means = {method: row(stored, data_set="all", method=method) for method in methods}
    if specpipes_gpus:
        cells = [over_vllm(each["tbt_ms"]) for each in means.values()]
        rows.append(f"| {OVER_VLLM} | {' | '.join(cells)} |")

    def listed(figure: str, digits: int) -> str:
        return ", ".join(f"`{name}` {each[figure]:.{digits}f}" for name, each in means.items())

    header = "| TBT, ms | " + " | ".join(f"`{method}`" for method in methods) + " |"
    return (
        table(header, rows)
        + f"\nTokens per step: {listed('tokens_per_step', 3)}; hit rates "
        + f"{listed('hit_rate', 2)}; over-runs per step {listed('overruns_per_step', 3)}.\n"
        + command_of(stored)
    )


def beside_plain(name: str) -> str:
    """A table of `pipeline.tbt` of two methods: times, tokens per step and hits by data set."""
    stored = result(name)
    rows = []
    for each in [each for each in stored["rows"] if each["method"] == "best_first"]:
        data_set = each["data_set"]
        plain = row(stored, data_set=data_set, method="root")
        rows.append(
            f"| {'**mean**' if data_set == 'all' else data_set} | {plain['tbt_ms']:.1f} | "
            f"{each['tbt_ms']:.1f} ({each['speed_up']:.2f}×) | {over_vllm(each['tbt_ms'])} | "
            f"{each['tokens_per_step']:.3f} | {each['hit_rate']:.2f} | "
            f"{each['overruns_per_step']:.3f} |"
        )
    header = (
        f"| TBT, ms | `root` | `best_first` | {OVER_VLLM} | tokens per step | hit rate | "
        "over-runs per step |"
    )
    return table(header, rows) + command_of(stored)


def sampled() -> str:
    """The table of `pipeline.sampled`: greedy beside sampled decoding, by method."""
    stored = result("sampled")
    rows = [
        f"| {each['verify']} | `{each['method']}` | {each['tbt_ms']:.1f} | "
        f"{each['least_ms']:.1f} to {each['most_ms']:.1f} | {each['speed_up']:.2f} | "
        f"{over_vllm(each['tbt_ms'])} | {each['tokens_per_step']:.3f} | {each['hit_rate']:.2f} | "
        f"{each['overruns_per_step']:.3f} |"
        for each in stored["rows"]
    ]
    header = (
        f"|  | method | TBT, ms | least and most | over `root` | {OVER_VLLM} | tokens per step | "
        "hit rate | over-runs per step |"
    )
    return table(header, rows) + command_of(stored)


def sizes_of_trees() -> str:
    """The table of `pipeline.methods`: policies by width and children."""
    stored = result("methods")
    children = (2, 4, 8, 16)
    cells: dict[tuple[str, int], dict[int, str]] = {}
    for each in stored["rows"]:
        found = cells.setdefault((each["policy"], each["width"]), {})
        # Policies of one size stand in the first column.
        of_one_size = each["policy"] in ("root", "static_tree")
        count = children[0] if of_one_size else each["children"]
        found[count] = f"{each['tokens_per_step']:.3f} ({each['hit_rate']:.2f})"
    rows = []
    for policy in ("root", "static_tree", "level", "level, cut before", "best_first"):
        name, comma, how = policy.partition(",")
        rows += [
            f"| `{name}`{comma}{how} | {width} | "
            + " | ".join(found.get(count, "") for count in children)
            + " |"
            for (of, width), found in cells.items()
            if of == policy
        ]
    header = "| policy | width | 2 children | 4 children | 8 children | 16 children |"
    return table(header, rows) + command_of(stored)


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
    rows = []
    for proposer, name in names.items():
        found = [
            row(stored, policy="best_first", source=proposer, width=width, rounds=rounds)
            for width in (16, 64)
            for rounds in (1, 3)
        ]
        cells = [f"{each['tokens_per_step']:.3f} ({each['hit_rate']:.2f})" for each in found]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    header = (
        "| proposer | width 16, one round | three rounds | width 64, one round | three rounds |"
    )
    return table(header, rows) + command_of(stored)


def devices_of_a_stage() -> str:
    """The table of `pipeline.device_groups`: eight devices as more or fewer stages."""
    stored = result("groups")
    rows = []
    for each in [each for each in stored["rows"] if each["method"] == "best_first"]:
        devices = each["devices_of_a_stage"]
        plain = row(stored, devices_of_a_stage=devices, method="root")
        rows.append(
            f"| {each['stages']} × {devices} | {plain['tbt_ms']:.1f} | {each['tbt_ms']:.1f} | "
            f"{each['speed_up']:.2f} | {over_vllm(each['tbt_ms'])} | "
            f"{each['tokens_per_step']:.2f} | "
            f"{plain['predicted_ms']:.1f} | {each['predicted_ms']:.1f} | "
            f"{each['overruns_per_step']:.3f} |"
        )
    header = (
        f"| stages × devices | TBT `root`, ms | `best_first` | over `root` | {OVER_VLLM} | "
        "tokens per step | predicted `root` | predicted `best_first` | over-runs per step |"
    )
    return table(header, rows) + command_of(stored)


def two_groups() -> str:
    """The table of `pipeline.two_groups`: a group for the target and one for the draft."""
    stored = result("two_groups")
    rows = []
    for each in stored["rows"]:
        plain = each["method"] == "root"
        sum_us = None if plain else each["dearer_sum_us"]
        rows.append(
            f"| {each['target']} | {each['draft'] or '-'} | `{each['method']}` | {each['rows']} | "
            f"{each['stage_ms']:.1f} | "
            f"{'-' if plain else format(each['round_ms'], '.1f')} | "
            f"{each['tbt_ms']:.1f} | {each['speed_up']:.2f} | {each['tokens_per_step']:.2f} | "
            f"{each['predicted_ms']:.1f} | {'-' if sum_us is None else format(sum_us, '.0f')} | "
            f"{each['overruns_per_step']:.3f} |"
        )
    header = (
        "| target: stages × GPUs | draft: GPUs | method | rows | stage, ms | round, ms | TBT, ms | "
        "speed-up | tokens per step | predicted, ms | sums may take longer by, µs | "
        "over-runs per step |"
    )
    return table(header, rows) + command_of(stored)


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
            rows.append(
                f"| {requests} | {plain['emulated_tokens_per_s']:.1f} | "
                f"{each['emulated_tokens_per_s']:.1f} | {each['emulated_speed_up']:.2f} | "
                f"{each['speed_up']:.2f} | {plain['tbt_ms']:.0f} | {each['tbt_ms']:.0f} | "
                f"{plain['p99_tbt_ms']:.0f} | {each['p99_tbt_ms']:.0f} | "
                f"{each['worst_request_tbt_ms'] / plain['worst_request_tbt_ms']:.2f} | "
                f"{each['emulated_tokens']} | {each['overruns_per_step']:.3f} |"
            )
    header = (
        "| requests | `root`, tokens/s | `best_first`, tokens/s | speed-up | simulated | "
        "TBT `root`, ms | TBT, ms | p99 `root` | p99 | worst | tokens counted | "
        "over-runs per step |"
    )
    return table(header, rows) + "".join(map(command_of, parts))


def methods_with_many_requests() -> str:
    """`load.throughput`: every method with 8 and with 32 requests."""
    stored = result("load_emulated_methods")
    few, many = 8, 32
    rows = []
    for method in dict.fromkeys(each["method"] for each in stored["rows"]):
        one, other = (row(stored, requests=number, method=method) for number in (few, many))
        cells = [
            f"{each['emulated_speed_up']:.2f} | {each['speed_up']:.2f} | {each['tbt_ms']:.0f}"
            for each in (one, other)
        ]
        name = {"level": "`level`, 16 rows each", "level shared": "`level`, its width for all"}
        rows.append(
            f"| {name.get(method, f'`{method}`')} | {' | '.join(cells)} | "
            f"{one['overruns_per_step']:.3f}, {other['overruns_per_step']:.3f} | "
            f"{one['emulated_tokens']}, {other['emulated_tokens']} |"
        )
    header = (
        f"| method | {few} requests: speed-up | simulated | TBT, ms | {many} requests: speed-up | "
        "simulated | TBT, ms | over-runs per step | tokens counted |"
    )
    return table(header, rows) + command_of(stored)


def long_prompt() -> str:
    """The table of `load.long_prompt`: a running answer beside a prompt of 8192 tokens."""
    stored = result("long_prompt")
    rows = [
        f"| `{each['method']}` | {each['step_ratio']:.2f} | {each['gap_ratio']:.2f} | "
        f"{each['ttft_ratio']:.2f} | {each['quiet']['p50_gap_ms']:.0f}, "
        f"{each['reading']['p50_gap_ms']:.0f} | {max(each['overruns_per_step']):.3f} |"
        for each in stored["measured"]
    ]
    header = (
        "| | longest step, median steps (at most 2) | p99 gap, of that without the prompt (1.5) | "
        "TTFT, of that alone (1.5) | median gap without and with the prompt, ms | "
        "over-runs per step |"
    )
    return table(header, rows) + command_of(stored)


def beyond_the_pace() -> str:
    """The table of `pipeline.overhead`: the parts of a step beyond its slowest stage."""
    stored = result("overhead")
    parts = ("neighbour", "verdict", "prune", "wire", "python", "late")
    rows = []
    for each in [each for each in stored["rows"] if not each["varies"].startswith("wait")]:
        cells = " | ".join(f"{each[f'{part}_ms']:.2f}" for part in parts)
        rows.append(
            f"| {each['varies']} | {each['value']} | **{each['beyond_ms']:.1f}** | {cells} |"
        )
    header = f"| varied |  | beyond the pace | {' | '.join(parts)} |"
    return table(header, rows) + f"\n{stored['note']}\n" + command_of(stored)


def lockstep_or_free() -> str:
    """The table of `pipeline.sync`: both ways over several links."""
    stored = result("sync")
    rows = []
    for one in [each for each in stored["rows"] if each["sync"] == "lockstep"]:
        cell = {name: one[name] for name in ("stages", "condition")}
        other = row(stored, sync="free", **cell)
        rows.append(
            f"| {one['stages']} | {one['condition']} | {one['tbt_ms']:.1f} | {other['tbt_ms']:.1f} "
            f"| {one['tbt_ms'] / other['tbt_ms']:.2f} | {one['step_ms']:.1f} | "
            f"{other['step_ms']:.1f} | {one['tokens_per_step']:.2f} | "
            f"{other['tokens_per_step']:.2f} | {one['overruns_per_step']:.3f} | "
            f"{other['overruns_per_step']:.3f} |"
        )
    header = (
        "| stages | condition | TBT lockstep, ms | free | gain | step lockstep, ms | free | tokens "
        "per step lockstep | free | over-runs per step lockstep | free |"
    )
    return table(header, rows) + f"\n{source('sync')}\n"


def stages() -> str:
    """The table of `pipeline.scaling`: one model cut into ever more stages."""
    stored = result("scaling")
    rows = []
    for one in [each for each in stored["rows"] if each["method"] == "best_first"]:
        plain = row(stored, stages=one["stages"], method="root")
        rows.append(
            f"| {one['stages']} | {one['stage_ms']:.1f} | {plain['tbt_ms']:.1f} | "
            f"{one['tbt_ms']:.1f} | {one['speed_up']:.2f} | {one['tokens_per_step']:.2f} | "
            f"{one['overruns_per_step']:.3f} |"
        )
    header = (
        "| stages | stage, ms | TBT `root`, ms | `best_first` | speed-up | tokens per step | "
        "over-runs per step |"
    )
    return table(header, rows) + command_of(stored)


def cascade(name: str) -> str:
    """The table of `drafts.cascade_tbt`."""
    stored = result(name)
    rows = [
        f"| {'`root`' if each['method'] == 'root' else each['method']} | {each['tbt_ms']:.1f} | "
        f"{each['speed_up']:.2f} | {over_vllm(each['tbt_ms'])} | {each['tokens_per_step']:.3f} | "
        f"{each['hit_rate']:.2f} | {each['overruns_per_step']:.3f} |"
        for each in stored["rows"]
    ]
    header = (
        f"| method | TBT, ms | over `root` | {OVER_VLLM} | tokens per step | hit rate | "
        "over-runs per step |"
    )
    return table(header, rows) + command_of(stored)


def running_states() -> str:
    """What a tree costs in layers with a running state, by kind of layer."""
    stored = result("running_states")
    rows = [
        f"| `{each['model_type']}` | {each['node_bytes'] / 1024:.0f} KiB | "
        f"{each['state_bytes'] / 1024:.0f} KiB | {100 * each['node_of_state']:.1f} % | "
        f"{each['step_ms']:.1f} | {each['chunk_ms']:.1f} ({each['of_chunk']:.2f}) | "
        f"{each['one_by_one_ms']:.0f} ({each['of_one_by_one']:.2f}) |"
        for each in stored["rows"]
    ]
    header = (
        "| layer | a node | a state | of it | a tree of 64 nodes, ms | 64 tokens by the model's "
        "kernel for prompts, ms (times) | one by one, ms (times) |"
    )
    return (
        table(header, rows)
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
