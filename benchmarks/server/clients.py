"""Clients that connect, read slowly and disconnect at any time: does the server keep anything?

    python -m benchmarks.server.clients --json benchmarks/results/clients.json --plot PATH

In every round many clients send a request at once, streamed or not, for a chat or a completion,
with one answer or several; some read slowly, some disconnect before the first token, later, or
while they wait for a whole reply. After each round the gauges of /metrics and /load must be zero,
the head must hold no KV slot, a new request must be answered, and the memory of every process is
recorded.

Redis keeps finished requests for an hour. After each round the keys that would expire are deleted,
as if the hour had passed; keys without expiry would accumulate. The exit code is 1 if anything is
left, or if a process grew faster than a stated rate in the later half.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.common import experiment, plot
from pipespec.client.registry import RunningCluster
from pipespec.controller.cluster_status import read_status
from pipespec.controller.redis_connection import RedisConnection
from pipespec.controller.redis_keys import RedisKeys
from tools.rig.http_server import HttpServer, ServerAddress, ServerFailed, find_cluster, processes
from tools.rig.http_streams import STAY, Behaviour, Stream, read_stream

PROMPTS = (
    "Once upon a time there was a king who",
    "The little girl ran out of the house and",
    "Tom has three apples and buys four more. How many",
)
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
# Seconds after a round until nothing is left, and until a new request is answered.
REST_S, ANSWER_S = 30.0, 10.0
POLL_S = 0.1
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
# MiB by which a process may grow in a thousand requests, in the later half of a run.
GROWTH = 1.0
# Keys that come and go while nothing happens: leases, lists of tasks, marks.
FEW_KEYS = 5


@dataclass(frozen=True)
class ClientRequest:
    """A client's request, and how the client behaves."""

    path: str
    body: dict[str, Any]
    behaviour: Behaviour

    @classmethod
    def at_random(cls, rng: random.Random, tokens: int) -> ClientRequest:
        streamed = rng.random() < 0.7
        text = rng.choice(PROMPTS)
        path = rng.choice((CHAT, COMPLETION))
        messages = {"messages": [{"role": "user", "content": text}]}
        body: dict[str, Any] = messages if path == CHAT else {"prompt": text}
        body |= {"n": rng.randint(1, 3), "max_tokens": rng.randint(1, tokens)}
        body |= {"stream": streamed, "ignore_eos": True, "seed": rng.randrange(1000)}
        kind = rng.choice(("stay", "stay", "slow", "at once", "in the middle"))
        if kind == "slow":
            return cls(path, body, Behaviour(pause_s=0.05))
        if kind == "at once":
            return cls(path, body, Behaviour(leave_s=rng.uniform(0, 0.2)))
        if kind == "in the middle":
            if streamed:
                return cls(path, body, Behaviour(leave_after=rng.randint(1, tokens)))
            return cls(path, body, Behaviour(leave_s=rng.uniform(0, 2)))
        return cls(path, body, STAY)


def outcome(request: ClientRequest, stream: Stream) -> str:
    """How a request ended. Raises ServerFailed if the server was at fault."""
    if stream.left:
        return "left"
    good = stream.complete if request.body["stream"] else stream.status == HTTPStatus.OK
    if not good:
        raise ServerFailed(f"A client got {stream.status}: {stream.body[-300:]!r}")
    return "slow" if request.behaviour.pause_s else "stayed"


async def run_clients(address: ServerAddress, requests: Sequence[ClientRequest]) -> Counter[str]:
    """Run all clients at once; count how they ended. Raises ServerFailed."""
    streams = await asyncio.gather(
        *(read_stream(address.connect, v.path, v.body, v.behaviour) for v in requests)
    )
    return Counter(map(outcome, requests, streams))


# --- at rest ------------------------------------------------------------------------------------


def wait_for_rest(address: ServerAddress, running: RunningCluster) -> float:
    """Wait until nothing of any client is left, then send a request.

    Returns the seconds until nothing was left. Raises ServerFailed.
    """
    began = time.monotonic()
    while left := leftovers(address, running):
        if time.monotonic() - began > REST_S:
            raise ServerFailed(f"{REST_S:g} s after the last client: {', '.join(left)}.")
        time.sleep(POLL_S)
    rest_s = time.monotonic() - began
    began = time.monotonic()
    request = ClientRequest(
        COMPLETION, {"prompt": PROMPTS[0], "max_tokens": 1, "stream": False}, STAY
    )
    outcome(request, asyncio.run(read_stream(address.connect, request.path, request.body)))
    if (took := time.monotonic() - began) > ANSWER_S:
        raise ServerFailed(f"A single request took {took:.1f} s after the last client.")
    return rest_s


def leftovers(address: ServerAddress, running: RunningCluster) -> list[str]:
    """The gauges that are not zero, in words."""
    figures = {name: address.metric(f"vllm:{name}") for name in GAUGES}
    figures["/load"] = address.open_requests()
    overview = read_status(running.url, running.namespace)
    figures["kv_slots_held"] = overview.statistics.get("kv_slots_held", 0) if overview else -1
    return [f"{name} is {value:g}" for name, value in figures.items() if value]


def expire_keys(running: RunningCluster) -> int:
    """Delete the keys that Redis would expire; how many keys it has then."""
    keys = RedisKeys(running.namespace)
    pipe = RedisConnection(running.url)
    try:
        for pattern in (f"{keys.requests}:*", keys.listener("*")):
            for name in pipe.call("KEYS", pattern):
                if pipe.call("TTL", name) >= 0:
                    pipe.call("DEL", name)
        return int(pipe.call("DBSIZE"))
    finally:
        pipe.close()


