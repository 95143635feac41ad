"""Write the figures of README.md and of pages of docs/ from the stored results of the benchmarks.

A block of a page between `<!-- figures: NAME -->` and `<!-- end of figures -->` is written by the
function of that name here, from the files of `benchmarks/results/`.

    python -m tools.docs.figures
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from tools.docs import benchmark_tables
from tools.docs.stored_results import ROOT, origin, result, row, source, table

DOCS = ROOT / "docs"
PAGES = (
    ROOT / "README.md",
    DOCS / "benchmarks.md",
    DOCS / "gpus.md",
    DOCS / "peers.md",
)
BLOCK = re.compile(r"(<!-- figures: (?P<name>\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def results() -> str:
    """The README's table: time per token of pipespec and of others, and what faults change."""
    tbt, peers = result("tbt_synthetic_1b"), result("peers")
    links, crowd = result("links"), result("chaos_in_flight")
    method = {
        name: row(tbt, data_set="all", method=name)["tbt_ms"]
        for name in ("root", "level", "best_first")
    }
    one = {each["engine"]: each["tbt_ms"]["median"] for each in peers["rows"]}
    lines = [
        [
            "70B over eight RTX 3090s, emulated, synthetic draft",
            f"{method['best_first']:.0f} ms",
            f"plain pipeline {method['root']:.0f}, one tree level per step {method['level']:.0f}",
            f"[benchmarks](docs/benchmarks.md#time-between-tokens), {origin(tbt)}",
        ]
    ]
    for delay in sorted({each["delay_ms"] for each in links["rows"]}, reverse=True):
        of = {
            each["engine"]: each["tbt_ms"]["median"]
            for each in links["rows"]
            if each["delay_ms"] == delay
        }
        least, *_, most = sorted(ms for engine, ms in of.items() if "with draft" in engine)
        lines.append(
            [
                f"demo pair (3.4M) over five hosts, links of {delay:g} ms",
                f"{of['pipespec']:.0f} ms",
                f"llama.cpp {of['llama.cpp']:.0f}, with a draft {least:.0f} to {most:.0f}",
                f"[slow links](docs/peers.md#over-slow-links), {origin(links)}",
            ]
        )
    lines += [
        [
            "200M on one machine",
            f"{one['pipespec best_first, 1 stage']:.1f} ms",
            f"llama.cpp with draft {one['llama.cpp with draft']:.1f}",
            f"[other engines](docs/peers.md#measured), {origin(peers)}",
        ],
        [
            f"{len(crowd['faults'])} faults of 14 kinds",
            f"{crowd['texts_differ']} texts differ",
            f"{crowd['requests_lost']} of {crowd['requests_finished']} requests lost",
            f"[faults](docs/faults.md), {origin(crowd)}",
        ],
    ]
    return table(["case", "pipespec, per token", "beside it", "from"], lines)


def measured() -> str:
    """Figures that were measured without emulation, beside what to compare them with."""
    controller, memory, startup = result("controller"), result("memory"), result("startup")
    crowd, methods = result("chaos_in_flight"), result("methods")
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
    "results": results,
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
