"""Thousands of requests, many at once, some cancelled, in a cluster whose workers are killed.

    python -m benchmarks.faults.soak --json benchmarks/results/soak.json \\
        --plot benchmarks/results/soak

Prompts, lengths, sampling, cancelled requests and killed workers are random, from the seed. Half of
the prompts share their first tokens. The KV pools are so small that requests are preempted again
and again and cached prefixes are evicted. Each answer is compared with that of the same request
alone and without the prefix cache, token by token; the memory of every process is recorded
throughout. The exit code is 1 if a token differs, is lost or comes twice, or if KV slots are held
when no request is unfinished. Whenever an epoch ends, each stage asserts that every KV slot has as
many owners as are counted (`StageLoop.run`); a failure ends the run.
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

from benchmarks.common import experiment, plot
from benchmarks.common.checked_requests import (
    CheckedRequest,
    idle_statistics,
    run_requests,
    shipped_prompts,
    small_kv_settings,
)
from pipespec.client.local_cluster import Running, running
from pipespec.cluster.deployment import decide
from pipespec.config.compose import compose
from pipespec.controller.cluster_status import read_status
from pipespec.controller.log_records import CANCELLED
from pipespec.controller.membership import Membership
from pipespec.core import SamplingParams

CONTEXT = 256
PROMPT_TOKENS = 48
SHARED = 32  # of these, the same in half of the prompts
# So many more requests are unfinished than can be decoded at once, so that some wait.
WAITING = 8


@dataclass(frozen=True)
class KnownAnswer:
    """A prompt, its sampling parameters, and its longest answer when it runs alone."""

    prompt: Sequence[int]
    sampling: SamplingParams
    answer: list[int]


@dataclass
class SoakResult:
    """The counts of a run.

    `memory` has the MiB of each process at several times of the run.
    """

    counts: Counter[str] = field(default_factory=Counter)
    memory: list[dict[str, Any]] = field(default_factory=list)
    # The head's last statistics of each epoch.
    statistics: dict[int, dict[str, int]] = field(default_factory=dict)

    def count(self, request: CheckedRequest) -> None:
        """Count a request that has ended."""
        assert request.reason is not None
        self.counts["ended"] += 1
        self.counts[request.reason] += 1
        self.counts["tokens"] += len(request.tokens)
        self.counts["different"] += len(request.wrong_positions)
        self.counts["lost"] += request.lost
        self.counts["doubled"] += request.doubled

    def total(self, name: str) -> int:
        """A statistic summed over the epochs, as last reported in each."""
        return sum(overview.get(name, 0) for overview in self.statistics.values())

    @property
    def wrong(self) -> list[str]:
        names = ("different", "lost", "doubled", "slots_held")
        return [f"{name}: {self.counts[name]}" for name in names if self.counts[name]]


def known_answers(cluster: Running, options: argparse.Namespace) -> list[KnownAnswer]:
    """Answers to every prompt, greedy and sampled, each request alone."""
    found = shipped_prompts(cluster.client, options.num_prompts, PROMPT_TOKENS)
    for i in range(0, len(found), 2):
        found[i] = found[0][:SHARED] + found[i][: PROMPT_TOKENS - SHARED]
    alone = [
        CheckedRequest(prompt, sampling, options.tokens)
        for i, prompt in enumerate(found)
        for sampling in (SamplingParams(), SamplingParams(temperature=0.9, top_p=0.9, seed=i))
    ]
    run_requests(cluster, alone, concurrency=1)
    return [KnownAnswer(request.prompt, request.sampling, request.tokens) for request in alone]


def run(cluster: Running, known: list[KnownAnswer], options: argparse.Namespace) -> SoakResult:
    """Send and cancel requests and kill workers until all requests have ended."""
    soak, rng = SoakResult(), random.Random(options.seed)
    kills = sorted(rng.sample(range(options.requests), options.kills))
    record(soak, cluster, 0)

    def on_events(ended_requests: list[CheckedRequest]) -> None:
        for request in ended_requests:
            soak.count(request)
        ended = soak.counts["ended"]
        while kills and ended >= kills[0]:
            kills.pop(0)
            record(soak, cluster, ended)
            kill(cluster, rng)
            soak.counts["kills"] += 1
        if ended >= options.every * len(soak.memory):
            record(soak, cluster, ended)
            print(f"{ended} of {options.requests}: {dict(soak.counts)}", file=sys.stderr)

    requests = (draw_request(rng, known, options) for _ in range(options.requests))
    run_requests(cluster, requests, concurrency=options.at_once + WAITING, on_events=on_events)
    overview = idle_statistics(cluster)
    soak.counts["slots_held"] = -1 if overview is None else overview["kv_slots_held"]
    record(soak, cluster, soak.counts["ended"])
    return soak


def draw_request(
    rng: random.Random, known: list[KnownAnswer], options: argparse.Namespace
) -> CheckedRequest:
    known_answer = rng.choice(known)
    length = rng.randint(1, options.tokens)
    cancel_after = rng.randint(0, length) if rng.random() < options.cancelled else None
    return CheckedRequest(
        known_answer.prompt,
        known_answer.sampling,
        length,
        known_answer.answer[:length],
        cancel_after,
    )


def kill(cluster: Running, rng: random.Random) -> None:
    """Kill a worker with SIGKILL."""
    session = cluster.cluster
    with Membership(session.url, session.namespace) as shared:
        alive = shared.alive(session.deployment.workers)
    if alive:
        os.kill(alive[rng.choice(sorted(alive))], signal.SIGKILL)


def record(soak: SoakResult, cluster: Running, ended: int) -> None:
    """Record the memory of all processes and the head's statistics."""
    session = cluster.cluster
    overview = read_status(session.url, session.namespace)
    if overview is not None and overview.statistics:
        soak.statistics[overview.epoch] = overview.statistics
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


def row(soak: SoakResult, seconds: float) -> dict[str, Any]:
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


def draw_memory(title: str, soak: SoakResult, path: Path) -> None:
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
    parser.add_argument("--kills", type=int, default=10, help="workers that are killed (10)")
    parser.add_argument("--cancelled", type=float, default=0.1, help="share (0.1)")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer at most (48)")
    parser.add_argument("--num-prompts", type=int, default=12, help="(12)")
    parser.add_argument("--at-once", type=int, default=32, help="scheduler.max_num_seqs (32)")
    parser.add_argument("--kv", default="2MiB", help="model.kv_memory (2MiB)")
    parser.add_argument("--stages", type=int, default=2, help="(2)")
    parser.add_argument(
        "--every", type=int, default=100, help="requests between records of memory (100)"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = experiment.parse(parser, requests=60, kills=1, num_prompts=3, tokens=24, every=20)
    given = {"stages": options.stages, "kv": options.kv, "concurrency": options.at_once}
    settings = [*small_kv_settings(**given, context=CONTEXT), "policy.capacity=256"]
    began = time.monotonic()
    with running(decide(compose([*settings, "scheduler.prefix_cache=false"]))) as cluster:
        known = known_answers(cluster, options)
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
        draw=partial(draw_memory, title, soak),
        counts=dict(soak.counts),
        memory=soak.memory,
        statistics={str(epoch): overview for epoch, overview in soak.statistics.items()},
        settings=settings,
    )
    if soak.wrong:
        sys.exit("; ".join(soak.wrong))
    print("Every answer is that of the request alone, token for token.")


if __name__ == "__main__":
    main()
