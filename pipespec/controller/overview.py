"""How a cluster is doing, read from its Redis by whoever asks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pipespec.controller.connection import Pipe
from pipespec.controller.keys import Keys


@dataclass(frozen=True)
class Overview:
    """One moment of a namespace.

    `joined` ranks have loaded their models and take part in `epoch`. Of the requests so far,
    `open` are being decoded, `queued` wait and `finished` are answered or cancelled. `last_fault`
    says which epoch ended last, and why; None if none has. `state` is what the head said last of
    this moment (`Scheduler.statistics`), nothing if it has not begun; `counts` is what the ranks
    have counted in this epoch, and `past` in those before, by "name" or "name/label"
    (`Totals.counts`, `StageLoop.worked`, `FaultRecord`). `computing` is how each rank computes that
    holds a model (`ModelSlice.outcome`), `assignment` who holds which rank, as text
    (`RankAssignment`); None: nobody has said.
    """

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

    @property
    def statistics(self) -> dict[str, int]:
        """What the head said of this epoch last; nothing if it has not begun."""
        return self.state | {name: n for name, n in self.counts.items() if "/" not in name}

    @cached_property
    def totals(self) -> Counter[str]:
        """What was counted since the log began."""
        return Counter(self.past) + Counter(self.counts)

    @property
    def busy(self) -> dict[str, float]:
        """Of each stage that has told: the share of this epoch's time with a request in which it
        computed."""
        active = labelled(self.counts, "active_ns")
        busy = labelled(self.counts, "busy_ns")
        return {stage: busy[stage] / max(active[stage], 1) for stage in sorted(busy, key=int)}

    @property
    def faults(self) -> dict[str, int]:
        """What ended epochs since the log began, by its kind."""
        return labelled(self.past, "faults")


@dataclass(frozen=True)
class Unfinished:
    """A request that is not answered yet.

    `length` is that of its sequence so far, prompt included; `prompt` that of the prompt, None of
    one that an older version has put into the log. `taken`: the head has it.
    """

    request: int
    taken: bool
    length: int
    prompt: int | None


def labelled(counts: Mapping[str, int], name: str) -> dict[str, int]:
    """The counts of one name by their labels."""
    split = ((key.partition("/"), count) for key, count in counts.items())
    return {label: count for (found, _, label), count in split if found == name and label}


def look(url: str, namespace: str) -> Overview | None:
    """How the cluster of a namespace is doing; None if there is nothing of it in Redis.

    Raises Unreachable.
    """
    keys = Keys(namespace)
    pipe = Pipe(url)
    try:
        epoch = pipe.call("GET", keys.epoch)
        if epoch is None:
            return None
        for command in questions(keys, int(epoch)):
            replies = pipe.call(*command)
    finally:
        pipe.close()
    return overview(int(epoch), replies)


def questions(keys: Keys, epoch: int) -> list[tuple[Any, ...]]:
    """The commands that ask how a cluster is doing; the last one replies to all."""
    return [
        ("MULTI",),  # together, so that no request is counted twice
        ("HLEN", keys.ranks(epoch)),
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


def overview(epoch: int, replies: list[Any]) -> Overview:
    """What the last reply to `questions` says."""
    joined, finished, queued, admitted, fault, *told, computing, assigned = replies
    state, counts, past = map(numbers, told)
    by_rank = dict(zip(map(int, computing[::2]), map(json.loads, computing[1::2]), strict=True))
    return Overview(
        epoch=epoch,
        joined=joined,
        open=admitted,
        queued=queued,
        finished=int(finished or 0),
        last_fault=fault.decode() if fault else None,
        state=state,
        counts=counts,
        past=past,
        computing={rank: by_rank[rank] for rank in sorted(by_rank)},
        assignment=assigned[0][1][1].decode() if assigned else None,
    )


def numbers(reply: list[bytes]) -> dict[str, int]:
    """A hash of whole numbers, as Redis replies it."""
    return {name.decode(): int(value) for name, value in zip(reply[::2], reply[1::2], strict=True)}


def unfinished_questions(keys: Keys, most: int) -> list[tuple[Any, ...]]:
    """The commands that ask for the first `most` requests that the head has, and as many of those
    that wait; the last one replies to all."""
    fields = [f"{keys.requests}:*->{name}" for name in ("length", "prompt")]
    got = [word for name in ("#", *fields) for word in ("GET", name)]
    sort = ("BY", "nosort", "LIMIT", 0, most, *got)
    return [("MULTI",), ("SORT", keys.admitted, *sort), ("SORT", keys.queue, *sort), ("EXEC",)]


def unfinished(replies: list[Any]) -> list[Unfinished]:
    """What the last reply to `unfinished_questions` says."""
    return [
        Unfinished(int(request), taken, int(length or 0), None if prompt is None else int(prompt))
        for taken, found in zip((True, False), replies, strict=True)
        for request, length, prompt in zip(found[::3], found[1::3], found[2::3], strict=True)
    ]
