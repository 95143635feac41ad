"""One request as it passes the ranks: SpecPipe's Figure 12.

    python -m benchmarks.timeline --json benchmarks/results/timeline.json \\
        --plot benchmarks/results/timeline

Two figures: the whole request (`_request`), and some steps of decoding (`_steps`) with the
moment between two steps beside them, magnified. The table says how long a rank spends in each
phase of a step. `pace` is what is left of the emulated time once the real computing is done.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks import emulated
from benchmarks.report import publish_table
from pipespec.client.generate import generate
from pipespec.config.compose import compose

PROMPT = "Once upon a time there was a king who had three sons"
# What the figure calls each phase of a trace.
KINDS = {
    "compute": "compute",
    "draft": "draft",
    "pace": "pace",
    "verify": "verify",
    "prune": "prune",
    "send": "send",
    "control": "controller",
    "receive": "wait",
    "wait": "wait",
}
COLOURS = {
    "compute": "#1f4e79",
    "pace": "#5b88b2",
    "draft": "#a9c6a0",
    "verify": "#a34b5a",
    "prune": "#c9784a",
    "send": "#5b7f5b",
    "controller": "#8a6fa8",
    "wait": "#e6e8eb",
}
# Boxes narrower than this share of the figure are not drawn.
VISIBLE = 1 / 4000
# Steps in the figure of some steps, and how much around a verdict is magnified, in milliseconds.
STEPS = 4
AROUND_MS = (1.0, 5.0)


@dataclass(frozen=True)
class Span:
    """One phase of one rank in one step; milliseconds."""

    phase: str
    start: float
    length: float
    step: int

    @property
    def end(self) -> float:
        return self.start + self.length


@dataclass(frozen=True)
class Trace:
    """What every rank did, the head first, in the order of time."""

    labels: list[str]
    ranks: list[list[Span]]

    @classmethod
    def read(cls, path: Path, scale: float = 1.0) -> Trace:
        """From the file that `trace=FILE` writes; what was emulated `scale` times slower is
        brought to its own time."""
        millisecond = 1e3 * scale
        labels: dict[int, str] = {}
        ranks: dict[int, list[Span]] = defaultdict(list)
        for event in json.loads(path.read_text())["traceEvents"]:
            if event["ph"] == "M":
                labels[event["tid"]] = event["args"]["name"]
            else:
                span = Span(
                    event["name"],
                    event["ts"] / millisecond,
                    event["dur"] / millisecond,
                    event["args"]["step"],
                )
                ranks[event["tid"]].append(span)
        return cls(
            [labels[rank].partition(":")[0] for rank in sorted(labels)],
            [sorted(ranks[rank], key=lambda span: span.start) for rank in sorted(labels)],
        )

    def verdicts(self) -> dict[int, float]:
        """When the last stage, held to its pace, told the verdict of each step."""
        return {span.step: span.end for span in self.ranks[-1] if span.phase == "pace"}

    def computed(self, rank: int) -> dict[int, Span]:
        """A stage's computing in each step, with the wait that makes it as long as stated."""
        starts = {span.step: span.start for span in self.ranks[rank] if span.phase == "compute"}
        return {
            span.step: Span("compute", starts[span.step], span.end - starts[span.step], span.step)
            for span in self.ranks[rank]
            if span.phase == "pace"
        }


def boxes(
    spans: Sequence[Span], begin: float, end: float, visible: float = 0.0
) -> list[tuple[str, float, float]]:
    """What a window shows of one rank: (kind, start since `begin`, length), cut at its edges.

    Phases of one kind that touch become one box; what is narrower than `visible` is left out.
    """
    found: list[tuple[str, float, float]] = []
    for span in spans:
        start, stop = max(span.start, begin) - begin, min(span.end, end) - begin
        if stop - start <= 0 or stop - start < visible:
            continue
        kind = KINDS[span.phase]
        if found and found[-1][0] == kind and start - sum(found[-1][1:]) <= visible:
            start = found.pop()[1]
        found.append((kind, start, stop - start))
    return found


