"""The table by which a reader decides: what one could run on a deployment, and how fast that is.

Milliseconds between tokens of a request, of each kind of evidence: measured on real models or on
the demo pair, simulated, or from a paper. In bold are the fastest, and what differs by chance from
it, whose intervals meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.pages.stored_results import command_of, result
from benchmarks.papers.intervals import Interval
from benchmarks.pipeline.deployments import ASSUMED
from tools.docs.markdown import table

# SpecPipe, Fig. 11: vLLM's pipeline over eight GPUs, a 70B in bfloat16.
VLLM_PIPELINE = "181 (paper)"
HEADINGS = (
    "deployment",
    "evidence",
    "llama.cpp, with draft",
    "vLLM's pipeline",
    "one group, with draft",
    "plain pipeline",
    "best fixed tree",
    "pipespec",
    "first token: llama.cpp's fastest, ours",
)
NONE = "–"
SIMULATED = "simulated"
OF_A_1B = ", draft as accurate as a 1B (assumed)"
# Without and with a draft.
Pair = tuple[Interval | None, Interval | None]


@dataclass(frozen=True)
class Line:
    """A deployment, with milliseconds of each engine or method; None: it was not run there.
    `rival`, `group`: without and with a draft. An interval is of chance, or of repeats."""

    deployment: str
    evidence: str
    rival: Pair = (None, None)
    vllm: str = NONE
    group: Pair = (None, None)
    plain: Interval | None = None
    fixed: Interval | None = None
    ours: Interval | None = None
    first: tuple[Interval, Interval] | None = None
    fitted: bool = False  # the plain pipeline's time, to that of the paper

    def cells(self) -> list[str]:
        given = (*self.rival, *self.group, self.plain, self.fixed, self.ours)
        best = min((ms for ms in given if ms is not None), key=lambda ms: ms.value)

        def shown(ms: Interval | None) -> str:
            if ms is None:
                return NONE
            text = f"{ms.value:.{int(ms.value < 10)}f}"
            return f"**{text}**" if ms.low <= best.high else text

        def pair(of: Pair) -> str:
            return NONE if of == (None, None) else ", ".join(map(shown, of))

        first = ", ".join(f"{ms.value / 1000:.2g} s" for ms in self.first or ()) or NONE
        return [
            *(self.deployment, self.evidence, pair(self.rival), self.vllm, pair(self.group)),
            shown(self.plain) + " (fitted)" * self.fitted,
            *(shown(self.fixed), shown(self.ours), first),
        ]


def _measured(rows: Sequence[dict[str, Any]], engine: str, figure: str = "tbt_ms") -> Interval:
    """The median of the repeats, the least and the greatest."""
    (found,) = (row[figure] for row in rows if row["engine"] == engine)
    return Interval(found["median"], found["min"], found["max"])


def real_models() -> Iterator[Line]:
    """One box, and two stages on it, of the Qwen pair."""
    rows = result("peers_real")["rows"]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        for stages, over in ((1, ""), (2, " over 2 rpc-servers")):
            ours = f"pipespec best_first, {stages} stage{'s' * (stages > 1)}"
            plain, theirs = ours.replace("best_first", "root"), f"llama.cpp{over}"
            where = "one box" if stages == 1 else "two stages on one box"
            yield Line(
                f"1.5B in 4 bits, {where}, {kind}",
                "real models",
                (_measured(own, theirs), _measured(own, f"llama.cpp with draft{over}")),
                plain=_measured(own, plain),
                ours=_measured(own, ours),
                first=(_measured(own, theirs, "ttft_ms"), _measured(own, ours, "ttft_ms")),
            )


def links() -> Iterator[Line]:
    """Five hosts, by the delay of their links."""
    for name, model, evidence in (
        ("links_smollm2", "135M in 4 bits", "real models"),
        ("links", "3.4M", "demo pair"),
    ):
        rows = result(name)["rows"]
        engines = {row["engine"] for row in rows}
        for delay in sorted({row["delay_ms"] for row in rows}):
            own = [row for row in rows if row["delay_ms"] == delay]
            drafted = [engine for engine in engines if engine.startswith("llama.cpp with")]
            best = min(drafted, key=lambda engine: _measured(own, engine).value)
            plain = _measured(own, "llama.cpp") if "llama.cpp" in engines else None
            yield Line(
                f"{model}, five hosts, links of {delay:g} ms one way",
                evidence,
                (plain, _measured(own, best)),
                plain=_measured(own, "pipespec root"),
                fixed=_measured(own, "pipespec level"),
                ours=_measured(own, "pipespec"),
                first=(_measured(own, best, "ttft_ms"), _measured(own, "pipespec", "ttft_ms")),
            )


def simulated() -> Iterator[Line]:
    """GPUs that were not at hand."""
    rows = [*result("deployments")["rows"], *result("mixture")["rows"]]
    keys = ("deployment", "requests", "draft")
    for name, requests, draft in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        # What has no draft was simulated once.
        of = {
            row["method"]: Interval(**row["tbt_ms"])
            for row in rows
            if (row["deployment"], row["requests"]) == (name, requests)
            and (row["draft"] == draft or row["method"] in ("pipeline", "one group"))
        }
        in_box = "70B" in name and "one box" in name and requests == 1
        more = f", {requests} requests" * (requests > 1) + OF_A_1B * (draft == ASSUMED)
        yield Line(
            name + more,
            SIMULATED,
            vllm=VLLM_PIPELINE if in_box else NONE,
            group=(of.get("one group"), of.get("one group, with draft")),
            plain=of["pipeline"],
            fixed=of["pipeline, fixed"],
            ours=of["pipeline, best_first"],
            fitted=in_box,
        )


def long() -> str:
    """All deployments, with where each figure comes from."""
    lines = [line.cells() for part in (real_models, links, simulated) for line in part()]
    results = map(result, ("peers_real", "links_smollm2", "links", "deployments", "mixture"))
    return table(HEADINGS, lines) + command_of(*results)


def short() -> str:
    """Those of the README."""
    lines = [line for part in (real_models, links, simulated) for line in part()]
    chosen = [line for line in lines if not any(part in line.deployment for part in LEFT_OUT)]
    return table(HEADINGS, [line.cells() for line in chosen])


# Of the README's table.
LEFT_OUT = (
    *(
        "links of 10 ms",
        "40 ms",
        "8 requests",
        "DeepSeek",
        "Gbit/s, 64",
        "two stages on one box, chat",
    ),
    *(f"{where}{OF_A_1B}" for where in ("one box", "1 Gbit/s")),
)
