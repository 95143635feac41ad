"""Streams of an HTTP server while a part of its cluster is killed: their texts and pauses.

    python -m benchmarks.faults.chaos_streams --json benchmarks/results/chaos_streams.json
    python -m benchmarks.faults.chaos_streams --hosts 3 \\
        --json benchmarks/results/chaos_streams_host.json

Sixteen streams at once, each with its own seed. Once all have begun, one part is killed: a stage,
the head, Redis or the launcher; with --hosts (needs root) all processes of one host of a test bed.
The exit code is 1 if a text differs from the undisturbed one, or a stream was closed.
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

from benchmarks.common import experiment
from benchmarks.faults.cluster_process import hosts_file, send_signal
from pipespec.errors import ConfigError, Unreachable
from tools.rig import testbed
from tools.rig.http_server import (
    NAME,
    HttpServer,
    ServerFailed,
    current_epoch,
    find_cluster,
    rank_pids,
    redis_pid,
)
from tools.rig.http_streams import NO_HEADERS, Connect, Stream, open_stream
from tools.rig.testbed import Testbed

LOCAL_KINDS = ("stage", "head", "redis", "launcher")
HOST = "host"
PROMPT = "Once upon a time there was a king who"
POLL_S = 0.02
RECOVERY_S = 120.0  # within which a cluster must be complete again
SSHD = "sshd"


def request_bodies(streams: int, tokens: int) -> list[dict[str, Any]]:
    """Requests for so many different texts."""
    drawn = {"temperature": 0.8, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    return [{"prompt": PROMPT, "seed": seed, **drawn} for seed in range(streams)]


async def read_all(
    connect: Connect,
    bodies: Sequence[dict[str, Any]],
    *,
    at: int = 0,
    fault: Callable[[], None] = lambda: None,
    headers: Mapping[str, str] = NO_HEADERS,
) -> list[Stream]:
    """Read all streams at once; call `fault` when each has had `at` events.

    Raises ServerFailed if a stream has ended by then, or was closed early.
    """
    opening = (open_stream(connect, "/v1/completions", body, headers=headers) for body in bodies)
    streams = await asyncio.gather(*opening)
    while any(stream.num_events < at and not stream.ended.done() for stream in streams):
        await asyncio.sleep(POLL_S)
    if at and any(stream.ended.done() for stream in streams):
        raise ServerFailed("A stream ended before all had begun; ask for more tokens.")
    await asyncio.to_thread(fault)
    for stream in streams:
        await stream.ended
        if not stream.complete:
            raise ServerFailed(f"A stream was closed: {stream.body[-300:]!r}")
    return streams


def kill(kind: str, name: str = NAME) -> None:
    """Kill a part of a cluster with SIGKILL."""
    running = find_cluster(name)
    if kind == "launcher":
        pid = running.owner.pid
    elif kind == "redis":
        pid = redis_pid(running)
    else:
        by_rank = rank_pids(running)
        pid = by_rank[0] if kind == "head" else by_rank[random.choice(range(1, len(by_rank)))]
    os.kill(pid, signal.SIGKILL)


def kill_host(bed: Testbed, host: str) -> None:
    """Kill all processes of a host except its sshd."""
    for pid in bed.processes(host):
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).name() != SSHD:
                send_signal(pid, signal.SIGKILL)


def wait_until_complete(name: str = NAME) -> int:
    """Wait until a cluster has all its ranks; its epoch. Raises ServerFailed."""
    deadline = time.monotonic() + RECOVERY_S
    while time.monotonic() < deadline:
        with suppress(ConfigError, Unreachable):  # it is recovering
            running = find_cluster(name)
            if not running.owner.gone and len(rank_pids(running)) == running.num_ranks:
                return current_epoch(running)
        time.sleep(POLL_S)
    raise ServerFailed(f"The cluster was not complete again within {RECOVERY_S:g} s.")


def streams_during_kill(
    connect: Connect,
    bodies: Sequence[dict[str, Any]],
    kind: str,
    *,
    at: int,
    name: str = NAME,
    headers: Mapping[str, str] = NO_HEADERS,
) -> list[Stream]:
    """Streams during which a part of a cluster of this machine was killed.

    Raises ServerFailed if one was closed, or no epoch began.
    """
    before, launcher = wait_until_complete(name), find_cluster(name).owner
    fault = partial(kill, kind, name)
    streams = asyncio.run(read_all(connect, bodies, at=at, fault=fault, headers=headers))
    if wait_until_complete(name) == before and find_cluster(name).owner == launcher:
        raise ServerFailed(f"The {kind} was killed, but no epoch has begun.")
    return streams


def row(kind: str, streams: Sequence[Stream], texts: Sequence[str]) -> dict[str, Any]:
    """The streams during one kill."""
    pauses = [stream.longest_pause_s for stream in streams]
    return {
        "killed": kind,
        "streams": len(streams),
        "as_undisturbed": sum(s.text == text for s, text in zip(streams, texts, strict=True)),
        "median_pause_s": statistics.median(pauses),
        "longest_pause_s": max(pauses),
    }


def run(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """A row without a kill, and one for every kill."""
    bodies = request_bodies(options.streams, options.tokens)
    with ExitStack() as stack:
        bed = None
        where = [f"cluster.stages={options.stages}", "cluster.devices=[cpu]"]
        if options.hosts:
            bed = stack.enter_context(Testbed(options.hosts))
            where = [f"cluster={hosts_file(bed, options.stages, folder)}"]
        most = f"scheduler.max_num_seqs={options.streams}"
        server = stack.enter_context(HttpServer(folder, *where, "model.context=512", most, bed=bed))
        connect = server.address.connect
        undisturbed = asyncio.run(read_all(connect, bodies))
        texts = [stream.text for stream in undisturbed]
        rows = [row("nothing", undisturbed, texts)]
        for _ in range(options.times):
            if bed is not None:
                fault = partial(kill_host, bed, bed.hosts[1])
                streams = asyncio.run(read_all(connect, bodies, at=options.at, fault=fault))
                rows.append(row(HOST, streams, texts))
            else:
                found = {
                    kind: streams_during_kill(connect, bodies, kind, at=options.at)
                    for kind in LOCAL_KINDS
                }
                rows += [row(kind, streams, texts) for kind, streams in found.items()]
        return rows


def main() -> None:
    parser = experiment.parser(__doc__)
    parser.add_argument("--streams", type=int, default=16, help="(16)")
    parser.add_argument("--tokens", type=int, default=96, help="of each (96)")
    parser.add_argument("--at", type=int, default=4, help="events before the kill (4)")
    parser.add_argument("--times", type=int, default=3, help="that each part is killed (3)")
    parser.add_argument("--stages", type=int, default=2, help="(2)")
    parser.add_argument("--hosts", type=int, default=0, help="of a test bed; needs root (none)")
    options = experiment.parse(parser, times=1, tokens=64)
    if options.hosts and (reason := testbed.missing()) is not None:
        parser.error(f"--hosts {options.hosts} is not possible here: {reason}.")
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # short, for the names of sockets
        rows = run(options, Path(name))
    place = f"{options.hosts} hosts" if options.hosts else "one machine"
    title = (
        f"{options.streams} streams of {options.tokens} tokens, {options.stages} stages, {place}"
    )
    experiment.publish(options, title, rows)
    if any(row["as_undisturbed"] < row["streams"] for row in rows):
        sys.exit("A text differs from the undisturbed one.")
    print("Every text is the undisturbed one, and no stream was closed.")


if __name__ == "__main__":
    main()
