"""Write the figures of README.md and of pages of docs/ from the stored results of the benchmarks.

A block of a page between `<!-- figures: NAME -->` and `<!-- end of figures -->` is written by the
function of that name here, from the files of `benchmarks/results/`.

    python -m tools.docs.figures          # writes the blocks
    python -m tools.docs.figures --check  # exit code 1 if a block is not up to date
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = (
    ROOT / "README.md",
    DOCS / "benchmarks.md",
    DOCS / "how-it-works" / "linear-attention.md",
)
RESULTS = ROOT / "benchmarks" / "results"
# What makes a result today; the stored command has the names of its own commit.
COMMANDS = {
    "tbt_synthetic_1b": (
        "pipeline.tbt --proposer synthetic --scale 2 --num-prompts 16 --tokens 64"
    ),
    "tbt": "pipeline.tbt --scale 4",
    "methods": "pipeline.methods --rounds 3 --tokens 24",
    "chaos": "faults.chaos --faults 200",
    "chaos_in_flight": (
        "faults.chaos --in-flight 16 --hosts 2 --stages 3 --tokens 32 --faults 300"
    ),
    "controller": "budgets.controller_hop --steps 1000",
    "startup": "budgets.startup --repeats 3",
    "memory": "budgets.rank_memory",
    "sync": "pipeline.sync --proposer synthetic --num-prompts 3 --tokens 24 --scale 4",
}
BLOCK = re.compile(r"(<!-- figures: (?P<name>\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def result(name: str) -> dict[str, Any]:
    """A stored result: rows, and the hardware, commit, date and command that made it."""
    stored: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return stored


def row(stored: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """The only row of a result with these values."""
    found = [each for each in stored["rows"] if values.items() <= each.items()]
    assert len(found) == 1, f"{len(found)} rows have {values}"
    chosen: dict[str, Any] = found[0]
    return chosen


def origin(stored: Mapping[str, Any]) -> str:
    """Hardware, commit and date of a result."""
    hardware = stored["hardware"].replace("Intel(R) Xeon(R) Processor", "Intel Xeon")
    return f"{hardware}, {stored['commit']}, {stored['date']}"


def source(name: str) -> str:
    """Where a figure comes from: file, command, hardware, commit and date."""
    return f"`{name}.json`: `python -m benchmarks.{COMMANDS[name]}`; {origin(result(name))}"


def table(header: str, rows: list[str]) -> str:
    """A Markdown table."""
    columns = header.count("|") - 1
    return "\n".join([header, "|" + "---|" * columns, *rows]) + "\n"


def engines() -> str:
    """The time of a token in each engine of `peers.json`, on one machine, the fastest first."""
    stored = result("peers")
    times = {each["engine"]: each["tbt_ms"]["median"] for each in stored["rows"]}
    listed = "; ".join(
        f"{engine} {times[engine]:.1f} ms" for engine in sorted(times, key=times.__getitem__)
    )
    return (
        f"Measured on one machine, time per token, with the same draft where one is used: {listed} "
        f"({origin(stored)}: [other engines](docs/peers.md)).\n"
    )


def links() -> str:
    """The time of a token over links with a delay, of `links.json` and `links_one_step.json`."""
    stored = result("links_one_step")
    said = []
    for delay in (40, 10):
        of = {
            each["engine"]: each["tbt_ms"]["median"]
            for each in stored["rows"]
            if each["delay_ms"] == delay
        }
        drafting = sorted(ms for engine, ms in of.items() if engine.startswith("llama.cpp with"))
        said.append(
            f"{delay} ms: pipespec {of['pipespec']:.0f} ms, llama.cpp over rpc-servers "
            f"{of['llama.cpp']:.0f} ms, with its draft {drafting[0]:.0f} to {drafting[-1]:.0f} ms"
        )
    return (
        "Measured over links with a delay between five hosts, namespaces of one machine, time per "
        f"token. One way {'; '.join(said)}. At 2 ms and less llama.cpp with its draft is faster "
        f"({origin(stored)}: [the race](docs/peers.md#over-slow-links)).\n"
    )


def emulated() -> str:
    """Time between tokens of the methods, on the emulated cluster of eight RTX 3090s."""
    drafts = {
        "SYNTHETIC, as accurate as a 1B (top-1 .74 ASSUMED)": "tbt_synthetic_1b",
        "the demo pair's own": "tbt",
    }
    rows = []
    for draft, name in drafts.items():
        stored = result(name)
        cells = []
        for method in ("root", "static_tree", "level", "best_first"):
            found = row(stored, data_set="all", method=method)
            cells.append(f"{found['tbt_ms']:.0f} ms ({found['speed_up']:.2f}×)")
        rows.append(f"| {draft} | {' | '.join(cells)} | {source(name)} |")
    header = (
        "| draft | plain pipeline (`root`) | as SpecInfer (`static_tree`) | as PipeDec (`level`) "
        "| pipespec (`best_first`) | from `benchmarks/results/` |"
    )
    return table(header, rows)


def measured() -> str:
    """Figures that were measured without emulation, beside what to compare them with."""
    controller, memory, startup = result("controller"), result("memory"), result("startup")
    chaos, crowd = result("chaos"), result("chaos_in_flight")
    methods = result("methods")
    hop = row(controller, name="hop: complete -> ready elsewhere")["value"]
    ping = row(controller, name="Redis PING round trip")["value"]
    four = row(startup, what="generate, 4 stages")["first_s"]
    imports = row(startup, what="imports")["first_s"]
    own = max(each["uss_beyond"] for each in memory["rows"])
    wide = {"width": 64, "children": 16, "source": "demo"}
    best = row(methods, policy="best_first", **wide)["tokens_per_step"]
    level = row(methods, policy="level", **wide)["tokens_per_step"]
    plain = row(methods, policy="root", width=1, source="demo")["tokens_per_step"]
    kill = row(chaos, fault="kill")["median_s"]
    lines = [
        (
            "tokens per step, 8 stages, demo pair: `best_first`",
            f"{best:.2f}",
            f"`root` {plain:.3f}, `level` {level:.2f}",
            "methods",
        ),
        (
            "a rank is killed in the middle of an answer: time to the next token, median",
            f"{kill:.2f} s",
            f"{chaos['mismatches']} of {chaos['requests_finished']} texts differ",
            "chaos",
        ),
        (
            f"{len(crowd['faults'])} faults, 16 requests in flight: texts that differ, lost",
            f"{crowd['texts_differ']}, {crowd['requests_lost']}",
            f"of {crowd['requests_finished']}",
            "chaos_in_flight",
        ),
        (
            "controller: from one rank's report to another's start",
            f"{hop:.0f} µs",
            f"Redis PING {ping:.0f} µs",
            "controller",
        ),
        (
            "from the command to the first token, 4 stages, demo pair",
            f"{four:.1f} s",
            f"importing torch and Transformers {imports:.1f} s",
            "startup",
        ),
        (
            "memory of a rank beyond weights and KV cache",
            f"{own:.0f} MiB",
            "budget 300 MiB",
            "memory",
        ),
    ]
    rows = [
        f"| {what} | {value} | {baseline} | {source(name)} |"
        for what, value, baseline, name in lines
    ]
    return table("| measured | figure | beside | from `benchmarks/results/` |", rows)


def time_between_tokens(name: str) -> str:
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

    def listed(figure: str, digits: int) -> str:
        return ", ".join(f"`{name}` {each[figure]:.{digits}f}" for name, each in means.items())

    header = "| TBT, ms | " + " | ".join(f"`{method}`" for method in methods) + " |"
    return (
        table(header, rows)
        + f"\nTokens per step: {listed('tokens_per_step', 3)}; hit rates "
        + f"{listed('hit_rate', 2)}; over-runs per step {listed('overruns_per_step', 3)}.\n"
        + command_of(stored)
    )


def command_of(stored: Mapping[str, Any]) -> str:
    """The line under a table: where and how its result was made."""
    return f"\n{origin(stored)}: `{stored['command']}`\n"


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


def cascade() -> str:
    """The table of `drafts.cascade_tbt`."""
    stored = result("cascade")
    rows = [
        f"| {'`root`' if each['method'] == 'root' else each['method']} | {each['tbt_ms']:.1f} | "
        f"{each['speed_up']:.2f} | {each['tokens_per_step']:.3f} | {each['hit_rate']:.2f} | "
        f"{each['overruns_per_step']:.3f} |"
        for each in stored["rows"]
    ]
    header = "| method | TBT, ms | speed-up | tokens per step | hit rate | over-runs per step |"
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
    "engines": engines,
    "links": links,
    "emulated": emulated,
    "measured": measured,
    "running_states": running_states,
    "sync": lockstep_or_free,
    "scaling": stages,
    "cascade": cascade,
    **{
        name: partial(time_between_tokens, name)
        for name in (
            "tbt_synthetic_1b",
            "tbt_synthetic_8b",
            "tbt_synthetic_8b_33",
            "tbt_14",
            "tbt_14_8b",
            "tbt_21",
            "tbt_vllm_stages",
        )
    },
}


def updated(text: str) -> str:
    """A text whose blocks of figures are those of the stored results."""
    return BLOCK.sub(lambda found: found[1] + BLOCKS[found["name"]]() + found[3], text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    check = parser.parse_args().check
    texts = {page: page.read_text() for page in PAGES}
    if check:
        return int(any(text != updated(text) for text in texts.values()))
    for page, text in texts.items():
        page.write_text(updated(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
