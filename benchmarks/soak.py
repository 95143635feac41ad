"""Thousands of requests, many at once, some cancelled, in a cluster whose processes are killed.

    python -m benchmarks.soak --json benchmarks/results/soak.json --plot benchmarks/results/soak

Prompts, lengths, greedy or drawn tokens, who is cancelled and who is killed are drawn from the
seed. Half of the prompts begin alike. KV is so short that requests are put back again and again and
text that is kept for others goes. Each text is compared with what the same request got alone and
without the prefix cache, token by token; memory of every process is looked at all along. Ends with
exit code 1 if a token is another, is lost or comes twice, or if slots are held when nothing is
open. Whenever an epoch ends, each stage asserts that every KV slot has as many owners as are
counted (`StageLoop.run`); one that fails ends the run.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks import experiment, plot
from benchmarks.asked import Asked, ask, prompts, settled, short_of_room
from pipespec.client.own import Running, running
from pipespec.cluster.deployment import decide
from pipespec.config.compose import compose
from pipespec.controller.membership import Membership
from pipespec.controller.overview import look
from pipespec.controller.records import CANCELLED
from pipespec.core import Sampling

CONTEXT = 256
PROMPT_TOKENS = 48
ALIKE = 32  # of these, with which half of the prompts begin
# What is open is kept so far above what can be decoded at once, so that some wait.
WAITING = 8


@dataclass(frozen=True)
class Question:
    """A prompt, how its tokens are decided, and the longest answer to it alone."""

    prompt: Sequence[int]
    sampling: Sampling
    answer: list[int]


@dataclass
class Soak:
    """What came of it.

    `memory` is MiB of each process that was there all along, by moments of the run.
    """

    counts: Counter[str] = field(default_factory=Counter)
    memory: list[dict[str, Any]] = field(default_factory=list)
    # The newest word of the head in each epoch.
    statistics: dict[int, dict[str, int]] = field(default_factory=dict)

    def count(self, one: Asked) -> None:
        """A request has ended."""
        assert one.reason is not None
        self.counts["ended"] += 1
        self.counts[one.reason] += 1
        self.counts["tokens"] += len(one.tokens)
        self.counts["different"] += len(one.different)
        self.counts["lost"] += one.lost
        self.counts["doubled"] += one.doubled

    def total(self, name: str) -> int:
        """Of all epochs, as far as was heard."""
        return sum(told.get(name, 0) for told in self.statistics.values())

    @property
    def wrong(self) -> list[str]:
        names = ("different", "lost", "doubled", "slots_held")
        return [f"{name}: {self.counts[name]}" for name in names if self.counts[name]]


def questions(cluster: Running, options: argparse.Namespace) -> list[Question]:
    """Every prompt greedy and drawn, each answered with nothing beside it."""
    found = prompts(cluster.client, options.num_prompts, PROMPT_TOKENS)
    for i in range(0, len(found), 2):
        found[i] = found[0][:ALIKE] + found[i][: PROMPT_TOKENS - ALIKE]
    alone = [
        Asked(prompt, sampling, options.tokens)
        for i, prompt in enumerate(found)
        for sampling in (Sampling(), Sampling(temperature=0.9, top_p=0.9, seed=i))
    ]
    ask(cluster, alone, at_once=1)
    return [Question(one.prompt, one.sampling, one.tokens) for one in alone]


def run(cluster: Running, known: list[Question], options: argparse.Namespace) -> Soak:
    """Ask, cancel and kill until all requests have ended."""
    soak, drawn = Soak(), random.Random(options.seed)
    kills = sorted(drawn.sample(range(options.requests), options.kills))
    note(soak, cluster, 0)

    def on_events(over: list[Asked]) -> None:
        for one in over:
            soak.count(one)
        ended = soak.counts["ended"]
        while kills and ended >= kills[0]:
            kills.pop(0)
            note(soak, cluster, ended)
            kill(cluster, drawn)
            soak.counts["kills"] += 1
        if ended >= options.every * len(soak.memory):
            note(soak, cluster, ended)
            print(f"{ended} of {options.requests}: {dict(soak.counts)}", file=sys.stderr)

    coming = (draw(drawn, known, options) for _ in range(options.requests))
    ask(cluster, coming, at_once=options.at_once + WAITING, on_events=on_events)
    told = settled(cluster)
    soak.counts["slots_held"] = -1 if told is None else told["kv_slots_held"]
    note(soak, cluster, soak.counts["ended"])
    return soak


def draw(drawn: random.Random, known: list[Question], options: argparse.Namespace) -> Asked:
    question = drawn.choice(known)
    length = drawn.randint(1, options.tokens)
    doomed = drawn.randint(0, length) if drawn.random() < options.cancelled else None
    return Asked(question.prompt, question.sampling, length, question.answer[:length], doomed)


def kill(cluster: Running, drawn: random.Random) -> None:
    """End a worker with SIGKILL."""
    session = cluster.cluster
    with Membership(session.url, session.namespace) as shared:
        alive = shared.alive(session.deployment.workers)
    if alive:
        os.kill(alive[drawn.choice(sorted(alive))], signal.SIGKILL)


def note(soak: Soak, cluster: Running, ended: int) -> None:
    """Look at the memory of all processes and at what the head says."""
    session = cluster.cluster
    told = look(session.url, session.namespace)
    if told is not None and told.statistics:
        soak.statistics[told.epoch] = told.statistics
    everyone = [psutil.Process(), *psutil.Process().children(recursive=True)]
    with Membership(session.url, session.namespace) as shared:
        workers = {pid: name for name, pid in shared.alive(session.deployment.workers).items()}
    sizes: dict[str, float] = {}
    for process in everyone:
        try:
            name = workers.get(process.pid) or (
                process.name() if "redis" in process.name() else None
            )
            if process.pid == os.getpid():
                name = "launcher"
            if name is not None:
                sizes[f"{name} {process.pid}"] = process.memory_full_info().uss / 2**20
        except psutil.NoSuchProcess:
            continue
    soak.memory.append({"ended": ended, "mib": sizes})


def row(soak: Soak, seconds: float) -> dict[str, Any]:
    counts = soak.counts
    return {
        "requests": counts["ended"],
        "tokens": counts["tokens"],
        "cancelled": counts[CANCELLED],
        "kills": counts["kills"],
        "epochs": len(soak.statistics),
        "preemptions_at_least": soak.total("preemptions"),
        "found_in_kv_at_least": soak.total("cache_hits"),
        "different": counts["different"],
        "lost": counts["lost"],
        "doubled": counts["doubled"],
        "slots_held": counts["slots_held"],
        "seconds": seconds,
    }


def plotted(title: str, soak: Soak, path: Path) -> None:
    series: dict[str, list[tuple[float, float]]] = {}
    for moment in soak.memory:
        for name, mib in moment["mib"].items():
            series.setdefault(name, []).append((moment["ended"], mib))
    longest = {name: points for name, points in series.items() if len(points) > 2}
    colours = dict(zip(longest, plot.COLOURS * 9, strict=False))
    with plot.figure(path, title, size=(7.0, 3.6)) as (axes,):
        plot.lines(
            axes,
            longest,
            xlabel="requests that have ended",
            ylabel="memory of a process, MiB",
            colours=colours,
        )


def main() -> None:
    parser = experiment.parser(__doc__, plot=True)
    parser.add_argument("--requests", type=int, default=2000, help="(2000)")
    parser.add_argument("--kills", type=int, default=10, help="of workers (10)")
    parser.add_argument("--cancelled", type=float, default=0.1, help="share (0.1)")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer at most (48)")
    parser.add_argument("--num-prompts", type=int, default=12, help="(12)")
    parser.add_argument("--at-once", type=int, default=32, help="scheduler.max_num_seqs (32)")
    parser.add_argument("--kv", default="2MiB", help="model.kv_memory (2MiB)")
    parser.add_argument("--stages", type=int, default=2, help="(2)")
    parser.add_argument("--every", type=int, default=100, help="requests between looks (100)")
    parser.add_argument("--seed", type=int, default=1)
    options = experiment.parse(parser, requests=60, kills=1, num_prompts=3, tokens=24, every=20)
    given = {"stages": options.stages, "kv": options.kv, "at_once": options.at_once}
    settings = [*short_of_room(**given, context=CONTEXT), "feed.capacity=256"]
    began = time.monotonic()
    with running(decide(compose([*settings, "scheduler.prefix_cache=false"]))) as cluster:
        known = questions(cluster, options)
    with running(decide(compose(settings))) as cluster:
        soak = run(cluster, known, options)
    rows = [row(soak, time.monotonic() - began)]
    title = (
        f"{options.requests} requests, up to {options.at_once} at once, {options.stages} stages, "
        f"KV of {options.kv} a rank"
    )
    experiment.publish(
        options,
        title,
        rows,
        draw=partial(plotted, title, soak),
        counts=dict(soak.counts),
        memory=soak.memory,
        statistics={str(epoch): told for epoch, told in soak.statistics.items()},
        settings=settings,
    )
    if soak.wrong:
        sys.exit("; ".join(soak.wrong))
    print("Every text is the one that its request gets alone, token for token.")


if __name__ == "__main__":
    main()
