"""Requests to a cluster that a benchmark runs, each watched token by token; some are cancelled.

    ones = [Asked(prompt, sampling, 32, right=...) for ...]
    ask(cluster, ones, at_once=40)

What is compared are token ids. `short_of_room` are the settings under which requests are put back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks import emulated
from pipespec.client.client import Client
from pipespec.client.dataset import load
from pipespec.client.own import Running
from pipespec.controller.overview import look
from pipespec.controller.records import CANCELLED, Accepted, Event, Finished
from pipespec.core import Sampling

SETTLED_S = 30.0


@dataclass
class Asked:
    """A request, and what came of it.

    Attributes:
        length: tokens of its answer.
        right: what is to be answered, or the beginning of it; longer where less is asked for.
        doomed: it is cancelled once it has so many tokens; None: it is not.
        lost, doubled: tokens that were skipped, and that came twice.
        reason: why it ended; None: it has not.
    """

    prompt: Sequence[int]
    sampling: Sampling
    length: int
    right: Sequence[int] = ()
    doomed: int | None = None
    tokens: list[int] = field(default_factory=list)
    lost: int = 0
    doubled: int = 0
    reason: str | None = None

    @property
    def different(self) -> list[int]:
        """Where its tokens are others than the right ones."""
        pairs = enumerate(zip(self.tokens, self.right, strict=False))
        return [place for place, (token, right) in pairs if token != right]

    def hear(self, event: Event) -> None:
        """One event of the request."""
        if isinstance(event, Accepted):
            expected = len(self.prompt) + len(self.tokens)
            self.lost += max(event.base - expected, 0)
            self.doubled += max(expected - event.base, 0)
            self.tokens += event.tokens
            return
        assert isinstance(event, Finished), "no request of these asks for more"
        self.reason = event.reason
        if event.reason != CANCELLED:
            self.lost += max(self.length - len(self.tokens), 0)


def ask(
    cluster: Running,
    coming: Iterable[Asked],
    *,
    at_once: int,
    on_events: Callable[[list[Asked]], None] = lambda ended: None,
) -> list[int]:
    """Hand requests in, `at_once` unfinished at a time, until all have ended; their numbers.

    `on_events` is called after whatever was heard, with those that ended.
    """
    open_: dict[int, Asked] = {}
    numbers = []
    left = iter(coming)
    with cluster.client.follow() as followed:
        while True:
            while len(open_) < at_once and (one := next(left, None)) is not None:
                number = cluster.client.submit(one.prompt, one.sampling, max_new_tokens=one.length)
                followed.add(number)
                numbers.append(number)
                open_[number] = one
            if not open_:
                return numbers
            ended = []
            for number, event in followed.next():
                one = open_[number]
                one.hear(event)
                if one.reason is not None:
                    ended.append(open_.pop(number))
                elif one.doomed is not None and len(one.tokens) >= one.doomed:
                    one.doomed = None
                    with cluster.cluster.open_log() as log:
                        log.cancel(number)
            on_events(ended)


def prompts(client: Client, count: int, tokens: int) -> list[list[int]]:
    """So many of the shipped prompts, of all data sets alike, cut to `tokens`."""
    samples = load(emulated.DATA, count)
    return [client.served.encode(each.prompt, bounded=False)[:tokens] for each in samples]


def short_of_room(*, stages: int, context: int, kv: str, at_once: int) -> list[str]:
    """Settings of a cluster on CPUs whose KV is no more than `kv` for each rank."""
    return [
        f"cluster.stages={stages}",
        "cluster.devices=[cpu]",
        f"model.context={context}",
        f"model.kv_memory={kv}",
        f"scheduler.max_num_seqs={at_once}",
        "decode.prefill_chunk=64",
    ]


def settled(cluster: Running) -> dict[str, int] | None:
    """What the head says once nothing is open; None: something is, or it says nothing."""
    deadline = time.monotonic() + SETTLED_S
    while time.monotonic() < deadline:
        told = look(cluster.cluster.url, cluster.cluster.namespace)
        if told is not None and told.statistics.get("running") == 0 and not told.open:
            return told.statistics
        time.sleep(0.1)
    return None
