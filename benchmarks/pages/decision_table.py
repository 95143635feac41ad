"""The table by which a reader decides: what one could run on a deployment, and how fast that is.

Milliseconds between tokens of a request, the fastest in bold, of each kind of evidence: measured
on real models or on the demo pair, simulated, or from a paper.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.pages.stored_results import command_of, result
from tools.docs.markdown import table

# SpecPipe, Fig. 11: vLLM's pipeline over eight GPUs, a 70B in bfloat16.
VLLM_PIPELINE = "181 (paper)"
HEADINGS = (
    "deployment",
    "evidence",
    "llama.cpp, with draft",
    "vLLM",
    "one group, with draft",
    "plain pipeline",
    "best fixed tree",
    "pipespec",
    "first token: theirs, ours",
)
NONE = "–"
SIMULATED = "simulated"
FIXED = ("pipeline, static tree", "pipeline, levels")


@dataclass(frozen=True)
class Line:
    """A deployment, with milliseconds of each engine or method; None: it was not run there.
    `rival`, `group`: without and with a draft."""

    deployment: str
    evidence: str
    rival: tuple[float | None, float | None] = (None, None)
    vllm: str = NONE
    group: tuple[float | None, float | None] = (None, None)
    plain: float | None = None
    fixed: float | None = None
    ours: float | None = None
    first: tuple[float, float] | None = None

    def cells(self) -> list[str]:
        given = (*self.rival, *self.group, self.plain, self.fixed, self.ours)
        best = min(ms for ms in given if ms is not None)

        def shown(ms: float | None) -> str:
            text = NONE if ms is None else f"{ms:.0f}" if ms >= 10 else f"{ms:.1f}"
            return f"**{text}**" if ms == best else text

        def pair(of: tuple[float | None, float | None]) -> str:
            return NONE if of == (None, None) else ", ".join(map(shown, of))

        first = NONE if self.first is None else ", ".join(f"{ms / 1000:.2g} s" for ms in self.first)
        return [
            *(self.deployment, self.evidence, pair(self.rival), self.vllm, pair(self.group)),
            *(shown(self.plain), shown(self.fixed), shown(self.ours), first),
        ]


def _median(rows: Sequence[dict[str, Any]], engine: str, figure: str = "tbt_ms") -> float:
    (found,) = (row for row in rows if row["engine"] == engine)
    return float(found[figure]["median"])


def real_models() -> Iterator[Line]:
    """One box, and two stages on it, of the Qwen pair."""
    rows = result("peers_real")["rows"]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        for stages, over in ((1, ""), (2, " over 2 rpc-servers")):
            ours = f"pipespec best_first, {stages} stage{'s' * (stages > 1)}"
            plain = ours.replace("best_first", "root")
            where = "one box" if stages == 1 else "two stages on one box"
            yield Line(
                f"1.5B in 4 bits, {where}, {kind}",
                "real models",
                (_median(own, f"llama.cpp{over}"), _median(own, f"llama.cpp with draft{over}")),
                plain=_median(own, plain),
                ours=_median(own, ours),
                first=(_median(own, f"llama.cpp{over}", "ttft_ms"), _median(own, ours, "ttft_ms")),
            )


def links() -> Iterator[Line]:
    """Five hosts of the demo pair, by the delay of their links."""
    rows = result("links")["rows"]
    for delay in sorted({row["delay_ms"] for row in rows}):
        own = [row for row in rows if row["delay_ms"] == delay]
        drafted = [row["engine"] for row in own if "with draft" in row["engine"]]
        best = min(drafted, key=lambda engine: _median(own, engine))
        yield Line(
            f"3.4M, five hosts, links of {delay:g} ms",
            "demo pair",
            (_median(own, "llama.cpp"), _median(own, best)),
            plain=_median(own, "pipespec root"),
            ours=_median(own, "pipespec"),
            first=(_median(own, best, "ttft_ms"), _median(own, "pipespec", "ttft_ms")),
        )


def simulated() -> Iterator[Line]:
    """GPUs that were not at hand."""
    rows = result("deployments")["rows"]
    for name, requests in dict.fromkeys((row["deployment"], row["requests"]) for row in rows):
        of = {
            row["method"]: row["tbt_ms"]
            for row in rows
            if (row["deployment"], row["requests"]) == (name, requests)
        }
        fastest = min(of["one group, static tree"], of["one group, best_first"], of["one group"])
        in_box = "70B" in name and "one box" in name and requests == 1
        yield Line(
            f"{name}, {requests} requests" if requests > 1 else name,
            SIMULATED,
            vllm=VLLM_PIPELINE if in_box else NONE,
            group=(of["one group"], fastest),
            plain=of["pipeline"],
            fixed=min(of[each] for each in FIXED),
            ours=of["pipeline, best_first"],
        )


def long() -> str:
    """All deployments, with where each figure comes from."""
    lines = [line.cells() for part in (real_models, links, simulated) for line in part()]
    return table(HEADINGS, lines) + command_of(*map(result, ("peers_real", "links", "deployments")))


def short() -> str:
    """Those of the README."""
    lines = [line for part in (real_models, links, simulated) for line in part()]
    chosen = [line for line in lines if not any(part in line.deployment for part in LEFT_OUT)]
    return table(HEADINGS, [line.cells() for line in chosen])


# Of the README's table.
LEFT_OUT = (
    *("chat", "links of 10 ms", "40 ms", "8 requests", "48 GB in one box", "1 Gbit/s, 64"),
    *("48 GB over 10 Gbit/s, 64", "24 GB over 10 Gbit/s, 64"),
)
