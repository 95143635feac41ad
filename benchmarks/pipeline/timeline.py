"""One request on its way through the ranks: SpecPipe's Figure 12.

    python -m benchmarks.pipeline.timeline --json benchmarks/results/timeline.json \\
        --plot benchmarks/results/timeline

Two figures: the whole request (`_request`), and some decoding steps (`_steps`) with the time
between two steps magnified. The table has the time of each rank in each phase of a step; `pace` is
the rest of the emulated time after the real computation.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

from benchmarks.common import experiment, plot, rank_traces, run_options
from benchmarks.common.rank_traces import KINDS, Span, Trace
from pipespec.instruments.bench.dataset import Sample

PROMPT = "Once upon a time there was a king who had three sons"
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
# Spans narrower than this share of the figure are not drawn.
VISIBLE = 1 / 4000
# Steps in the second figure, and the magnified time around a verdict, in milliseconds.
STEPS = 4
AROUND_MS = (1.0, 5.0)


def visible_spans(
    spans: Sequence[Span], begin: float, end: float, visible: float = 0.0
) -> list[tuple[str, float, float]]:
    """The spans of one rank in a window: (kind, start since `begin`, length), cut at its edges.

    Adjacent phases of one kind are joined; those narrower than `visible` are left out.
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
    """`steps` consecutive steps and the one before them, from the middle of the request."""
    known = sorted(verdicts)
    first = max(0, (len(known) - steps) // 2)
    return known[first : first + steps + 1]


def draw(trace: Trace, title: str, path: Path) -> None:
    """Write `path`_request and `path`_steps."""
    height = 1.3 + 0.24 * len(trace.labels)
    begin = min(spans[0].start for spans in trace.ranks)
    end = max(spans[-1].end for spans in trace.ranks)
    with plot.figure(path.with_name(f"{path.name}_request"), title, size=(9.6, height)) as (axes,):
        shown = [visible_spans(spans, begin, end, (end - begin) * VISIBLE) for spans in trace.ranks]
        plot.rows_of_spans(axes, trace.labels, shown, COLOURS, xlabel="ms since the request began")
        axes.set_xlim(0, end - begin)

    verdicts = trace.verdicts()
    steps = middle(verdicts, STEPS)
    with plot.figure(
        path.with_name(f"{path.name}_steps"),
        title,
        columns=2,
        size=(9.6, height),
        note="The numbers are steps. Right: the time between two steps, magnified.",
    ) as (left, right):
        begin, end = verdicts[steps[0]], verdicts[steps[-1]]
        shown = [visible_spans(spans, begin, end, (end - begin) * VISIBLE) for spans in trace.ranks]
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
        shown = [visible_spans(spans, begin, end, (end - begin) * VISIBLE) for spans in trace.ranks]
        plot.rows_of_spans(right, trace.labels, shown, COLOURS, xlabel="ms since the verdict")
        legend = right.get_legend()
        assert legend is not None
        legend.remove()
        ticks = range(round(-AROUND_MS[0]), round(AROUND_MS[1]) + 1)
        right.set_xticks([tick + AROUND_MS[0] for tick in ticks], [f"{tick}" for tick in ticks])
        right.set_xlim(0, end - begin)
        right.axvline(AROUND_MS[0], color=plot.INK, linewidth=0.8, linestyle=":")


def main() -> None:
    parser = experiment.parser(__doc__, plot=True)
    run_options.add_cluster(parser, machine="rtx3090_8")
    run_options.add_draft(parser)
    run_options.add_size(parser, width=16)
    parser.add_argument("--method", choices=run_options.METHODS, default="best_first")
    parser.add_argument("--tokens", type=int, default=32, help="decoded (32)")
    parser.add_argument("--prompt", default=PROMPT)
    parser.set_defaults(prompt_tokens=None)
    options = experiment.parse(parser, stages=4, tokens=16)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        truth = run_options.record(options, folder, [Sample("text", "text", options.prompt)])
        ran, trace = rank_traces.record(
            "one request",
            [
                *run_options.cluster(options),
                *run_options.draft(options, truth),
                *run_options.method(options.method, options),
                *run_options.answer(options.tokens),
            ],
            options.prompt,
            folder,
            scale=options.scale if options.machine != "none" else 1.0,
        )
    between = [b - a for a, b in pairwise(trace.verdicts().values())]
    title = (
        f"{run_options.tags(options)}: one request, {options.stages} stages, {options.method}, "
        f"width {options.width}, {options.tokens} tokens"
    )
    experiment.publish(
        options,
        f"{title}; ms per step (median)",
        rank_traces.phases(trace),
        draw=partial(draw, trace, title),
        step_ms=statistics.median(between),
        stats=ran.requests[0].stats,
        overrides=ran.overrides,
        settings=ran.settings,
    )


if __name__ == "__main__":
    main()
