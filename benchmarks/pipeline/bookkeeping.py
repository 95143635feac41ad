"""The bookkeeping of the head and of one stage per step: tree, lineage and slots.

MEASURED, in milliseconds, without model, wire, processes or emulation, so also for contexts beyond
the demo target's. The stage has the rows of all steps in flight, as in a run.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import plot
from pipespec.core import Batch, Verdict
from pipespec.engine.runner import SliceRunner
from pipespec.head.policies.best_first import BestFirst
from pipespec.head.policies.policy import PipelineState
from pipespec.head.proposers.proposer import Context
from pipespec.head.tree import ROOT, Tree

TITLE = "Measured: bookkeeping per step of the head and of one stage, no model, 8 steps in flight"
STAGES, STEPS, CHILDREN = 8, 120, 16
# The values while the other is varied.
WIDEST, LONG = 64, 8192


class NoLayers:
    """A model without layers, for a stage of which only the bookkeeping is timed."""

    vocab_size = 1000

    def forward(self, inputs: torch.Tensor, positions: torch.Tensor, plan: object) -> torch.Tensor:
        return torch.zeros(len(inputs), 1)


def measure(context: int, width: int, stages: int, steps: int) -> dict[str, float]:
    """Median milliseconds per step of head and stage for tree, lineage and slots.

    The tree grows at random and is scheduled by `best_first`; in each step a verdict accepts the
    most probable scheduled child of the root, so that the stage has the rows of all steps in
    flight.
    """
    rng = np.random.default_rng(0)
    stage = SliceRunner(NoLayers(), context + steps + (stages + 2) * width)  # type: ignore[arg-type]
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
        expansion = policy.select_to_expand(tree, state)
        nodes = len(expansion.nodes)
        tokens = rng.permuted(np.tile(np.arange(NoLayers.vocab_size), (nodes, 1)), axis=1)
        logps = np.log(rng.dirichlet(np.full(CHILDREN, 0.3), nodes) + 1e-9)
        start = time.perf_counter_ns()
        tree.add_children(expansion.nodes, tokens[:, :CHILDREN], logps, expansion.limit)
        tree.trim(policy.max_nodes)
        start = timed("head_expand", start)
        fed = policy.select_to_schedule(tree, state)
        rows = tree.rows(1, fed)
        tree.fed[fed] = True
        start = timed("head_schedule", start)
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
        start = timed("head_advance", start)
        stage.apply([verdict])
        start = timed("stage_apply", start)
        stage.prune(in_flight.popleft())
        timed("stage_prune", start)
    return {name: statistics.median(spent) for name, spent in times.items()}


def table(contexts: Sequence[int], widths: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each context at the largest width, and for each width at one context."""
    sizes = {(context, WIDEST) for context in contexts}
    sizes |= {(LONG, width) for width in (*widths, WIDEST)}
    return [
        {"context": context, "width": width} | measure(context, width, STAGES, STEPS)
        for context, width in sorted(sizes)
    ]


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    names = [name for name in rows[0] if name not in ("context", "width")]
    with plot.figure(path, TITLE, columns=2, size=(8.4, 3.4)) as panels:
        for axes, varies, fixed, common in (
            (panels[0], "context", "width", WIDEST),
            (panels[1], "width", "context", LONG),
        ):
            mine = [row for row in rows if row[fixed] == common]
            plot.lines(
                axes,
                {n.replace("_", ": "): [(row[varies], row[n]) for row in mine] for n in names},
                xlabel=f"{varies} ({fixed} {common})",
                ylabel="ms per step",
                log_x=True,
                legend=varies == "context",
            )
