"""The cost of the controller: the hop between two ranks, and Redis' work per rank and step.

    python -m benchmarks.budgets.controller_hop --stages 8 --steps 2000 --json controller.json
    python -m benchmarks.budgets.controller_hop --connection tls    # as from other hosts

*hop*: from the completion of a task by one rank until a rank in another process, which waits for
it, continues. Half of a round trip between two processes, so no two clocks are compared. PING is
the round trip of a Redis PING over the same kind of connection, taken in turn. Medians.

*work*: lockstep steps of all ranks, driven from one process; Redis' own figures of the time of its
commands (`INFO commandstats`) and of its whole process (`INFO cpu`, which includes the network).
"""

from __future__ import annotations

import multiprocessing
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict

from benchmarks.common import experiment
from benchmarks.common.experiment import Row
from pipespec.controller import epoch_control
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.controller.log_records import Accepted
from pipespec.controller.rank_controller import Controller
from pipespec.controller.redis_connection import RedisConnection, check_server
from pipespec.controller.task_graph import Graph, compute, prune, step_graph, transfer
from pipespec.system.network_interfaces import LOOPBACK

NAMESPACE = "benchmark"
UNIX, TCP, TLS = "unix", "tcp", "tls"
# Steps of the round trips that are submitted before they start, so that only hops are timed.
ROUND = 200


def median(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e6


def round_trip(step: int) -> Graph:
    """Rank 0 computes, rank 1 prunes and computes, rank 0 prunes."""
    tasks = (compute(0, step), prune(1, step), compute(1, step), prune(0, step))
    edges = ((tasks[0], tasks[1]), (tasks[2], tasks[3]))
    return Graph(step, tasks, edges)


def echo(url: str, epoch: int, steps: int) -> None:
    """Rank 1 of the round trip."""
    with Controller(url, namespace=NAMESPACE, epoch=epoch, rank=1) as controller:
        for step in range(steps):
            payload = controller.wait(prune(1, step))
            assert payload is not None
            controller.complete([prune(1, step), compute(1, step)], payload)


def measure_hop(url: str, rounds: int) -> list[Row]:
    epoch = epoch_control.begin_epoch(url, NAMESPACE)
    context = multiprocessing.get_context("spawn")
    other = context.Process(target=echo, args=(url, epoch, rounds * ROUND))
    other.start()
    pings: list[float] = []
    hops: list[float] = []
    payload = b"12345678" * 4
    pipe = RedisConnection(url)
    with Controller(url, namespace=NAMESPACE, epoch=epoch, rank=0) as controller:
        for first in range(0, rounds * ROUND, ROUND):
            steps = range(first, first + ROUND)
            for step in steps:
                controller.submit(round_trip(step))
            for step in steps:
                pings.append(timed(lambda: pipe.call("PING")))
                started = time.perf_counter()
                controller.complete([compute(0, step)], payload)
                controller.wait(prune(0, step))
                hops.append((time.perf_counter() - started) / 2)
                controller.complete([prune(0, step)])
    pipe.close()
    other.join()
    ping = median(pings)
    return [
        Row("Redis PING round trip", ping),
        Row("Redis PING round trip, 99th percentile", statistics.quantiles(pings, n=100)[98] * 1e6),
        Row("hop: complete -> ready elsewhere", median(hops), budget=2 * ping),
        Row("hop / PING", median(hops) / ping, budget=2),
    ]


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def redis_times(pipe: RedisConnection) -> tuple[float, float]:
    """Seconds that Redis has spent on our commands, and in all."""
    commands = pipe.call("INFO", "commandstats").decode()
    ours = re.findall(r"cmdstat_(?:evalsha|blpop):calls=\d+,usec=(\d+)", commands)
    cpu = pipe.call("INFO", "cpu").decode()
    whole = re.findall(r"^used_cpu_(?:user|sys):([\d.]+)", cpu, re.MULTILINE)
    return sum(map(int, ours)) / 1e6, sum(map(float, whole))


def measure_work(url: str, stages: int, steps: int) -> list[Row]:
    last, everyone = stages, range(stages + 1)
    epoch = epoch_control.begin_epoch(url, NAMESPACE)
    ranks = [Controller(url, namespace=NAMESPACE, epoch=epoch, rank=rank) for rank in everyone]
    head = ranks[0]
    request = head.enqueue(prompt=(1,), max_new_tokens=steps)
    pipe = RedisConnection(url)
    verdict = b"12345678" * 4
    submits, completes = [], []
    before = redis_times(pipe)
    for step in range(steps):
        submits.append(timed(lambda step=step: head.submit(step_graph(stages, step))))
        ranks[last].complete([compute(last, step), prune(last, step)], verdict)
        for rank in range(last):
            ranks[rank].wait(prune(rank, step))
            tasks = [compute(rank, step), prune(rank, step), transfer(rank, step)]
            completes.append(timed(lambda rank=rank, tasks=tasks: ranks[rank].complete(tasks)))
        head.accept([(request, Accepted(step + 1, (step,)))])
    for controller in ranks:
        controller.wait(prune(controller.rank, steps), 0)
    head.tokens(request)
    after = redis_times(pipe)
    for controller in ranks:
        controller.close()
    pipe.close()
    share = 1e6 / (steps * len(ranks))
    return [
        Row("Redis: commands, per rank and step", (after[0] - before[0]) * share, budget=50),
        Row("Redis: whole process, per rank and step", (after[1] - before[1]) * share),
        Row("head: submit a step", median(submits)),
        Row("rank: complete a step", median(completes)),
    ]


def main() -> None:
    parser = experiment.parser(__doc__)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument(
        "--connection",
        choices=(UNIX, TCP, TLS),
        default=UNIX,
        help="how ranks reach Redis; tls: by its own, or by a process in front of one without",
    )
    options = experiment.parse(parser, steps=200)
    port = None if options.connection == UNIX else 0
    with EmbeddedRedis(port=port, tls=options.connection == TLS) as server:
        url = server.url if port is None else server.url_at(LOOPBACK)
        front = ", a process in front of it" if server.proxy_pid is not None else ""
        title = (
            f"Controller: {options.stages} stages, {options.steps} steps, "
            f"Redis {check_server(server.url)} over {options.connection}{front}, µs"
        )
        rows = measure_hop(url, rounds=max(1, options.steps // ROUND))
        rows += measure_work(url, options.stages, options.steps)
    experiment.publish(options, title, [asdict(row) for row in rows], unit="µs")


if __name__ == "__main__":
    main()
