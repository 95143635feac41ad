"""The time of a step beyond the slowest stage's pace, by its parts.

    python -m benchmarks.pipeline.overhead --json benchmarks/results/overhead.json \\
        --plot benchmarks/results/overhead

Every stage is held to one pace, so that ranks on the same core do not wait for one another's
computation. A SYNTHETIC draft that is nearly always right keeps every stage filled. From the traces
of the last two ranks a step is divided, without gaps, along the chain that determines its length:

    neighbour  verdict published -> the rank before the last begins to wait (0: it waits already)
    verdict    published and awaited -> received there (the controller)
    prune      received there -> sending begins (with one stage: the head's, and its selection)
    wire       sending begins -> received
    python     received -> computing begins
    late       computing and sampling beyond the pace: a sleep that ends late, an over-run

Then the same sum over the length of the context and the width, and for ranks that sleep or spin
while they wait for one another (`transport.wait`). These times are EMULATED.
The second figure (`_books`) is that of `benchmarks.pipeline.bookkeeping`, which is measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import experiment, plot, rank_traces, run_options
from benchmarks.common.comparison import CaseRun, recorded
from benchmarks.common.experiment import names, numbers
from benchmarks.common.rank_traces import Span, Trace
from benchmarks.pipeline import bookkeeping
from pipespec.instruments.bench.dataset import Sample, load
from pipespec.instruments.bench.reference import record_reference
from pipespec.system.spin_wait import AUTO, SLEEP, SPIN

PARTS = ("neighbour", "verdict", "prune", "wire", "python", "late")
CURVE = "1:0.9,16:0.9999"  # nearly always within the rows of a batch
CHILDREN = 16
# The clock is read a moment before the span of computing begins.
NEARLY = 0.99
# Stages, width, tokens of the prompt, and how ranks wait for one another.
Size = tuple[int, int, int, str]


# --- a step's length, from a trace --------------------------------------------------------------


def chain(trace: Trace, pace_ms: float) -> list[dict[str, float]]:
    """The parts of every step in which the last stage computed, as in the step before.

    `beyond` is their sum: the time of the step beyond the pace.
    """
    before, last = (by_step(trace.ranks[rank]) for rank in (-2, -1))
    verdicts, computed = trace.verdicts(), trace.computed(-1)
    # A stage without rows is not held to its pace.
    filled = {step for step, span in computed.items() if span.length > pace_ms * NEARLY}
    found = []
    for step in sorted(filled):
        if step - 1 not in filled or step - 1 not in before:
            continue
        waited = max(
            (span for span in before[step - 1] if span.phase == "wait"), key=lambda span: span.end
        )
        listens = max(verdicts[step - 1], waited.start)
        sent = min(span.start for span in before[step - 1] if span.phase == "send")
        received = max(span.end for span in last[step] if span.phase == "receive")
        began, ended = computed[step].start, computed[step].end
        moments = (verdicts[step - 1], listens, waited.end, sent, received, began, ended - pace_ms)
        parts = dict(zip(PARTS, (b - a for a, b in pairwise(moments)), strict=True))
        found.append(parts | {"beyond": moments[-1] - moments[0]})
    return found


def by_step(spans: Sequence[Span]) -> dict[int, list[Span]]:
    found: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        found[span.step].append(span)
    return found


def typical(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of every part over the middle half of the steps by `beyond`.

    Means of parts add up, and rare pauses of the machine are left out.
    """
    ordered = sorted(steps, key=lambda step: step["beyond"])
    quarter = len(ordered) // 4
    middle = ordered[quarter : len(ordered) - quarter]
    return {name: statistics.mean(step[name] for step in middle) for name in ordered[0]}


# --- runs ---------------------------------------------------------------------------------------


def sweeps(options: argparse.Namespace) -> list[tuple[str, int | str, Size]]:
    """The varied quantity, its value, and the size of that run."""
    stages, width, tokens = options.num_stages, options.width, options.prompt_tokens
    return [
        *(("stages", n, (n, width, tokens, AUTO)) for n in options.stages),
        *(("context", n, (stages, width, n, AUTO)) for n in options.contexts),
        *(("width", n, (stages, n, tokens, AUTO)) for n in options.widths),
        *(("wait", wait, (stages, width, tokens, wait)) for wait in options.waits),
        *(("wait, one stage", wait, (1, width, tokens, wait)) for wait in options.waits),
    ]


