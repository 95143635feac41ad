"""Write the figures of README.md and of pages of docs/ from the stored results of the benchmarks.

A block of a page between `<!-- figures: NAME -->` and `<!-- end of figures -->` is written by the
function of that name here, from the files of `benchmarks/results/`.

    python -m tools.docs.figures
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from tools.docs import benchmark_tables
from tools.docs.benchmark_tables import VLLM_MS
from tools.docs.stored_results import ROOT, origin, result, row, source, table

DOCS = ROOT / "docs"
PAGES = (
    ROOT / "README.md",
    DOCS / "benchmarks.md",
    DOCS / "gpus.md",
    DOCS / "peers.md",
)
BLOCK = re.compile(r"(<!-- figures: (?P<name>\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def engines() -> str:
    """The time of a token in each engine of `peers.json`, on one machine, the fastest first."""
    stored = result("peers")
    times = {each["engine"]: each["tbt_ms"]["median"] for each in stored["rows"]}
    listed = "; ".join(
        f"{engine} {times[engine]:.1f} ms" for engine in sorted(times, key=times.__getitem__)
    )
    return (
        "Measured on one machine, time per token of a 200M target in float32, with the demo draft "
        f"where one is used: {listed} "
        f"({origin(stored)}: [other engines](docs/peers.md)).\n"
    )


def race() -> str:
    """The time of a token over links with a delay, of `links_bfloat16.json`."""
    stored = result("links_bfloat16")
    said, behind, far_behind = [], [], []
    for delay in sorted({each["delay_ms"] for each in stored["rows"]}, reverse=True):
        of = {
            each["engine"]: each["tbt_ms"]["median"]
            for each in stored["rows"]
            if each["delay_ms"] == delay
        }
        drafting = sorted(ms for engine, ms in of.items() if engine.startswith("llama.cpp with"))
        said.append(
            f"{delay:g} ms: pipespec {of['pipespec']:.0f} ms, llama.cpp over rpc-servers "
            f"{of['llama.cpp']:.0f} ms, with its draft {drafting[0]:.0f} to {drafting[-1]:.0f} ms"
        )
        if drafting[0] < of["pipespec"]:
            behind.append(f"{delay:g}")
        if of["llama.cpp with draft"] < of["pipespec"]:
            far_behind.append(f"{delay:g}")
    if behind:
        said[-1] += f". At {' and '.join(behind)} ms llama.cpp with its best draft is faster"
    if far_behind:
        said[-1] += f", at {' and '.join(far_behind)} ms with its default one too"
    (dtype,) = re.findall("float32|bfloat16", stored["title"])
    return (
        "Measured over links with a delay between five hosts, namespaces of one machine, time per "
        f"token of a 200M target in {dtype}. One way {'; '.join(said)} "
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
        over_vllm = VLLM_MS / row(stored, data_set="all", method="best_first")["tbt_ms"]
        for method in ("root", "static_tree", "level", "best_first"):
            found = row(stored, data_set="all", method=method)
            cells.append(f"{found['tbt_ms']:.0f} ms ({found['speed_up']:.2f}×)")
        rows.append([draft, *cells, f"{over_vllm:.2f}×", source(name)])
    headings = ["draft", "plain pipeline (`root`)", "as SpecInfer (`static_tree`)"]
    headings += ["as PipeDec (`level`)", "pipespec (`best_first`)"]
    headings += ["pipespec over vLLM's 181.4 ms (Fig. 11)", "from `benchmarks/results/`"]
    return table(headings, rows)


def measured() -> str:
    """Figures that were measured without emulation, beside what to compare them with."""
    controller, memory, startup = result("controller"), result("memory"), result("startup")
    crowd = result("chaos_in_flight")
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
    kill = row(crowd, fault="kill")["median_s"]
    lines = [
        (
            "tokens per step, 8 stages, demo pair: `best_first`, three draft rounds a step",
            f"{best:.2f}",
            f"`root` {plain:.3f}, `level` (one round) {level:.2f}",
            "methods",
        ),
        (
            "a rank is killed, 16 requests in flight: until all have new tokens, median",
            f"{kill:.2f} s",
            "two hosts",
            "chaos_in_flight",
        ),
        (
            f"{len(crowd['faults'])} faults of 14 kinds: texts that differ, requests lost",
            f"{crowd['texts_differ']}, {crowd['requests_lost']}",
            f"of {crowd['requests_finished']}",
            "chaos_in_flight",
        ),
        (
            "controller: from one rank's report to another's start",
            f"{hop:.0f} µs",
            f"Redis PING {ping:.0f} µs, budget {2 * ping:.0f} µs",
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
    rows = [[*figure, source(name)] for *figure, name in lines]
    return table(["measured", "figure", "beside", "from `benchmarks/results/`"], rows)


BLOCKS: Mapping[str, Callable[[], str]] = {
    "engines": engines,
    "race": race,
    "emulated": emulated,
    "measured": measured,
    **benchmark_tables.BLOCKS,
}


def updated(text: str) -> str:
    """A text whose blocks of figures are those of the stored results."""
    return BLOCK.sub(lambda found: found[1] + BLOCKS[found["name"]]() + found[3], text)


def main() -> None:
    for page in PAGES:
        page.write_text(updated(page.read_text()))


if __name__ == "__main__":
    main()
