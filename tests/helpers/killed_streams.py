"""Streams of an HTTP server while a part of its cluster is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from pipespec.errors import ConfigError, Unreachable
from tools.rig.http_server import (
    ServerFailed,
    current_epoch,
    find_cluster,
    rank_pids,
    redis_pid,
)
from tools.rig.http_streams import NO_HEADERS, Connect, Stream, open_stream

PROMPT = "Once upon a time there was a king who"
POLL_S = 0.02
RECOVERY_S = 120.0  # within which a cluster must be complete again


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


def kill(kind: str, name: str) -> None:
    """Kill the launcher, the head or Redis of a cluster with SIGKILL."""
    running = find_cluster(name)
    pids = {
        "launcher": lambda: running.owner.pid,
        "head": lambda: rank_pids(running)[0],
        "redis": lambda: redis_pid(running),
    }
    os.kill(pids[kind](), signal.SIGKILL)


def wait_until_complete(name: str) -> int:
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
    name: str,
    headers: Mapping[str, str] = NO_HEADERS,
) -> list[Stream]:
    """Streams during which a part of a cluster of this machine was killed.

    Raises ServerFailed if one was closed, or no epoch began.
    """
    before = wait_until_complete(name)
    fault = partial(kill, kind, name)
    streams = asyncio.run(read_all(connect, bodies, at=at, fault=fault, headers=headers))
    if wait_until_complete(name) == before:
        raise ServerFailed(f"The {kind} was killed, but no epoch has begun.")
    return streams
