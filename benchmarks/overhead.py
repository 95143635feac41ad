"""What a step takes beyond the slowest stage's pace, and where that goes.

    python -m benchmarks.overhead --json benchmarks/results/overhead.json \\
        --plot benchmarks/results/overhead

Every stage is held to one pace, so that ranks which share a core do not wait for one another's
computing. A SYNTHETIC draft that hardly ever errs keeps every stage filled. From the traces of
the last two ranks a step is cut, without gaps, along the chain that its length depends on:

    neighbour  told by the last stage -> the rank before it begins to listen (0: it does already)
    verdict    told, and somebody listens -> heard there (the controller)
    prune      heard there -> sending begins (with one stage: the head's, and its choice)
    wire       sending begins -> received
    python     received -> computing begins
    late       computing and drawing beyond the pace: a sleep that ends late, an over-run

Then the same sum against the length of the context and the width. These times are EMULATED.
The second figure (`_books`) is measured, without pace, model, wire or processes: the
book-keeping of the head and of one stage per step, up to contexts that the demo target has not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import emulated
from benchmarks.emulated import Ran
from benchmarks.report import publish_table
from benchmarks.timeline import Span, Trace, phases
from pipespec.client.bench import record_truth
from pipespec.client.dataset import Sample
from pipespec.core import Batch, Verdict
from pipespec.engine.stage import Stage
from pipespec.head.feed.best_first import BestFirst
from pipespec.head.feed.policy import PipelineState
from pipespec.head.source.protocol import Context
from pipespec.head.tree import ROOT, Tree

PARTS = ("neighbour", "verdict", "prune", "wire", "python", "late")
CURVE = "1:0.9,16:0.9999"  # nearly always among the rows of a batch
CHILDREN = 16
# The clock is read a moment before the span of computing begins.
NEARLY = 0.99
# Of the book-keeping, where the other of the two varies.
WIDEST, BOOK_CONTEXT = 64, 8192


# --- a step's length, from a trace --------------------------------------------------------------


def chain(trace: Trace, pace_ms: float) -> list[dict[str, float]]:
    """The parts of every step that the last stage computed in, and in the one before.

    `beyond` is their sum: how much longer than the pace the step was.
    """
    before, last = (by_step(trace.ranks[rank]) for rank in (-2, -1))
    told, computed = trace.verdicts(), trace.computed(-1)
    # A stage without rows is not held to its pace.
    filled = {step for step, span in computed.items() if span.length > pace_ms * NEARLY}
    found = []
    for step in sorted(filled):
        if step - 1 not in filled or step - 1 not in before:
            continue
        waited = max(
            (span for span in before[step - 1] if span.phase == "wait"), key=lambda span: span.end
        )
        listens = max(told[step - 1], waited.start)
        sent = min(span.start for span in before[step - 1] if span.phase == "send")
        received = max(span.end for span in last[step] if span.phase == "receive")
        began, ended = computed[step].start, computed[step].end
        moments = (told[step - 1], listens, waited.end, sent, received, began, ended - pace_ms)
        parts = dict(zip(PARTS, (b - a for a, b in pairwise(moments)), strict=True))
        found.append(parts | {"beyond": moments[-1] - moments[0]})
    return found


def by_step(spans: Sequence[Span]) -> dict[int, list[Span]]:
    found: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        found[span.step].append(span)
    return found


def typical(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of every part over the middle half of the steps by `beyond`: the parts of a mean
    add up, and a rare pause of the machine is left out."""
    ordered = sorted(steps, key=lambda step: step["beyond"])
    quarter = len(ordered) // 4
    middle = ordered[quarter : len(ordered) - quarter]
    return {name: statistics.mean(step[name] for step in middle) for name in ordered[0]}


# --- book-keeping alone -------------------------------------------------------------------------


class NoLayers:
    """What a stage needs of a model when only its book-keeping is timed."""

    vocab_size = 1000

    def forward(self, inputs: torch.Tensor, positions: torch.Tensor, plan: object) -> torch.Tensor:
        return torch.zeros(len(inputs), 1)


