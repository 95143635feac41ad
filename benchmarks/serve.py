"""What the HTTP server adds to a token's way, beside the bare client, at a load of many streams.

    python -m benchmarks.serve --json benchmarks/results/serve.json

Both ask one EMULATED cluster by turns, as many requests at once, with the same prompts and lengths:
one over HTTP, from plain sockets, the other (`pipespec.client.aio`) from Redis. A third reader,
which does nothing else (`benchmarks.tap`), sees every token leave Redis; a token's *way* lasts from
there until who asked has read it, on the one clock of this machine. What the server adds is the
difference of the two ways' medians.

Stages wait for the times of another machine, so that cores idle. No time is scaled back: all are
those of this machine. Budget: 1 ms added per token, median, at 32 streams.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.progress import Progress

from benchmarks import emulated, experiment, load
from benchmarks.experiment import numbers
from benchmarks.http_server import Failed, HttpServer, cluster, cpu_s
from benchmarks.http_streams import ask
from benchmarks.tap import Tap
from pipespec.client.aio import AsyncClient, attach
from pipespec.client.dataset import Sample
from pipespec.client.truth import record_truth
from pipespec.controller.records import Accepted
from pipespec.controller.requests import RequestLog
from pipespec.core import Sampling
from pipespec.text import FinalText

BARE, HTTP = "bare", "http"
PATIENCE_S = 60.0
BUDGET_MS, BUDGET_STREAMS = 1.0, 32


@dataclass
class Heard:
    """One request as its client saw it.

    Attributes:
        sent_ns: when it asked.
        pieces: what it read and when, in characters or in tokens.
        left_ns, here_ns: when each token that could be told apart left Redis, and was read.
    """

    sent_ns: int
    pieces: list[tuple[int, int]]
    left_ns: list[int] = field(default_factory=list)
    here_ns: list[int] = field(default_factory=list)

    def match(self, ends: Sequence[int], left_ns: Sequence[int]) -> None:
        """Find each token's moment here, which is that of the piece that holds its end.

        `ends`: how much there is to read up to each token; those that add nothing are left out.
        """
        moments = iter(self.pieces)
        read, at_ns = 0, 0
        for before, end, left in zip([0, *ends], ends, left_ns, strict=False):
            while read < end:
                at_ns, size = next(moments)
                read += size
            if end > before:
                self.left_ns.append(left)
                self.here_ns.append(at_ns)

    @property
    def way_ms(self) -> np.ndarray:
        """Of each token that was matched."""
        return (np.array(self.here_ns) - np.array(self.left_ns)) / 1e6

    @property
    def ttft_ms(self) -> float:
        return (self.pieces[0][0] - self.sent_ns) / 1e6


@dataclass(frozen=True)
class Run:
    """Some streams at once, each a request after another."""

    streams: int
    way: str
    heard: list[Heard]
    seconds: float
    server_cpu_s: float
    client_cpu_s: float

    @property
    def way_ms(self) -> np.ndarray:
        """Of all tokens."""
        return np.concatenate([one.way_ms for one in self.heard])


# --- asking -------------------------------------------------------------------------------------


class Asking:
    """Asks a server, or its cluster, whose only user it is.

    Every request has a seed of its own, by which it is found in the log. The answers are greedy.
    """

    def __init__(self, server: HttpServer, tap: Tap, tokens: int):
        self.running = cluster()
        self._server = server
        self._tap = tap
        self._tokens = tokens
        self._seeds = count(1)
        self._asked = 0  # requests in the log

    def run(self, way: str, prompts: Sequence[Sequence[int]], requests: int) -> Run:
        """A stream for each prompt, each of so many requests in a row."""
        self._tap.listen(self._asked + 1, len(prompts) * requests)
        processes = psutil.Process(self._server.process.pid), psutil.Process()
        before = [cpu_s(process) for process in processes]
        began = time.monotonic()
        heard = asyncio.run(self._heard(way, prompts, requests))
        took = time.monotonic() - began
        used = [cpu_s(each) - spent for each, spent in zip(processes, before, strict=True)]
        self._look_up(way, heard)
        return Run(len(prompts), way, list(heard.values()), took, *used)

    async def _heard(
        self, way: str, prompts: Sequence[Sequence[int]], requests: int
    ) -> dict[int, Heard]:
        """What came of each request, by its seed."""
        heard: dict[int, Heard] = {}

        async def row(client: AsyncClient, prompt: Sequence[int]) -> None:
            for seed in (next(self._seeds) for _ in range(requests)):
                if way == HTTP:
                    heard[seed] = await self._by_http(prompt, seed)
                else:
                    heard[seed] = await self._by_redis(client, prompt, seed)

        async with attach(self.running, PATIENCE_S) as client, asyncio.TaskGroup() as tasks:
            for prompt in prompts:
                tasks.create_task(row(client, prompt))
        return heard

    async def _by_http(self, prompt: Sequence[int], seed: int) -> Heard:
        body = {"prompt": list(prompt), "max_tokens": self._tokens, "ignore_eos": True}
        body |= {"temperature": 0, "seed": seed, "stream": True}
        stream = await ask(self._server.place.door, "/v1/completions", body)
        if not stream.whole:
            raise Failed(f"A stream ended early: {stream.body[-300:]!r}")
        texts = [(event.at_ns, event.told["choices"][0]["text"]) for event in stream.events()]
        return Heard(stream.sent_ns, [(at_ns, len(text)) for at_ns, text in texts if text])

    async def _by_redis(self, client: AsyncClient, prompt: Sequence[int], seed: int) -> Heard:
        heard = Heard(time.monotonic_ns(), [])
        async with client.follow() as followed:
            sampling = Sampling(seed=seed)
            await followed.submit(prompt, sampling, max_new_tokens=self._tokens)
            while len(followed):
                for _, event in await followed.next():
                    if isinstance(event, Accepted):
                        heard.pieces.append((time.monotonic_ns(), len(event.tokens)))
        return heard

    def _look_up(self, way: str, heard: dict[int, Heard]) -> None:
        """Find out which request of the log is whose, and when its tokens left Redis."""
        running = self.running
        with RequestLog(running.url, namespace=running.namespace, epoch=running.epoch) as log:
            for number, left_ns in sorted(self._tap.heard().items()):
                asked, tokens = log.request(number), log.tokens(number)
                if not len(left_ns) == len(tokens) == self._tokens:
                    raise Failed(f"Request {number} has lost tokens.")
                text = FinalText(running.served.tokenizer, asked.prompt)
                sizes = [len(text.push([token])) if way == HTTP else 1 for token in tokens]
                heard[asked.sampling.seed].match(list(accumulate(sizes)), left_ns)
        self._asked += len(heard)


# --- the table ----------------------------------------------------------------------------------


def rows(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """A row for every number of streams and way; what is added is beside the bare client."""
    for streams in dict.fromkeys(run.streams for run in runs):
        plain: dict[str, Any] = {}
        for way in (BARE, HTTP):
            found = [run for run in runs if (run.streams, run.way) == (streams, way)]
            figures = row(found)
            added = {
                f"added_{name}": figures[name] - plain[name] if plain else None
                for name in ("way_ms", "ttft_ms")
            }
            yield {"streams": streams, "client": way, **figures, **added}
            plain = figures


def row(runs: Sequence[Run]) -> dict[str, Any]:
    """The figures of runs that are alike."""
    ways = np.concatenate([run.way_ms for run in runs])
    heard = [one for run in runs for one in run.heard]
    seconds = sum(run.seconds for run in runs)
    return {
        "way_ms": float(np.median(ways)),
        "way_p90_ms": float(np.percentile(ways, 90)),
        "way_p99_ms": float(np.percentile(ways, 99)),
        "ttft_ms": float(np.median([one.ttft_ms for one in heard])),
        "requests_per_s": len(heard) / seconds,
        "tokens_per_s": len(ways) / seconds,
        "server_cpu_us_per_token": 1e6 * sum(run.server_cpu_s for run in runs) / len(ways),
        "client_cpu_us_per_token": 1e6 * sum(run.client_cpu_s for run in runs) / len(ways),
    }


def settings(options: argparse.Namespace, truth: Path, folder: Path) -> list[str]:
    """Of the cluster: as `benchmarks.load` emulates it."""
    return [
        *emulated.target(options.stages, folder),
        *emulated.cluster(options),
        *emulated.synthetic(truth, options.curve, options.spread),
        *load.overrides(load.OURS, options),
        f"scheduler.max_num_seqs={max(options.streams)}",
    ]


def measure(options: argparse.Namespace, samples: Sequence[Sample], folder: Path) -> list[Run]:
    """All runs, the two ways by turns."""
    truth = folder / "truth.jsonl"
    answer = emulated.answer(options.tokens)
    target = emulated.target(options.stages, folder)
    record_truth(samples, truth, *target, *answer, prompt_tokens=options.prompt_tokens)
    with (
        HttpServer(folder, *settings(options, truth, folder)) as server,
        Tap(cluster()) as tap,
        Progress(transient=True) as shown,
    ):
        asking = Asking(server, tap, options.tokens)
        served = asking.running.served
        prompts = [
            served.encode(sample.prompt, bounded=False)[: options.prompt_tokens]
            for sample in samples
        ]
        asking.run(BARE, prompts[:1], 1)  # the first of all finds everything cold
        asking.run(HTTP, prompts[:1], 1)
        runs = []
        turns = [
            (streams, way)
            for streams in options.streams
            for turn in range(options.repeats)
            for way in ((BARE, HTTP) if turn % 2 == 0 else (HTTP, BARE))
        ]
        for streams, way in shown.track(turns):
            runs.append(asking.run(way, prompts[:streams], options.requests))
        return runs


def main() -> None:
    parser = experiment.parser(__doc__)
    emulated.add_cluster(parser, pace="rtx3090_8")
    parser.set_defaults(scale=3.0)
    parser.add_argument("--streams", type=numbers, default=[1, 8, 32], help="(1,8,32)")
    parser.add_argument("--requests", type=int, default=2, help="of a stream in a run (2)")
    parser.add_argument("--repeats", type=int, default=4, help="runs of each way (4)")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer (48)")
    load.add_crowd(parser)
    options = experiment.parse(parser, repeats=2, requests=1, tokens=24)
    samples = load.crowd(max(options.streams), options)
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # short, for the names of sockets
        runs = measure(options, samples, Path(name))
    found = list(rows(runs))
    title = (
        f"A server beside the bare client, EMULATED ({options.pace}, {options.scale:g} times "
        f"slower), {options.stages} stages, {options.tokens} tokens an answer; SYNTHETIC draft "
        f"({options.curve})"
    )
    experiment.publish(options, title, found, runs=list(map(stored, runs)))
    added = {row["streams"]: row["added_way_ms"] for row in found if row["client"] == HTTP}
    if added.get(BUDGET_STREAMS, 0.0) > BUDGET_MS:
        sys.exit(
            f"A token's way is {added[BUDGET_STREAMS]:.2f} ms longer at {BUDGET_STREAMS} streams; "
            f"the budget is {BUDGET_MS:g}."
        )


def stored(run: Run) -> dict[str, Any]:
    """A run by itself, so that its neighbours show how steady it is."""
    return {"streams": run.streams, "client": run.way, "seconds": run.seconds, **row([run])}


if __name__ == "__main__":
    main()
