"""Where the time of a stage or a draft round on a GPU goes, by kernel. MEASURED.

    python -m benchmarks.budgets.gpu_kernels --shape llama-70b --layers 10 --json FILE
    python -m benchmarks.budgets.gpu_kernels --shape llama-1b --layers 16 --draft --rows 16

A batch of a random tree below a text, in CUDA graphs, random weights. `span` is from the first
kernel's start to the last one's end, under torch's profiler; `busy` is the sum of the kernels;
`ms` is the time of the whole step without the profiler.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.budgets.hardware import now_ms
from benchmarks.budgets.stage_time import CHILDREN, SHAPES
from benchmarks.budgets.timed_stage import TimedStage, draft_rows, random_tree
from benchmarks.common import experiment
from pipespec.head.proposers.draft_model import DraftModelProposer
from pipespec.head.proposers.proposer import ProposalRequest

BUCKET, MOST_NODES = 64, 640
TIMES = 12
NAME = 100  # characters of a kernel's name


def work(stage: TimedStage, rows: int, context: int, *, draft: bool) -> Callable[[], float]:
    """A step, or a draft round, that can be repeated; it returns its milliseconds."""
    text = stage.hold_text(context)
    rewind = stage.remember()
    tree = random_tree(rows, context, stage.shape.vocab)
    if draft:
        proposer = DraftModelProposer(stage, chunk=1, vocabulary=stage.shape.vocab)
        requests = [ProposalRequest(text, tree, np.arange(1, len(tree)))]
    else:
        batch = stage.batch(draft_rows(tree))

    def once() -> float:
        rewind()
        began = now_ms(stage.model.device)
        if draft:
            proposer.propose(requests, CHILDREN)
        else:
            stage.compute(batch)
        return now_ms(stage.model.device) - began

    return once


def kernels(once: Callable[[], float]) -> dict[str, Any]:
    """One run under the profiler."""
    took: Counter[str] = Counter()
    count: Counter[str] = Counter()
    spans = []
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        once()
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            took[event.name[:NAME]] += event.time_range.elapsed_us()
            count[event.name[:NAME]] += 1
            spans.append((event.time_range.start, event.time_range.end))
    return {
        "kernels": sum(count.values()),
        "busy_us": sum(took.values()),
        "span_us": max(end for _, end in spans) - min(start for start, _ in spans),
        "rows": [
            {"kernel": name, "us": us, "count": count[name]} for name, us in took.most_common()
        ],
    }


def main() -> None:
    parser = experiment.parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-70b")
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--draft", action="store_true", help="a draft round of the whole model")
    parser.add_argument("--compile", action="store_true", help="by torch.compile")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=2048)
    options = experiment.parse(parser, layers=2)
    where = {"dtype": torch.bfloat16, "device": torch.device("cuda"), "attention": "triton"}
    layers = range(options.layers) if options.draft else range(1, 1 + options.layers)
    of = options.layers if options.draft else options.layers + 2
    stage = TimedStage(SHAPES[options.shape], of, layers, options.context + MOST_NODES, where)
    if options.compile:
        stage.model.compile()
    stage.model.capture_graphs([BUCKET])
    if options.draft:
        stage.model.capture_head([BUCKET])
    once = work(stage, options.rows, options.context, draft=options.draft)
    ms = statistics.median([once() for _ in range(TIMES)][2:])
    device = torch.cuda.get_device_name()
    title = f"MEASURED: kernels of {options.layers} layers of {options.shape} on {device}"
    result = kernels(once) | {"ms": ms, "refused": stage.model.refused}
    rows = result.pop("rows")
    experiment.publish(options, title, rows, device=device, torch=torch.__version__, **result)


if __name__ == "__main__":
    main()
