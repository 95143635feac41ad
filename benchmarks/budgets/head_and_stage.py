"""The runtime's own work per step beside its budgets: the head's tree, a stage's verdict.

python -m benchmarks.budgets.head_and_stage [--json FILE]
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from benchmarks.common import experiment
from benchmarks.common.experiment import Row
from pipespec.controller import epoch_control
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.controller.rank_controller import Controller
from pipespec.core import Batch, Verdict
from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.engine.slice.runner import SliceRunner
from pipespec.extras.emulation.machine import TimeCurve
from pipespec.extras.emulation.synthetic_proposer import Accuracy
from pipespec.extras.plan.pipeline_times import Machine
from pipespec.extras.plan.simulation import SimulatedPipeline
from pipespec.head.policies.best_first import BestFirst
from pipespec.head.policies.policy import PipelineState
from pipespec.head.proposer import Context
from pipespec.head.tree import ROOT, Tree
from pipespec.head.tree_telemetry import STEP, StepSnapshot, TreeSnapshot
from pipespec.transport.wire import Wire

WIDTH, CHILDREN, LIVE = 64, 16, 600
CHUNK = 512  # rows of prompts in one batch
NAMESPACE = "budgets"
STATE = PipelineState(num_stages=8, step=0)
# What a runner asks of a model before it computes.
NO_MODEL = cast(ModelSlice, SimpleNamespace(parallel=SimpleNamespace(size=1), recurrent=False))


def grown_tree(rng: np.random.Generator, nodes: int) -> Tree:
    """A tree of `nodes` nodes, most of them scheduled, as it is before a verdict."""
    tree = Tree(0, -1, 0, 0, fed=True)
    policy = BestFirst(WIDTH, CHILDREN)
    while len(tree) < nodes:
        chosen = policy.select_to_expand(tree, STATE).nodes[
            : max(1, (nodes - len(tree)) // CHILDREN)
        ]
        tokens = np.stack([rng.permutation(1000)[:CHILDREN] for _ in chosen])
        logps = np.log(rng.dirichlet(np.full(CHILDREN, 0.3), len(chosen)) + 1e-9)
        tree.add_children(chosen, tokens, logps)
        tree.fed[tree.most_probable(np.flatnonzero(~tree.fed), WIDTH)] = True
    return tree


def median_ms(prepare: Callable[[], object], run: Callable[[object], None], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        state = prepare()
        start = time.perf_counter_ns()
        run(state)
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1e6


def head(repeats: int) -> float:
    """Advance the tree by one accepted token and choose the next 64 nodes to schedule."""
    rng = np.random.default_rng(0)
    tree = grown_tree(rng, LIVE)
    policy = BestFirst(WIDTH, CHILDREN)
    likely = int(np.flatnonzero(tree.parent[1:] == ROOT)[0]) + 1
    token = int(tree.token[likely])

    def run(state: object) -> None:
        assert isinstance(state, Tree)
        state.advance([token])
        state.rows(1, policy.select_to_schedule(state, STATE))

    return median_ms(lambda: copy.deepcopy(tree), run, repeats)


def publish_tree(repeats: int) -> float:
    """Publish a step of the head with the tree of one request: the time of the head's own thread,
    with a real Redis."""
    tree = grown_tree(np.random.default_rng(0), LIVE)
    with EmbeddedRedis() as redis:
        epoch = epoch_control.begin_epoch(redis.url, NAMESPACE)
        with Controller(redis.url, namespace=NAMESPACE, epoch=epoch, rank=0) as controller:

            def run(state: object) -> None:
                assert isinstance(state, Tree)
                shown = TreeSnapshot.of(state, 1000, (1, 2)).pack()
                controller.publish_step({STEP: StepSnapshot(1, 1, WIDTH, 0).pack(), "1": shown})

            return median_ms(lambda: tree, run, repeats)


def stage(repeats: int, context: int, width: int) -> float:
    """Apply a verdict of one token at a stage that holds 9 steps of `width` rows."""
    rng = np.random.default_rng(0)
    tree = grown_tree(rng, 9 * width)
    runner = SliceRunner(NO_MODEL, context + 10 * width)
    text = Context(1, [0] * context, [*range(1, context), 0])  # ends with the tree's root
    for start in range(0, context, CHUNK):
        runner._admit(Batch(0, text.rows(start, min(start + CHUNK, context))))
    runner._admit(Batch(0, tree.rows(1, np.arange(1, len(tree)))))
    verdict = Verdict(1, context, (int(tree.token[1]),))

    def run(state: object) -> None:
        assert isinstance(state, SliceRunner)
        state.apply([verdict])

    return median_ms(lambda: copy.deepcopy(runner), run, repeats)


def head_of_many(steps: int, requests: int) -> float:
    """Apply a step's verdicts on many requests, choose the next rows and pack them.

    Draft and stages are simulated.
    """
    machine = Machine((TimeCurve(((1, 1.0),)),) * STATE.num_stages)
    draft = Accuracy({1: 0.74, 32: 0.99}, spread=0.8)
    simulated = SimulatedPipeline(
        BestFirst(WIDTH, CHILDREN), machine, draft, 2, 60 * requests, 0, requests, WIDTH
    )
    wire = Wire(1, WIDTH, 8, torch.float32, max_finished=requests)
    spent = [0]

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter_ns()
            found = call(*arguments, **named)
            if isinstance(found, Batch):
                wire.pack(found)
            spent[0] += time.perf_counter_ns() - start
            return found

        return run

    scheduler: Any = simulated.scheduler
    scheduler.admission.preempt = timed(scheduler.admission.preempt)
    for name in ("apply", "end_verdicts", "plan_batch", "next_refill", "next_batch"):
        setattr(scheduler, name, timed(getattr(scheduler, name)))
    times = []
    for _ in range(2 * STATE.num_stages + steps):
        spent[0] = 0
        simulated.step()
        times.append(spent[0])
    return statistics.median(times[2 * STATE.num_stages :]) / 1e6


def stage_of_many(repeats: int, requests: int, context: int) -> tuple[float, float]:
    """Allocate slots and a plan for 64 rows of many sequences; apply a verdict on each of them."""
    runner = SliceRunner(NO_MODEL, requests * (context + 8))
    per_step = max(WIDTH // requests, 1)
    rows, verdicts = [], []
    for number in range(requests):
        rng = np.random.default_rng(number)
        text = Context(number, rng.integers(0, 99, context).tolist(), list(range(context)))
        runner._admit(Batch(0, text.rows(0)))
        tree = Tree(context - 1, context - 2, text.tokens[-1], context - 1, fed=True)
        tree.add_children(np.array([ROOT]), np.arange(4)[None], np.log(np.full((1, 4), 0.25)))
        runner._admit(Batch(0, tree.rows(number, np.arange(1, 3))))
        rows.append(tree.rows(number, np.arange(3, 3 + per_step)))
        verdicts.append(Verdict(number, context, (0,)))
    batch = Batch(1, np.concatenate(rows))

    def admit(state: object) -> None:
        assert isinstance(state, SliceRunner)
        state._plan(*state._admit(batch))

    def apply(state: object) -> None:
        assert isinstance(state, SliceRunner)
        state.apply(verdicts)

    fresh = partial(copy.deepcopy, runner)
    return median_ms(fresh, admit, repeats), median_ms(fresh, apply, repeats)


def main() -> None:
    parser = experiment.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=300)
    options = experiment.parse(parser, repeats=20)
    name = f"head: prune and schedule, w={WIDTH}, {CHILDREN} children, {LIVE} nodes"
    rows = [Row(name, head(options.repeats), budget=0.3)]
    name = f"head: publish a step and a tree of {LIVE} nodes"
    rows.append(Row(name, publish_tree(options.repeats), budget=0.2))
    for context in (128, 8192, 32768):
        for width in (16, 64):
            name = f"stage: apply a verdict, width {width}, context {context}"
            rows.append(Row(name, stage(options.repeats, context, width), budget=0.1))
    few = max(options.repeats // 10, 3)
    name = f"head: verdicts, choice and packing of 64 requests, {WIDTH} rows"
    rows.append(Row(name, head_of_many(few, 64), budget=1.5))
    admitted, _ = stage_of_many(few, 32, 128)
    rows.append(Row("stage: admit and plan 64 rows of 32 requests", admitted, budget=1.0))
    _, applied = stage_of_many(few, 64, 128)
    rows.append(Row("stage: apply a verdict on each of 64 requests", applied, budget=1.0))
    experiment.publish(options, "Runtime budgets, ms", [asdict(row) for row in rows], unit="ms")


if __name__ == "__main__":
    main()