def middle(verdicts: dict[int, float], steps: int) -> list[int]:
    """So many consecutive steps and the one before them, from the middle of the request."""
    known = sorted(verdicts)
    first = max(0, (len(known) - steps) // 2)
    return known[first : first + steps + 1]


def phases(trace: Trace) -> list[dict[str, str | float]]:
    """Median milliseconds per step that each rank spends in each phase, once decoding goes on."""
    steps = sorted(trace.verdicts())
    rows: list[dict[str, str | float]] = []
    for label, spans in zip(trace.labels, trace.ranks, strict=True):
        spent: dict[str, dict[int, float]] = {kind: dict.fromkeys(steps, 0.0) for kind in COLOURS}
        for span in spans:
            if span.step in spent[KINDS[span.phase]]:
                spent[KINDS[span.phase]][span.step] += span.length
        rows.append(
            {"rank": label} | {kind: statistics.median(of.values()) for kind, of in spent.items()}
        )
    return rows


def draw(trace: Trace, title: str, path: Path) -> None:
    """Write `path`_request and `path`_steps."""
    from benchmarks import plot

    height = 1.3 + 0.24 * len(trace.labels)
    begin = min(spans[0].start for spans in trace.ranks)
    end = max(spans[-1].end for spans in trace.ranks)
    with plot.figure(path.with_name(f"{path.name}_request"), title, size=(9.6, height)) as (axes,):
        shown = [boxes(spans, begin, end, (end - begin) * VISIBLE) for spans in trace.ranks]
        plot.rows_of_spans(axes, trace.labels, shown, COLOURS, xlabel="ms since the request began")
        axes.set_xlim(0, end - begin)

    verdicts = trace.verdicts()
    steps = middle(verdicts, STEPS)
    with plot.figure(
        path.with_name(f"{path.name}_steps"),
        title,
        columns=2,
        size=(9.6, height),
        note="Numbers name the step. Right: the moment between two steps, magnified.",
    ) as (left, right):
        begin, end = verdicts[steps[0]], verdicts[steps[-1]]
        shown = [boxes(spans, begin, end, (end - begin) * VISIBLE) for spans in trace.ranks]
        texts = [
            (rank, (max(span.start, begin) + min(span.end, end)) / 2 - begin, str(span.step))
            for rank in range(1, len(trace.ranks))
            for span in trace.computed(rank).values()
            if min(span.end, end) - max(span.start, begin) > (end - begin) / 20
        ]
        plot.rows_of_spans(left, trace.labels, shown, COLOURS, xlabel="ms", texts=texts)
        left.set_xlim(0, end - begin)

        verdict = verdicts[steps[len(steps) // 2]]
        begin, end = verdict - AROUND_MS[0], verdict + AROUND_MS[1]
        shown = [boxes(spans, begin, end, (end - begin) * VISIBLE) for spans in trace.ranks]
        plot.rows_of_spans(
            right, trace.labels, shown, COLOURS, xlabel="ms since the verdict was told"
        )
        right.get_legend().remove()
        ticks = range(round(-AROUND_MS[0]), round(AROUND_MS[1]) + 1)
        right.set_xticks([tick + AROUND_MS[0] for tick in ticks], [f"{tick}" for tick in ticks])
        right.set_xlim(0, end - begin)
        right.axvline(AROUND_MS[0], color=plot.INK, linewidth=0.8, linestyle=":")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    emulated.add_output(parser)
    emulated.add_cluster(parser, pace="rtx3090_8")
    emulated.add_draft(parser)
    parser.add_argument("--method", choices=emulated.METHODS, default="best_first")
    parser.add_argument("--width", type=int, default=16, help="(16)")
    parser.add_argument("--children", type=int, default=16, help="(16)")
    parser.add_argument("--tokens", type=int, default=32, help="decoded (32)")
    parser.add_argument("--prompt", default=PROMPT)
    options = parser.parse_args()
    if options.quick:
        options.stages, options.tokens = 4, 16

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        overrides = [
            *emulated.cluster(options),
            *emulated.draft(options, None),
            *emulated.method(options.method, options.width, options.children),
            f"decode.max_new_tokens={options.tokens}",
            "decode.ignore_eos=true",
            f"trace={file}",
        ]
        config = compose(overrides)
        result = generate(config, options.prompt)
        trace = Trace.read(file, options.scale if options.pace != "none" else 1.0)
        stored = emulated.overrides(overrides, Path(folder))
        settings = emulated.settings(config, Path(folder))
    between = [b - a for a, b in pairwise(trace.verdicts().values())]
    title = (
        f"{emulated.tags(options)}: one request, {options.stages} stages, {options.method}, width "
        f"{options.width}, {result.completion_tokens} tokens"
    ).removeprefix(": ")
    publish_table(
        f"{title}; ms per step (median)",
        phases(trace),
        path=options.json,
        step_ms=statistics.median(between),
        stats=result.stats,
        overrides=stored,
        settings=settings,
    )
    if options.plot:
        draw(trace, title, options.plot)


if __name__ == "__main__":
    main()
