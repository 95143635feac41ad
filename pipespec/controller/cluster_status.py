"""The state of a cluster, as `pipespec status`, /metrics and the dashboard read it from Redis."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pipespec.controller.redis_connection import RedisConnection
from pipespec.controller.redis_keys import RedisKeys


@dataclass(frozen=True)
class ClusterStatus:
    """One moment of a namespace: how many ranks have joined `epoch`, how many requests are decoded
    (`open`), wait and have ended, and which epoch ended last, and why. `state` is the newest of the
    head (`Scheduler.gauges`), `counts` those of the ranks in this epoch by "name" or
    "name/label" (`Totals.counts`, `StageLoop.worked`, `FaultStats`), `past` the sums of earlier
    epochs. `computing` has the attention backend and other choices of each rank
    (`ModelSlice.outcome`), `pids` its process, and `followers` those of the followers of ranks,
    by worker. `assignment` is a `RankAssignment` as text; None: not known."""

    epoch: int
    joined: int
    open: int
    queued: int
    finished: int
    last_fault: str | None
    state: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    past: dict[str, int] = field(default_factory=dict)
    computing: dict[int, dict[str, Any]] = field(default_factory=dict)
    assignment: str | None = None
    pids: dict[int, int] = field(default_factory=dict)
    followers: dict[str, int] = field(default_factory=dict)

    @property
    def statistics(self) -> dict[str, int]:
        """The newest state and counts of the head in this epoch; empty until it has begun."""
        return self.state | {name: n for name, n in self.counts.items() if "/" not in name}

    @cached_property
    def totals(self) -> Counter[str]:
        return Counter(self.past) + Counter(self.counts)

    @property
    def busy(self) -> dict[str, float]:
        """By stage: the share of this epoch's time with a running request in which it computed."""
        active = labelled(self.counts, "active_ns")
        busy = labelled(self.counts, "busy_ns")
        return {stage: busy[stage] / max(active[stage], 1) for stage in sorted(busy, key=int)}

    @property
    def faults(self) -> dict[str, int]:
        """How many epochs have ended since the log began, by kind of fault."""
        return labelled(self.past, "faults")


@dataclass(frozen=True)
class Unfinished:
    """A request that is not answered yet. `length` counts the tokens of its sequence so far, prompt
    included, and `prompt` those of the prompt; None: an older version wrote the request. `taken`:
    the head has admitted it."""

    request: int
    taken: bool
    length: int
    prompt: int | None


def labelled(counts: Mapping[str, int], name: str) -> dict[str, int]:
    split = ((key.partition("/"), count) for key, count in counts.items())
    return {label: count for (found, _, label), count in split if found == name and label}


def read_status(url: str, namespace: str) -> ClusterStatus | None:
    """The status of the cluster of a namespace, if Redis has it. Raises Unreachable."""
    keys = RedisKeys(namespace)
    with RedisConnection(url) as pipe:
        epoch = pipe.call("GET", keys.epoch)
        if epoch is None:
            return None
        for command in status_commands(keys, int(epoch)):
            replies = pipe.call(*command)
    return parse_status(int(epoch), replies)


def status_commands(keys: RedisKeys, epoch: int) -> list[tuple[Any, ...]]:
    """The commands that read a status; the reply to the last one holds all replies."""
    return [
        ("MULTI",),  # together, so that no request is counted twice
        ("HGETALL", keys.ranks(epoch)),
        ("HGETALL", keys.followers(epoch)),
        ("GET", keys.finished),
        ("ZCARD", keys.queue),
        ("ZCARD", keys.admitted),
        ("GET", keys.fault),
        ("HGETALL", keys.statistics(epoch)),
        ("HGETALL", keys.counts(epoch)),
        ("HGETALL", keys.totals),
        ("HGETALL", keys.computing(epoch)),
        ("XREVRANGE", keys.assignments, "+", "-", "COUNT", 1),
        ("EXEC",),
    ]


def parse_status(epoch: int, replies: list[Any]) -> ClusterStatus:
    ranks, followers, finished, queued, admitted, fault, *hashes, computing, assigned = replies
    pids = {
        int(rank): pid
        for rank, pid in sorted(numbers(ranks).items(), key=lambda each: int(each[0]))
    }
    state, counts, past = map(numbers, hashes)
    by_rank = dict(zip(map(int, computing[::2]), map(json.loads, computing[1::2]), strict=True))
    return ClusterStatus(
        epoch=epoch,
        joined=len(pids),
        open=admitted,
        queued=queued,
        finished=int(finished or 0),
        last_fault=fault.decode() if fault else None,
        state=state,
        counts=counts,
        past=past,
        computing={rank: by_rank[rank] for rank in sorted(by_rank)},
        assignment=assigned[0][1][1].decode() if assigned else None,
        pids=pids,
        followers=numbers(followers),
    )


def numbers(reply: list[bytes]) -> dict[str, int]:
    return {name.decode(): int(value) for name, value in zip(reply[::2], reply[1::2], strict=True)}


def unfinished_commands(keys: RedisKeys, most: int) -> list[tuple[Any, ...]]:
    """The commands for `most` admitted requests and as many waiting ones; the last replies."""
    fields = [f"{keys.requests}:*->{name}" for name in ("length", "prompt")]
    got = [text for name in ("#", *fields) for text in ("GET", name)]
    sort = ("BY", "nosort", "LIMIT", 0, most, *got)
    return [("MULTI",), ("SORT", keys.admitted, *sort), ("SORT", keys.queue, *sort), ("EXEC",)]


def parse_unfinished(replies: list[Any]) -> list[Unfinished]:
    return [
        Unfinished(int(request), taken, int(length or 0), None if prompt is None else int(prompt))
        for taken, found in zip((True, False), replies, strict=True)
        for request, length, prompt in zip(found[::3], found[1::3], found[2::3], strict=True)
    ]
