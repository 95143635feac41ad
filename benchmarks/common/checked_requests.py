"""Requests to a cluster, whose answers are checked token by token; some are cancelled.

    requests = [CheckedRequest(prompt, sampling, 32, expected=...) for ...]
    run_requests(cluster, requests, concurrency=40)

Token ids are compared. `small_kv_settings` are settings with which requests are preempted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.common import run_options
from pipespec.client.local_cluster import Running
from pipespec.client.sync_client import Client
from pipespec.controller.cluster_status import read_status
from pipespec.controller.log_records import CANCELLED, Accepted, Event, Finished
from pipespec.core import SamplingParams
from pipespec.instruments.bench.dataset import load

IDLE_S = 30.0


@dataclass
class CheckedRequest:
    """A request and its answer so far.

    Attributes:
        length: how many tokens its answer has.
        expected: the expected tokens; more or fewer of them than `length` are fine.
        cancel_after: it is cancelled once it has so many tokens; None: it is not.
        lost, doubled: how many tokens were skipped, and came twice.
        reason: why it ended; None: it is unfinished.
    """

    prompt: Sequence[int]
    sampling: SamplingParams
    length: int
    expected: Sequence[int] = ()
    cancel_after: int | None = None
    tokens: list[int] = field(default_factory=list)
    lost: int = 0
    doubled: int = 0
    reason: str | None = None

    @property
    def wrong_positions(self) -> list[int]:
        """The positions at which its tokens differ from the expected ones."""
        pairs = enumerate(zip(self.tokens, self.expected, strict=False))
        return [place for place, (token, expected) in pairs if token != expected]

    def receive(self, event: Event) -> None:
        """Take in one event of the request."""
        if isinstance(event, Accepted):
            position = len(self.prompt) + len(self.tokens)
            self.lost += max(event.base - position, 0)
            self.doubled += max(position - event.base, 0)
            self.tokens += event.tokens
            return
        assert isinstance(event, Finished), "these requests ask for no logprobs"
        self.reason = event.reason
        if event.reason != CANCELLED:
            self.lost += max(self.length - len(self.tokens), 0)


def run_requests(
    cluster: Running,
    requests: Iterable[CheckedRequest],
    *,
    concurrency: int,
    on_events: Callable[[list[CheckedRequest]], None] = lambda ended: None,
) -> list[int]:
    """Run requests, at most `concurrency` at a time, until all have ended; their numbers.

    `on_events` is called after each batch of events, with the requests that have ended.
    """
    unfinished: dict[int, CheckedRequest] = {}
    numbers = []
    waiting = iter(requests)
    with cluster.client.follow() as followed:
        while True:
            while len(unfinished) < concurrency and (request := next(waiting, None)) is not None:
                number = followed.submit(
                    request.prompt, request.sampling, max_new_tokens=request.length
                )
                numbers.append(number)
                unfinished[number] = request
            if not unfinished:
                return numbers
            ended = []
            for number, event in followed.next():
                request = unfinished[number]
                request.receive(event)
                if request.reason is not None:
                    ended.append(unfinished.pop(number))
                elif (
                    request.cancel_after is not None and len(request.tokens) >= request.cancel_after
                ):
                    request.cancel_after = None
                    cluster.client.cancel(number)
            on_events(ended)


def shipped_prompts(client: Client, count: int, tokens: int) -> list[list[int]]:
    """`count` of the shipped prompts, evenly from all data sets, cut to `tokens`."""
    samples = load(run_options.DATA, count)
    return [client.served.encode(each.prompt, bounded=False)[:tokens] for each in samples]


def small_kv_settings(*, stages: int, context: int, kv: str, concurrency: int) -> list[str]:
    """Settings of a cluster on CPUs with a KV pool of `kv` for each rank."""
    return [
        f"cluster.stages={stages}",
        "cluster.devices=[cpu]",
        f"model.context={context}",
        f"model.kv_memory={kv}",
        f"scheduler.max_num_seqs={concurrency}",
        "decode.prefill_chunk=64",
    ]


def idle_statistics(cluster: Running) -> dict[str, int] | None:
    """The head's statistics once no request is unfinished; None: this takes too long."""
    deadline = time.monotonic() + IDLE_S
    while time.monotonic() < deadline:
        overview = read_status(cluster.cluster.url, cluster.cluster.namespace)
        if overview is not None and overview.statistics.get("running") == 0 and not overview.open:
            return overview.statistics
        time.sleep(0.1)
    return None