def decode(
    options: argparse.Namespace, size: Size, prompt: str, folder: Path
) -> tuple[CaseRun, Trace]:
    """One request of that size, with its trace."""
    stages, width, prompt_tokens, wait = size
    answer = run_options.answer(options.tokens)
    truth = folder / f"truth_{prompt_tokens}.jsonl"
    if not truth.exists():
        text = [Sample("text", "text", prompt)]
        record_reference(text, truth, *answer, prompt_tokens=prompt_tokens)
    return rank_traces.record(
        f"{stages} stages, width {width}, context {prompt_tokens}, wait {wait}",
        [
            f"cluster.stages={stages}",
            "cluster.devices=[cpu]",
            "emulate=fixed",
            f"emulate.stage_ms={options.stage_ms:g}",
            *run_options.synthetic(truth, CURVE, spread=0.8),
            "proposer.rounds=2",
            "policy=best_first",
            f"policy.width={width}",
            f"policy.children={CHILDREN}",
            f"transport.wait={wait}",
            "policy.row_cost=0",  # full batches, whatever the draft's confidence
            *answer,
        ],
        prompt,
        folder,
        prompt_tokens=prompt_tokens,
    )


def row(
    varies: str, value: int | str, steps: Sequence[dict[str, float]], case_run: CaseRun
) -> dict[str, Any]:
    """A row of the table, milliseconds per step."""
    middle = typical(steps)
    stats = case_run.requests[0].stats
    return {
        "varies": varies,
        "value": value,
        "beyond_ms": middle["beyond"],
        **{f"{part}_ms": middle[part] for part in PARTS},
        "mean_ms": statistics.mean(step["beyond"] for step in steps),
        "steps": len(steps),
        "rows_per_step": stats["rows_per_step"],
        "overruns": stats["overruns"],
    }


def main() -> None:
    parser = experiment.parser(__doc__, plot=True)
    parser.add_argument("--stages", type=numbers, default=[1, 2, 4, 8, 16])
    parser.add_argument("--contexts", type=numbers, default=[128, 512, 1024, 1536])
    parser.add_argument("--widths", type=numbers, default=[1, 4, 16, 64])
    parser.add_argument("--waits", type=names, default=[SLEEP, SPIN])
    parser.add_argument("--width", type=int, default=16, help="where it is not varied (16)")
    parser.add_argument("--num-stages", type=int, default=4, help="where they are not varied (4)")
    parser.add_argument(
        "--prompt-tokens", type=int, default=128, help="where it is not varied (128)"
    )
    parser.add_argument("--stage-ms", type=float, default=40.0, help="of every stage (40)")
    parser.add_argument("--tokens", type=int, default=160, help="decoded (160)")
    parser.add_argument(
        "--books", type=numbers, default=[128, 512, 2048, 8192, 32768], help="contexts"
    )
    options = experiment.parse(
        parser,
        stages=[1, 4],
        tokens=40,
        books=[128, 2048, 32768],
        contexts=[128, 1536],
        widths=[1, 64],
    )

    # More tokens than the largest context.
    prompt = "\n".join(sample.prompt for sample in load(run_options.DATA))
    wanted = sweeps(options)
    with tempfile.TemporaryDirectory() as name:
        sizes = dict.fromkeys(size for *_, size in wanted)
        measured = {size: decode(options, size, prompt, Path(name)) for size in sizes}
    rows = []
    ranks = {}
    for varies, value, size in wanted:
        case_run, trace = measured[size]
        rows.append(row(varies, value, chain(trace, options.stage_ms), case_run))
        if varies == "stages":
            ranks[f"{value} stages"] = rank_traces.phases(trace)
    books = bookkeeping.table(options.books, options.widths)
    title = (
        f"EMULATED (every stage {options.stage_ms:g} ms), SYNTHETIC draft: a step beyond its pace"
    )
    note = (
        f"Means over the middle half of the steps. Where not varied: {options.num_stages} stages, "
        f"width {options.width}, context {options.prompt_tokens}. All ranks share "
        f"{len(os.sched_getaffinity(0))} cores."
    )
    experiment.publish(
        options,
        title,
        rows,
        draw=partial(draw, title, note, rows),
        note=note,
        ranks=ranks,
        books={"title": bookkeeping.TITLE, "unit": "ms", "rows": books},
        **recorded({str(size): case_run for size, (case_run, _) in measured.items()}),
    )
    for name, of in ranks.items():
        experiment.show(f"EMULATED: median ms per step of each rank, {name}", of)
    experiment.show(bookkeeping.TITLE, books)
    if options.plot:
        bookkeeping.draw(books, options.plot.with_name(f"{options.plot.name}_books"))


def draw(title: str, note: str, rows: list[dict[str, Any]], path: Path) -> None:
    with plot.figure(path, title, columns=3, size=(10.4, 3.4), note=note) as panels:
        for axes, varies in zip(panels, ("stages", "context", "width"), strict=True):
            mine = [row for row in rows if row["varies"] == varies]
            plot.stack(
                axes,
                [str(row["value"]) for row in mine],
                {part: [row[f"{part}_ms"] for row in mine] for part in PARTS},
                xlabel=varies if varies != "context" else "context, tokens",
                ylabel="ms per step beyond the pace",
                legend=varies == "width",
            )
        top = max(axes.get_ylim()[1] for axes in panels)
        for axes in panels:
            axes.set_ylim(top=top)


if __name__ == "__main__":
    main()