def mib(process: psutil.Process) -> float:
    """Resident memory of a process, MiB."""
    return float(process.memory_info().rss / 2**20)


# --- all rounds ---------------------------------------------------------------------------------


@dataclass
class ClientsRun:
    """The results of all rounds.

    `moments`: after each round, the requests so far, the seconds until nothing was left, the keys
    in Redis, and MiB by process.
    """

    counts: Counter[str] = field(default_factory=Counter)
    moments: list[dict[str, Any]] = field(default_factory=list)

    def growth(self, name: str) -> float:
        """MiB by which a process grew in a thousand requests, over the later half."""
        later = self.moments[len(self.moments) // 2 :]
        if len(later) < 2:
            return 0.0
        counts = [moment["requests"] for moment in later]
        return 1000 * float(np.polyfit(counts, [moment["mib"][name] for moment in later], 1)[0])

    @property
    def keys_left(self) -> int:
        """Keys in Redis after the last round that were not there after the first."""
        return int(self.moments[-1]["keys"] - self.moments[0]["keys"])


def run_rounds(
    address: ServerAddress,
    running: RunningCluster,
    processes_seen: dict[str, psutil.Process],
    *,
    clients: int,
    rounds: int,
    tokens: int,
    seed: int,
    on_round: Callable[[ClientsRun], None] = lambda run: None,
) -> ClientsRun:
    """Run the rounds. Raises ServerFailed if anything is left after one."""
    rng = random.Random(seed)
    run = ClientsRun()
    for number in range(1, rounds + 1):
        requests = [ClientRequest.at_random(rng, tokens) for _ in range(clients)]
        run.counts += asyncio.run(run_clients(address, requests))
        rest_s = wait_for_rest(address, running)
        run.moments.append(
            {
                "requests": number * clients,
                "rest_s": rest_s,
                "keys": expire_keys(running),
                "mib": {name: mib(process) for name, process in processes_seen.items()},
            }
        )
        on_round(run)
    return run


def rows(run: ClientsRun) -> list[dict[str, Any]]:
    """A row per process."""
    return [
        {
            "process": name,
            "first_mib": run.moments[0]["mib"][name],
            "half_mib": run.moments[len(run.moments) // 2]["mib"][name],
            "last_mib": run.moments[-1]["mib"][name],
            "growth_mib_per_1000": run.growth(name),
        }
        for name in run.moments[0]["mib"]
    ]


def wrong(run: ClientsRun) -> list[str]:
    """The errors."""
    problems = [
        f"{row['process']} grew by {row['growth_mib_per_1000']:.2f} MiB in a thousand requests"
        for row in rows(run)
        if row["growth_mib_per_1000"] > GROWTH
    ]
    if run.keys_left > FEW_KEYS:
        problems.append(f"Redis has {run.keys_left} keys more than after the first round")
    return problems


def draw(title: str, run: ClientsRun, path: Path) -> None:
    series = {
        name: [(moment["requests"], moment["mib"][name]) for moment in run.moments]
        for name in run.moments[0]["mib"]
    }
    with plot.figure(path, title, size=(7.0, 3.6)) as (axes,):
        plot.lines(
            axes,
            series,
            xlabel="requests so far",
            ylabel="resident memory, MiB",
            colours=dict(zip(series, plot.COLOURS * 2, strict=False)),
        )


def main() -> None:
    parser = experiment.parser(__doc__, plot=True)
    parser.add_argument("--clients", type=int, default=200, help="at once (200)")
    parser.add_argument("--rounds", type=int, default=25, help="(25)")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer at most (16)")
    parser.add_argument("--stages", type=int, default=2, help="(2)")
    parser.add_argument("--at-once", type=int, default=32, help="scheduler.max_num_seqs (32)")
    parser.add_argument("--seed", type=int, default=1)
    options = experiment.parse(parser, clients=20, rounds=5)
    settings = [
        f"cluster.stages={options.stages}",
        "cluster.devices=[cpu]",
        "model.context=256",
        f"scheduler.max_num_seqs={options.at_once}",
    ]

    def report(run: ClientsRun) -> None:
        moment = run.moments[-1]
        print(json.dumps({**moment, "counts": dict(run.counts)}), file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # short, for the names of sockets
        began = time.monotonic()
        with HttpServer(Path(name), *settings) as server:
            running = find_cluster()
            processes_seen = processes(server.process.pid, running)
            how = {"clients": options.clients, "rounds": options.rounds, "tokens": options.tokens}
            run = run_rounds(
                server.address, running, processes_seen, **how, seed=options.seed, on_round=report
            )
        took = time.monotonic() - began
    title = (
        f"{options.clients * options.rounds} requests of {options.clients} clients at once, "
        f"{options.stages} stages"
    )
    experiment.publish(
        options,
        title,
        rows(run),
        draw=partial(draw, title, run),
        ended=dict(run.counts),
        longest_rest_s=max(moment["rest_s"] for moment in run.moments),
        keys_left=run.keys_left,
        seconds=took,
        settings=settings,
        moments=run.moments,
    )
    if problems := wrong(run):
        sys.exit("; ".join(problems))
    print("Nothing is left of any client, and no process grows.")


if __name__ == "__main__":
    main()
