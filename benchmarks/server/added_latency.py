"""The latency that the HTTP server adds to a token, beside the bare client, with many streams.

    python -m benchmarks.server.added_latency --json benchmarks/results/serve.json

Two clients use one EMULATED cluster by turns, with equally many requests, prompts and lengths: one
over HTTP, on plain sockets, the other (`AsyncClient`) over Redis. A third reader,
which does nothing else (`benchmarks.server.redis_reader`), sees every token leave Redis; a token's
*latency* lasts from there until the client that asked for it has read it, on the one clock of this
machine. What the server adds is the difference of the two latencies' medians.

The stages emulate another machine, so that this machine's cores are mostly idle. All times are as
measured here, none is scaled. Budget: 1 ms added per token, median, at 32 streams.
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

from benchmarks.common import experiment, run_options
from benchmarks.common.experiment import numbers
from benchmarks.load import throughput
from benchmarks.server.redis_reader import RedisReader
from pipespec.client.async_client import AsyncClient, attach
from pipespec.controller.log_records import Accepted
from pipespec.controller.request_log import RequestLog
from pipespec.core import SamplingParams
from pipespec.instruments.bench.dataset import Sample
from pipespec.instruments.bench.reference import record_reference
from pipespec.text import FinalText
from tools.rig.http_server import HttpServer, ServerFailed, cpu_seconds, find_cluster
from tools.rig.http_streams import read_stream

BARE, HTTP = "bare", "http"
PATIENCE_S = 60.0
BUDGET_MS, BUDGET_STREAMS = 1.0, 32


@dataclass
class TimedRequest:
    """One request as its client received it.

    Attributes:
        sent_ns: when the client sent it.
        pieces: (time in ns, size) of each read, in characters or in tokens.
        redis_ns, read_ns: when each token that could be told apart left Redis, and was read.
    """

    sent_ns: int
    pieces: list[tuple[int, int]]
    redis_ns: list[int] = field(default_factory=list)
    read_ns: list[int] = field(default_factory=list)

    def match(self, ends: Sequence[int], redis_ns: Sequence[int]) -> None:
        """Find when each token was read: with the piece that has the token's end.

        `ends`: the size of the answer up to each token; tokens that add nothing are left out.
        """
        moments = iter(self.pieces)
        read, at_ns = 0, 0
        for before, end, left in zip([0, *ends], ends, redis_ns, strict=False):
            while read < end:
                at_ns, size = next(moments)
                read += size
            if end > before:
                self.redis_ns.append(left)
                self.read_ns.append(at_ns)

    @property
    def latency_ms(self) -> np.ndarray:
        """The latency of each matched token."""
        return (np.array(self.read_ns) - np.array(self.redis_ns)) / 1e6

    @property
    def ttft_ms(self) -> float:
        return (self.pieces[0][0] - self.sent_ns) / 1e6


@dataclass(frozen=True)
class Run:
    """Several streams at once, each of some requests in a row."""

    streams: int
    route: str
    timed: list[TimedRequest]
    seconds: float
    server_cpu_s: float
    client_cpu_s: float

    @property
    def latency_ms(self) -> np.ndarray:
        """The latency of all tokens."""
        return np.concatenate([request.latency_ms for request in self.timed])


# --- clients ------------------------------------------------------------------------------------


class LatencyBenchmark:
    """Sends requests to a server, or to its cluster, and no other client uses them.

    Every request has its own seed, by which it is found in the log. The answers are greedy.
    """

    def __init__(self, server: HttpServer, reader: RedisReader, tokens: int):
        self.running = find_cluster()
        self._server = server
        self._reader = reader
        self._tokens = tokens
        self._seeds = count(1)
        self._num_requests = 0  # requests in the log

    def run(self, route: str, prompts: Sequence[Sequence[int]], requests: int) -> Run:
        """A stream for each prompt, of `requests` requests in a row."""
        self._reader.watch(self._num_requests + 1, len(prompts) * requests)
        processes = psutil.Process(self._server.process.pid), psutil.Process()
        before = [cpu_seconds(process) for process in processes]
        began = time.monotonic()
        timed = asyncio.run(self._run(route, prompts, requests))
        took = time.monotonic() - began
        used = [cpu_seconds(each) - spent for each, spent in zip(processes, before, strict=True)]
        self._match(route, timed)
        return Run(len(prompts), route, list(timed.values()), took, *used)

    async def _run(
        self, route: str, prompts: Sequence[Sequence[int]], requests: int
    ) -> dict[int, TimedRequest]:
        """Each request, by its seed."""
        timed: dict[int, TimedRequest] = {}

        async def row(client: AsyncClient, prompt: Sequence[int]) -> None:
            for seed in (next(self._seeds) for _ in range(requests)):
                if route == HTTP:
                    timed[seed] = await self._by_http(prompt, seed)
                else:
                    timed[seed] = await self._by_redis(client, prompt, seed)

        async with attach(self.running, PATIENCE_S) as client, asyncio.TaskGroup() as tasks:
            for prompt in prompts:
                tasks.create_task(row(client, prompt))
        return timed

    async def _by_http(self, prompt: Sequence[int], seed: int) -> TimedRequest:
        body = {"prompt": list(prompt), "max_tokens": self._tokens, "ignore_eos": True}
        body |= {"temperature": 0, "seed": seed, "stream": True}
        stream = await read_stream(self._server.address.connect, "/v1/completions", body)
        if not stream.complete:
            raise ServerFailed(f"A stream ended early: {stream.body[-300:]!r}")
        texts = [(event.at_ns, event.data["choices"][0]["text"]) for event in stream.events()]
        return TimedRequest(stream.sent_ns, [(at_ns, len(text)) for at_ns, text in texts if text])

    async def _by_redis(
        self, client: AsyncClient, prompt: Sequence[int], seed: int
    ) -> TimedRequest:
        request = TimedRequest(time.monotonic_ns(), [])
        async with client.follow() as followed:
            sampling = SamplingParams(seed=seed)
            await followed.submit(prompt, sampling, max_new_tokens=self._tokens)
            while len(followed):
                for _, event in await followed.next():
                    if isinstance(event, Accepted):
                        request.pieces.append((time.monotonic_ns(), len(event.tokens)))
        return request

    def _match(self, route: str, timed: dict[int, TimedRequest]) -> None:
        """Find each request in the log, and when its tokens left Redis."""
        running = self.running
        with RequestLog(running.url, namespace=running.namespace, epoch=running.epoch) as log:
            for number, redis_ns in sorted(self._reader.token_times().items()):
                request, tokens = log.request(number), log.tokens(number)
                if not len(redis_ns) == len(tokens) == self._tokens:
                    raise ServerFailed(f"Request {number} has lost tokens.")
                text = FinalText(running.served.tokenizer, request.prompt)
                sizes = [len(text.push([token])) if route == HTTP else 1 for token in tokens]
                timed[request.sampling.seed].match(list(accumulate(sizes)), redis_ns)
        self._num_requests += len(timed)


# --- the table ----------------------------------------------------------------------------------


def rows(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """A row for every number of streams and route; `added_` is over the bare client."""
    for streams in dict.fromkeys(run.streams for run in runs):
        plain: dict[str, Any] = {}
        for route in (BARE, HTTP):
            group = [run for run in runs if (run.streams, run.route) == (streams, route)]
            figures = row(group)
            added = {
                f"added_{name}": figures[name] - plain[name] if plain else None
                for name in ("latency_ms", "ttft_ms")
            }
            yield {"streams": streams, "client": route, **figures, **added}
            plain = figures


def row(runs: Sequence[Run]) -> dict[str, Any]:
    """The figures of runs with the same streams and route."""
    latencies = np.concatenate([run.latency_ms for run in runs])
    timed = [request for run in runs for request in run.timed]
    seconds = sum(run.seconds for run in runs)
    return {
        "latency_ms": float(np.median(latencies)),
        "latency_p90_ms": float(np.percentile(latencies, 90)),
        "latency_p99_ms": float(np.percentile(latencies, 99)),
        "ttft_ms": float(np.median([request.ttft_ms for request in timed])),
        "requests_per_s": len(timed) / seconds,
        "tokens_per_s": len(latencies) / seconds,
        "server_cpu_us_per_token": 1e6 * sum(run.server_cpu_s for run in runs) / len(latencies),
        "client_cpu_us_per_token": 1e6 * sum(run.client_cpu_s for run in runs) / len(latencies),
    }


def settings(options: argparse.Namespace, truth: Path, folder: Path) -> list[str]:
    """The cluster's settings, as in `benchmarks.load.throughput`."""
    return [
        *run_options.target(options.stages, folder),
        *run_options.cluster(options),
        *run_options.synthetic(truth, options.curve, options.spread),
        *throughput.overrides(throughput.BEST_FIRST, options),
        f"scheduler.max_num_seqs={max(options.streams)}",
    ]


