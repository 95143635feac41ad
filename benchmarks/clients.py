"""Clients of a server that come, read and leave as they like: is anything of them left?

    python -m benchmarks.clients --json benchmarks/results/clients.json --plot PATH

In every round so many clients ask at once, streamed or not, for a chat or a completion, one answer
or several; some read slowly, some leave before the first token, in the middle, or while they wait
for a whole reply. After each round, at rest: the gauges of /metrics and /load are zero, the head
holds no KV slot, a new request is answered, and the memory of every process is looked at.

Redis keeps what has finished for an hour. Its keys that would run out are made to do so after each
round, as if the hour had passed; what has no such end would add up. Ends with exit code 1 if
anything is left, or if a process grew by more than a stated rate over the later half.
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

from benchmarks import experiment, plot
from benchmarks.http_server import Failed, HttpServer, Place, cluster, processes
from benchmarks.http_streams import STAYING, Manner, Stream, ask
from pipespec.client.registry import RunningCluster
from pipespec.controller.connection import Pipe
from pipespec.controller.keys import Keys
from pipespec.controller.overview import look

PROMPTS = (
    "Once upon a time there was a king who",
    "The little girl ran out of the house and",
    "Tom has three apples and buys four more. How many",
)
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
# After a round all is to be at rest, and a request to be answered, within so many seconds.
REST_S, ANSWER_S = 30.0, 10.0
LOOK_S = 0.1
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
# MiB that a process may grow by in a thousand requests, in the later half of a run.
GROWTH = 1.0
# Keys that come and go while nothing happens: leases, lists of tasks, marks.
FEW_KEYS = 5


@dataclass(frozen=True)
class Visit:
    """What a client asks for, and how it behaves."""

    path: str
    body: dict[str, Any]
    manner: Manner

    @classmethod
    def drawn(cls, chance: random.Random, tokens: int) -> Visit:
        streamed = chance.random() < 0.7
        text = chance.choice(PROMPTS)
        path = chance.choice((CHAT, COMPLETION))
        asked = {"messages": [{"role": "user", "content": text}]}
        body: dict[str, Any] = asked if path == CHAT else {"prompt": text}
        body |= {"n": chance.randint(1, 3), "max_tokens": chance.randint(1, tokens)}
        body |= {"stream": streamed, "ignore_eos": True, "seed": chance.randrange(1000)}
        kind = chance.choice(("stay", "stay", "slow", "at once", "in the middle"))
        if kind == "slow":
            return cls(path, body, Manner(pause_s=0.05))
        if kind == "at once":
            return cls(path, body, Manner(leave_s=chance.uniform(0, 0.2)))
        if kind == "in the middle":
            if streamed:
                return cls(path, body, Manner(leave_after=chance.randint(1, tokens)))
            return cls(path, body, Manner(leave_s=chance.uniform(0, 2)))
        return cls(path, body, STAYING)


def ending(visit: Visit, stream: Stream) -> str:
    """How a visit ended. Raises Failed if the server was at fault."""
    if stream.left:
        return "left"
    good = stream.whole if visit.body["stream"] else stream.status == HTTPStatus.OK
    if not good:
        raise Failed(f"A client got {stream.status}: {stream.body[-300:]!r}")
    return "slow" if visit.manner.pause_s else "stayed"


async def crowd(place: Place, visits: Sequence[Visit]) -> Counter[str]:
    """All at once; how many ended how. Raises Failed."""
    streams = await asyncio.gather(*(ask(place.door, v.path, v.body, v.manner) for v in visits))
    return Counter(map(ending, visits, streams))


# --- at rest ------------------------------------------------------------------------------------


def await_rest(place: Place, running: RunningCluster) -> float:
    """Wait until nothing of anybody is left, and for an answer; seconds until all was at rest.

    Raises Failed.
    """
    began = time.monotonic()
    while left := unrest(place, running):
        if time.monotonic() - began > REST_S:
            raise Failed(f"{REST_S:g} s after the last client: {', '.join(left)}.")
        time.sleep(LOOK_S)
    rest_s = time.monotonic() - began
    began = time.monotonic()
    visit = Visit(COMPLETION, {"prompt": PROMPTS[0], "max_tokens": 1, "stream": False}, STAYING)
    ending(visit, asyncio.run(ask(place.door, visit.path, visit.body)))
    if (took := time.monotonic() - began) > ANSWER_S:
        raise Failed(f"A single request took {took:.1f} s after the last client.")
    return rest_s


def unrest(place: Place, running: RunningCluster) -> list[str]:
    """What is left of clients, in words; empty: nothing."""
    figures = {name: place.figure(f"vllm:{name}") for name in GAUGES}
    figures["/load"] = place.load()
    told = look(running.url, running.namespace)
    figures["kv_slots_held"] = told.statistics.get("kv_slots_held", 0) if told else -1
    return [f"{name} is {value:g}" for name, value in figures.items() if value]


def forget(running: RunningCluster) -> int:
    """Let Redis forget the requests that it would forget; how many keys it has after that."""
    keys = Keys(running.namespace)
    pipe = Pipe(running.url)
    try:
        for pattern in (f"{keys.requests}:*", keys.listener("*")):
            for name in pipe.call("KEYS", pattern):
                if pipe.call("TTL", name) >= 0:
                    pipe.call("DEL", name)
        return int(pipe.call("DBSIZE"))
    finally:
        pipe.close()


def mib(process: psutil.Process) -> float:
    """Memory of a process that is resident."""
    return float(process.memory_info().rss / 2**20)


# --- all rounds ---------------------------------------------------------------------------------


@dataclass
class Stay:
    """What came of all rounds.

    `moments`: after each round, how many requests there were so far, seconds until all was at
    rest, keys in Redis, and MiB by process.
    """

    counts: Counter[str] = field(default_factory=Counter)
    moments: list[dict[str, Any]] = field(default_factory=list)

    def growth(self, name: str) -> float:
        """MiB that a process grew by in a thousand requests, over the later half."""
        later = self.moments[len(self.moments) // 2 :]
        if len(later) < 2:
            return 0.0
        counts = [moment["requests"] for moment in later]
        return 1000 * float(np.polyfit(counts, [moment["mib"][name] for moment in later], 1)[0])

    @property
    def keys_left(self) -> int:
        """Keys in Redis after the last round that were not there after the first."""
        return int(self.moments[-1]["keys"] - self.moments[0]["keys"])


def stay(
    place: Place,
    running: RunningCluster,
    everyone: dict[str, psutil.Process],
    *,
    clients: int,
    rounds: int,
    tokens: int,
    seed: int,
    on_round: Callable[[Stay], None] = lambda seen: None,
) -> Stay:
    """So many rounds of so many clients. Raises Failed if anything is left after one."""
    chance = random.Random(seed)
    seen = Stay()
    for number in range(1, rounds + 1):
        visits = [Visit.drawn(chance, tokens) for _ in range(clients)]
        seen.counts += asyncio.run(crowd(place, visits))
        rest_s = await_rest(place, running)
        seen.moments.append(
            {
                "requests": number * clients,
                "rest_s": rest_s,
                "keys": forget(running),
                "mib": {name: mib(process) for name, process in everyone.items()},
            }
        )
        on_round(seen)
    return seen


def rows(seen: Stay) -> list[dict[str, Any]]:
    """A row per process."""
    return [
        {
            "process": name,
            "first_mib": seen.moments[0]["mib"][name],
            "half_mib": seen.moments[len(seen.moments) // 2]["mib"][name],
            "last_mib": seen.moments[-1]["mib"][name],
            "growth_mib_per_1000": seen.growth(name),
        }
        for name in seen.moments[0]["mib"]
    ]


def wrong(seen: Stay) -> list[str]:
    """What must not be."""
    said = [
        f"{row['process']} grew by {row['growth_mib_per_1000']:.2f} MiB in a thousand requests"
        for row in rows(seen)
        if row["growth_mib_per_1000"] > GROWTH
    ]
    if seen.keys_left > FEW_KEYS:
        said.append(f"Redis has {seen.keys_left} keys more than after the first round")
    return said


def draw(title: str, seen: Stay, path: Path) -> None:
    series = {
        name: [(moment["requests"], moment["mib"][name]) for moment in seen.moments]
        for name in seen.moments[0]["mib"]
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

    def tell(seen: Stay) -> None:
        moment = seen.moments[-1]
        print(json.dumps({**moment, "counts": dict(seen.counts)}), file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # short, for the names of sockets
        began = time.monotonic()
        with HttpServer(Path(name), *settings) as server:
            running = cluster()
            everyone = processes(server.process.pid, running)
            how = {"clients": options.clients, "rounds": options.rounds, "tokens": options.tokens}
            seen = stay(server.place, running, everyone, **how, seed=options.seed, on_round=tell)
        took = time.monotonic() - began
    title = (
        f"{options.clients * options.rounds} requests of {options.clients} clients at once, "
        f"{options.stages} stages"
    )
    experiment.publish(
        options,
        title,
        rows(seen),
        draw=partial(draw, title, seen),
        ended=dict(seen.counts),
        longest_rest_s=max(moment["rest_s"] for moment in seen.moments),
        keys_left=seen.keys_left,
        seconds=took,
        settings=settings,
        moments=seen.moments,
    )
    if said := wrong(seen):
        sys.exit("; ".join(said))
    print("Nothing is left of anybody, and nothing grows.")


if __name__ == "__main__":
    main()
