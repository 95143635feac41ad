"""Streams of a server while what stands behind it is killed: their texts, and how long they paused.

    python -m benchmarks.chaos_streams --json benchmarks/results/chaos_streams.json
    python -m benchmarks.chaos_streams --hosts 3 --json benchmarks/results/chaos_streams_host.json

Sixteen at once, each with a seed of its own; once all have begun, one thing is killed: a stage, the
head, Redis, the launcher; with --hosts (needs root) all that runs on a whole host of a test bed.
Ends with exit code 1 if a text is not the undisturbed one, or a stream was closed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks import experiment
from benchmarks.http_server import NAME, Failed, HttpServer, cluster, epoch, ranks, redis_pid
from benchmarks.http_streams import NONE, Door, Stream, begin
from benchmarks.victim import hosts_file, signalled
from pipespec.errors import ConfigError, Unreachable
from tools.rig import testbed
from tools.rig.testbed import Testbed

LOCAL_KINDS = ("stage", "head", "redis", "launcher")
HOST = "host"
PROMPT = "Once upon a time there was a king who"
LOOK_S = 0.02
WHOLE_S = 120.0  # within which a struck cluster is whole again
SSHD = "sshd"


def bodies(streams: int, tokens: int) -> list[dict[str, Any]]:
    """What is asked: so many texts that differ."""
    drawn = {"temperature": 0.8, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    return [{"prompt": PROMPT, "seed": seed, **drawn} for seed in range(streams)]


async def ask_all(
    door: Door,
    asked: Sequence[dict[str, Any]],
    *,
    at: int = 0,
    strike: Callable[[], None] = lambda: None,
    headers: Mapping[str, str] = NONE,
) -> list[Stream]:
    """All at once, and struck when each has heard `at` events. Raises Failed if one has ended by
    then, or is closed."""
    begun = (begin(door, "/v1/completions", body, headers=headers) for body in asked)
    streams = await asyncio.gather(*begun)
    while any(stream.num_heard < at and not stream.ended.done() for stream in streams):
        await asyncio.sleep(LOOK_S)
    if at and any(stream.ended.done() for stream in streams):
        raise Failed("A stream ended before all had begun; ask for more tokens.")
    await asyncio.to_thread(strike)
    for stream in streams:
        await stream.ended
        if not stream.whole:
            raise Failed(f"A stream was closed: {stream.body[-300:]!r}")
    return streams


def kill(kind: str, name: str = NAME) -> None:
    """End a part of a cluster with SIGKILL."""
    running = cluster(name)
    if kind == "launcher":
        pid = running.owner.pid
    elif kind == "redis":
        pid = redis_pid(running)
    else:
        by_rank = ranks(running)
        pid = by_rank[0] if kind == "head" else by_rank[random.choice(range(1, len(by_rank)))]
    os.kill(pid, signal.SIGKILL)


def kill_host(bed: Testbed, host: str) -> None:
    """End all that runs on a host, but for what lets others in."""
    for pid in bed.processes(host):
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).name() != SSHD:
                signalled(pid, signal.SIGKILL)


def await_whole(name: str = NAME) -> int:
    """Wait until all ranks of a cluster take part; its epoch. Raises Failed."""
    deadline = time.monotonic() + WHOLE_S
    while time.monotonic() < deadline:
        with suppress(ConfigError, Unreachable):  # it is on its way back
            running = cluster(name)
            if not running.owner.gone and len(ranks(running)) == running.num_ranks:
                return epoch(running)
        time.sleep(LOOK_S)
    raise Failed(f"The cluster was not whole again within {WHOLE_S:g} s.")


def struck(
    door: Door,
    asked: Sequence[dict[str, Any]],
    kind: str,
    *,
    at: int,
    name: str = NAME,
    headers: Mapping[str, str] = NONE,
) -> list[Stream]:
    """The streams in whose course a part of a cluster of this machine was killed.

    Raises Failed if one was closed, or the cluster has not noticed.
    """
    before, launcher = await_whole(name), cluster(name).owner
    strike = partial(kill, kind, name)
    streams = asyncio.run(ask_all(door, asked, at=at, strike=strike, headers=headers))
    if await_whole(name) == before and cluster(name).owner == launcher:
        raise Failed(f"The {kind} was killed, but no epoch has begun.")
    return streams


def row(kind: str, streams: Sequence[Stream], texts: Sequence[str]) -> dict[str, Any]:
    """What a strike did."""
    pauses = [stream.longest_pause_s for stream in streams]
    return {
        "killed": kind,
        "streams": len(streams),
        "as_undisturbed": sum(s.text == text for s, text in zip(streams, texts, strict=True)),
        "median_pause_s": statistics.median(pauses),
        "longest_pause_s": max(pauses),
    }


def run(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """A row for nothing, and one for every strike."""
    asked = bodies(options.streams, options.tokens)
    with ExitStack() as stack:
        bed = None
        where = [f"cluster.stages={options.stages}", "cluster.devices=[cpu]"]
        if options.hosts:
            bed = stack.enter_context(Testbed(options.hosts))
            where = [f"cluster={hosts_file(bed, options.stages, folder)}"]
        most = f"scheduler.max_num_seqs={options.streams}"
        server = stack.enter_context(HttpServer(folder, *where, "model.context=512", most, bed=bed))
        door = server.place.door
        undisturbed = asyncio.run(ask_all(door, asked))
        texts = [stream.text for stream in undisturbed]
        rows = [row("nothing", undisturbed, texts)]
        for _ in range(options.times):
            if bed is not None:
                strike = partial(kill_host, bed, bed.hosts[1])
                streams = asyncio.run(ask_all(door, asked, at=options.at, strike=strike))
                rows.append(row(HOST, streams, texts))
            else:
                found = {kind: struck(door, asked, kind, at=options.at) for kind in LOCAL_KINDS}
                rows += [row(kind, streams, texts) for kind, streams in found.items()]
        return rows


def main() -> None:
    parser = experiment.parser(__doc__)
    parser.add_argument("--streams", type=int, default=16, help="(16)")
    parser.add_argument("--tokens", type=int, default=96, help="of each (96)")
    parser.add_argument("--at", type=int, default=4, help="events before the strike (4)")
    parser.add_argument("--times", type=int, default=3, help="that each is killed (3)")
    parser.add_argument("--stages", type=int, default=2, help="(2)")
    parser.add_argument("--hosts", type=int, default=0, help="of a test bed; needs root (none)")
    options = experiment.parse(parser, times=1, tokens=64)
    if options.hosts and (reason := testbed.missing()) is not None:
        parser.error(f"--hosts {options.hosts} cannot be had here: {reason}.")
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # short, for the names of sockets
        rows = run(options, Path(name))
    place = f"{options.hosts} hosts" if options.hosts else "one machine"
    title = (
        f"{options.streams} streams of {options.tokens} tokens, {options.stages} stages, {place}"
    )
    experiment.publish(options, title, rows)
    if any(row["as_undisturbed"] < row["streams"] for row in rows):
        sys.exit("A text is not as it is undisturbed.")
    print("Every text is as it is undisturbed, and no stream was closed.")


if __name__ == "__main__":
    main()