def bookkeeping(context: int, width: int, stages: int, steps: int) -> dict[str, float]:
    """Median milliseconds per step that head and stage spend on tree, lineage and slots.

    The tree is grown at random and fed as `best_first` does; each step a verdict accepts the
    likeliest fed child of the root, so that the stage holds the rows of all steps in flight.
    """
    rng = np.random.default_rng(0)
    stage = Stage(NoLayers(), context + steps + (stages + 2) * width)  # type: ignore[arg-type]
    text = Context(1, [1] * context, list(range(context)))
    for start in range(0, context, 512):
        stage.compute(Batch(0, text.rows(start, min(start + 512, context))))
    tree = Tree(context - 1, context - 2, 1, context - 1, fed=True)
    policy = BestFirst(width, CHILDREN)
    state = PipelineState(num_stages=stages, step=0)
    in_flight: deque[Batch] = deque()
    times: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, start: int) -> int:
        now = time.perf_counter_ns()
        times[name].append((now - start) / 1e6)
        return time.perf_counter_ns()

    for step in range(steps):
        expansion = policy.grow(tree, state)
        nodes = len(expansion.nodes)
        tokens = rng.permuted(np.tile(np.arange(NoLayers.vocab_size), (nodes, 1)), axis=1)
        logps = np.log(rng.dirichlet(np.full(CHILDREN, 0.3), nodes) + 1e-9)
        start = time.perf_counter_ns()
        tree.append(expansion.nodes, tokens[:, :CHILDREN], logps, expansion.limit)
        tree.trim(policy.capacity)
        start = timed("head_grow", start)
        fed = policy.feed(tree, state)
        rows = tree.rows(1, fed)
        tree.fed[fed] = True
        start = timed("head_feed", start)
        in_flight.append(stage.compute(Batch(step, rows)))
        timed("stage_admit", start)
        if len(in_flight) <= stages:
            times.clear()
            continue
        children = np.flatnonzero((tree.parent == ROOT) & tree.fed)
        children = children[children != ROOT]
        token = int(tree.token[children[np.argmax(tree.cum[children])]])
        verdict = Verdict(1, stage.length(1), (token,))
        start = time.perf_counter_ns()
        tree.advance(token)
        start = timed("head_follow", start)
        stage.apply([verdict])
        start = timed("stage_apply", start)
        stage.prune(in_flight.popleft())
        timed("stage_prune", start)
    return {name: statistics.median(spent) for name, spent in times.items()}


# --- runs ---------------------------------------------------------------------------------------


def long_text() -> str:
    """More text than any context of the demo target holds."""
    return "\n".join(sample.prompt for sample in emulated.load(emulated.DATA))