def measure(options: argparse.Namespace, samples: Sequence[Sample], folder: Path) -> list[Run]:
    """All runs, the two routes by turns."""
    truth = folder / "truth.jsonl"
    answer = run_options.answer(options.tokens)
    target = run_options.target(options.stages, folder)
    record_reference(samples, truth, *target, *answer, prompt_tokens=options.prompt_tokens)
    with (
        HttpServer(folder, *settings(options, truth, folder)) as server,
        RedisReader(find_cluster()) as reader,
        Progress(transient=True) as shown,
    ):
        benchmark = LatencyBenchmark(server, reader, options.tokens)
        served = benchmark.running.served
        prompts = [
            served.encode(sample.prompt, bounded=False)[: options.prompt_tokens]
            for sample in samples
        ]
        benchmark.run(BARE, prompts[:1], 1)  # the first runs find cold caches
        benchmark.run(HTTP, prompts[:1], 1)
        runs = []
        turns = [
            (streams, route)
            for streams in options.streams
            for turn in range(options.repeats)
            for route in ((BARE, HTTP) if turn % 2 == 0 else (HTTP, BARE))
        ]
        for streams, route in shown.track(turns):
            runs.append(benchmark.run(route, prompts[:streams], options.requests))
        return runs


def main() -> None:
    parser = experiment.parser(__doc__)
    run_options.add_cluster(parser, machine="rtx3090_8")
    parser.set_defaults(scale=3.0)
    parser.add_argument("--streams", type=numbers, default=[1, 8, 32], help="(1,8,32)")
    parser.add_argument("--requests", type=int, default=2, help="of a stream in a run (2)")
    parser.add_argument("--repeats", type=int, default=4, help="runs of each route (4)")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer (48)")
    throughput.add_load(parser)
    options = experiment.parse(parser, repeats=2, requests=1, tokens=24)
    samples = throughput.varied_prompts(max(options.streams), options)
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # short, for the names of sockets
        runs = measure(options, samples, Path(name))
    table = list(rows(runs))
    title = (
        f"A server beside the bare client, EMULATED ({options.machine}, {options.scale:g} times "
        f"slower), {options.stages} stages, {options.tokens} tokens an answer; SYNTHETIC draft "
        f"({options.curve})"
    )
    experiment.publish(options, title, table, runs=list(map(stored, runs)))
    added = {row["streams"]: row["added_latency_ms"] for row in table if row["client"] == HTTP}
    if added.get(BUDGET_STREAMS, 0.0) > BUDGET_MS:
        sys.exit(
            f"The server adds {added[BUDGET_STREAMS]:.2f} ms at {BUDGET_STREAMS} streams; "
            f"the budget is {BUDGET_MS:g}."
        )


def stored(run: Run) -> dict[str, Any]:
    """A single run, so that the runs show how steady the figures are."""
    return {"streams": run.streams, "client": run.route, "seconds": run.seconds, **row([run])}


if __name__ == "__main__":
    main()