def decode(
    options: argparse.Namespace,
    stages: int,
    width: int,
    prompt_tokens: int,
    *,
    truth: Path,
    folder: Path,
) -> tuple[Ran, Trace]:
    """One request, with its trace."""
    trace = folder / "trace.json"
    ran = emulated.run(
        f"{stages} stages, width {width}, context {prompt_tokens}",
        [
            f"cluster.stages={stages}",
            "cluster.devices=[cpu]",
            "pace=fixed",
            f"pace.stage_ms={options.pace_ms:g}",
            "source=synthetic",
            f"source.truth={truth}",
            f"source.curve=[{CURVE}]",
            "source.spread=0.8",
            "source.rounds=2",
            *emulated.method("best_first", width, CHILDREN),
            "feed.row_cost=0",  # full batches, however sure the draft is
            f"decode.max_new_tokens={options.tokens}",
            "decode.ignore_eos=true",
            f"trace={trace}",
        ],
        [Sample("text", "text", long_text())],
        prompt_tokens=prompt_tokens,
        temporary=[folder],
    )
    return ran, Trace.read(trace)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    emulated.add_output(parser)
    parser.add_argument("--stages", type=emulated.numbers, default=[1, 2, 4, 8, 16])
    parser.add_argument("--contexts", type=emulated.numbers, default=[128, 512, 1024, 1536])
    parser.add_argument("--widths", type=emulated.numbers, default=[1, 4, 16, 64])
    parser.add_argument("--width", type=int, default=16, help="but where it varies (16)")
    parser.add_argument("--num-stages", type=int, default=4, help="but where they vary (4)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="but where it varies (128)")
    parser.add_argument("--pace-ms", type=float, default=40.0, help="of every stage (40)")
    parser.add_argument("--tokens", type=int, default=160, help="decoded (160)")
    parser.add_argument(
        "--books", type=emulated.numbers, default=[128, 512, 2048, 8192, 32768], help="contexts"
    )
    options = parser.parse_args()
    if options.quick:
        options.stages, options.tokens, options.books = [1, 4], 40, [128, 2048, 32768]
        options.contexts, options.widths = [128, 1536], [1, 64]

    sweeps = [("stages", n, (n, options.width, options.prompt_tokens)) for n in options.stages]
    sweeps += [("context", n, (options.num_stages, options.width, n)) for n in options.contexts]
    sweeps += [("width", n, (options.num_stages, n, options.prompt_tokens)) for n in options.widths]
    measured: dict[tuple[int, int, int], tuple[Ran, Trace]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for size in dict.fromkeys(size for _, _, size in sweeps):
            truth = folder / f"truth_{size[2]}.jsonl"
            if not truth.exists():
                record_truth(
                    [Sample("text", "text", long_text())],
                    truth,
                    f"decode.max_new_tokens={options.tokens}",
                    prompt_tokens=size[2],
                )
            measured[size] = decode(options, *size, truth=truth, folder=folder)
    rows: list[dict[str, Any]] = []
    for varies, value, size in sweeps:
        ran, trace = measured[size]
        parts = chain(trace, options.pace_ms)
        usual = typical(parts)
        stats = ran.requests[0].stats
        rows.append(
            {
                "varies": varies,
                "value": value,
                "beyond_ms": usual["beyond"],
                **{f"{part}_ms": usual[part] for part in PARTS},
                "mean_ms": statistics.mean(part["beyond"] for part in parts),
                "steps": len(parts),
                "rows_per_step": stats["rows_per_step"],
                "overruns": stats["overruns"],
            }
        )
    ranks = {
        f"{size[0]} stages": phases(trace)
        for varies, _, size in sweeps
        if varies == "stages"
        for _, trace in [measured[size]]
    }
    sizes = {(context, WIDEST) for context in options.books}
    sizes |= {(BOOK_CONTEXT, width) for width in (*options.widths, WIDEST)}
    books = [
        {"context": context, "width": width} | bookkeeping(context, width, 8, 120)
        for context, width in sorted(sizes)
    ]
    title = (
        f"EMULATED (every stage {options.pace_ms:g} ms), SYNTHETIC draft: a step beyond its pace"
    )
    note = (
        f"Means over the middle half of the steps. Where not varied: {options.num_stages} stages, "
        f"width {options.width}, context {options.prompt_tokens}. All ranks share {cores()} cores."
    )
    publish_table(
        title,
        rows,
        path=options.json,
        note=note,
        ranks=ranks,
        books={"title": BOOKS, "unit": "ms", "rows": books},
        overrides={str(size): ran.given for size, (ran, _) in measured.items()},
        settings={str(size): ran.settings for size, (ran, _) in measured.items()},
    )
    for name, of in ranks.items():
        publish_table(f"EMULATED: median ms per step of each rank, {name}", of, path=None)
    publish_table(BOOKS, books, path=None)
    if options.plot:
        draw(title, note, rows, options.plot)
        draw_books(books, options.plot.with_name(f"{options.plot.name}_books"))


BOOKS = "Measured: book-keeping per step of the head and of one stage, no model, 8 steps in flight"


def cores() -> int:
    return len(os.sched_getaffinity(0))


def draw(title: str, note: str, rows: list[dict[str, Any]], path: Path) -> None:
    from benchmarks import plot

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


def draw_books(books: list[dict[str, Any]], path: Path) -> None:
    from benchmarks import plot

    names = [name for name in books[0] if name not in ("context", "width")]
    with plot.figure(path, BOOKS, columns=2, size=(8.4, 3.4)) as panels:
        for axes, varies, fixed, common in (
            (panels[0], "context", "width", WIDEST),
            (panels[1], "width", "context", BOOK_CONTEXT),
        ):
            mine = [b for b in books if b[fixed] == common]
            plot.lines(
                axes,
                {n.replace("_", ": "): [(b[varies], b[n]) for b in mine] for n in names},
                xlabel=f"{varies} ({fixed} {common})",
                ylabel="ms per step",
                log_x=True,
                legend=varies == "context",
            )


if __name__ == "__main__":
    main()
