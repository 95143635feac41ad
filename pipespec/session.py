"""A cluster that is started once and decodes many requests.

    with session.start(plan) as cluster:
        request = cluster.submit(prompt, sampling, max_new_tokens=64)
        for event in cluster.events(request):
            ...

The head decodes one request at a time, in the order in which they were submitted; the others
wait in the request log.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipespec import build
from pipespec.config import Config, ControllerConfig
from pipespec.control.client import Controller
from pipespec.control.connection import check_server
from pipespec.control.requests import Accepted, Finished, RequestLog
from pipespec.control.server import EmbeddedRedis
from pipespec.errors import RankFailed
from pipespec.launch import LocalCluster, launch
from pipespec.stats import Report, summarise
from pipespec.text import Detokenizer, StopStrings
from pipespec.trace import write_chrome_trace
from pipespec.types import Sampling, TokenLogprobs

# How often a silent cluster is looked at, and how long its ranks may take to report at the end.
HEARTBEAT_S = 0.05
REPORTS_TIMEOUT_S = 60.0
# A seed nobody chose is short enough to be typed again, and exact wherever JSON is read.
SEED_BITS = 32


class ClusterSession:
    """The running cluster, as whoever asks it for text sees it. Not for several threads."""

    def __init__(self, plan: build.Plan, log: RequestLog, cluster: LocalCluster):
        self.plan = plan
        self._log = log
        self._cluster = cluster

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        max_new_tokens: int,
        stop: Sequence[str] = (),
        eos: Sequence[int] = (),
    ) -> int:
        """Put a request in the queue; its number.

        `prompt` are token ids; prompt and answer must fit into the plan's context, which ends
        an answer that does not. `stop` are texts and `eos` tokens that end it earlier.
        """
        assert 0 < len(prompt) < self.plan.context, "the KV pools are made for no more"
        return self._log.enqueue(
            prompt=tuple(prompt),
            max_new_tokens=max_new_tokens,
            eos=tuple(eos),
            stop=tuple(stop),
            sampling=sampling,
        )

    def events(self, request: int) -> Iterator[Accepted | Finished]:
        """The events of a request, from its first on; Finished is the last.

        Raises RankFailed if the cluster ends before the request does.
        """
        for event in self._log.stream(request, heartbeat=HEARTBEAT_S):
            if event is not None:
                yield event
            elif not self._cluster.poll():
                raise RankFailed("The ranks ended before the request was finished.")

    def reports(self, request: int) -> list[Report]:
        """What every rank says of a finished request, the head's first."""
        return list(self._log.reports(request, self.plan.num_ranks, REPORTS_TIMEOUT_S).values())


@contextmanager
def start(
    plan: build.Plan, on_loaded: Callable[[int, int], None] = lambda ranks, of: None
) -> Iterator[ClusterSession]:
    """Start the cluster of a plan, wait until all ranks are ready, and end it afterwards.

    Leaving the block waits for what was submitted; an exception ends the ranks at once.

    Args:
        on_loaded: called with how many ranks have loaded their models, and of how many.

    Raises:
        ConfigError, Unreachable: before any rank starts.
        RankFailed: a rank died; the others have been ended.
    """
    with controller(plan.config.controller) as (url, namespace):
        epoch = Controller.new_epoch(url, namespace)
        where = build.Where(url, namespace, epoch)
        with (
            RequestLog(url, namespace=namespace, epoch=epoch) as log,
            launch(
                build.run_rank,
                (plan, where),
                num_ranks=plan.num_ranks,
                port=plan.config.transport.port,
            ) as cluster,
        ):
            await_ranks(log, cluster, plan.num_ranks, on_loaded)
            yield ClusterSession(plan, log, cluster)
            log.close_queue()
            cluster.wait()


@contextmanager
def controller(config: ControllerConfig) -> Iterator[tuple[str, str]]:
    """URL and namespace to use: the user's Redis, once it has answered, or a private one.

    In a Redis that others use too, this run's keys have a namespace of their own, and are gone
    after it.
    """
    if config.url is None:
        with EmbeddedRedis() as server:
            yield server.url, config.namespace
        return
    check_server(config.url)
    namespace = f"{config.namespace}:{secrets.token_hex(4)}"
    try:
        yield config.url, namespace
    finally:
        Controller.forget(config.url, namespace)


def await_ranks(
    log: RequestLog, cluster: LocalCluster, count: int, on_loaded: Callable[[int, int], None]
) -> None:
    """Wait until every rank has loaded its model and joined."""
    joined = -1
    while joined < count:
        if not cluster.poll():
            raise RankFailed("The ranks ended before they had any work.")
        now = log.await_ranks(joined + 1, timeout=HEARTBEAT_S)
        if now != joined:
            joined = now
            on_loaded(joined, count)


# --- one request ------------------------------------------------------------------------------


def fresh_seed() -> int:
    """The seed of a request that names none."""
    return secrets.randbits(SEED_BITS)


@dataclass
class Answer:
    """What a request's events have told: its tokens, its text before a stop string, its end."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""


def gather(
    events: Iterable[Accepted | Finished],
    text: Detokenizer,
    stops: StopStrings,
    on_text: Callable[[str], None] = lambda piece: None,
) -> Answer:
    """The answer that the events make; `on_text` hears each piece of text once it is final."""
    answer = Answer()
    pieces: list[str] = []

    def show(piece: str) -> None:
        pieces.append(piece)
        on_text(piece)

    for event in events:
        if isinstance(event, Accepted):
            answer.token_ids += event.tokens
            answer.logprobs += event.logprobs
            show(stops.push(text.push(event.tokens)))
        else:
            answer.finish_reason = event.reason
    show(stops.push(text.flush()) + stops.flush())
    answer.text = "".join(pieces)
    return answer


# Statistics that are milliseconds; `tokens_per_s` is the inverse of one.
TIMES = ("ttft_ms", "tbt_ms", "step_ms", "control_ms_per_step")


def statistics(config: Config, enqueued_ns: int, reports: list[Report]) -> dict[str, Any]:
    """`pipespec.stats.summarise`, in the time of the machine that `pace` emulates, if one is."""
    stats = summarise(enqueued_ns, reports)
    scale = time_scale(config)
    if scale == 1:
        return stats

    def scaled(value: Any, factor: float) -> Any:
        if isinstance(value, dict):
            return {name: scaled(part, factor) for name, part in value.items()}
        return None if value is None else value * factor

    times = {name: scaled(stats[name], 1 / scale) for name in TIMES}
    return stats | times | {"tokens_per_s": scaled(stats["tokens_per_s"], scale)}


def emulated(config: Config) -> bool:
    """Whether times are those of an emulated machine or network."""
    return bool(config.pace) or bool(config.link)


def time_scale(config: Config) -> float:
    """How many times longer than in the emulated machine everything takes here."""
    return config.pace.scale if emulated(config) else 1.0


def labels(config: Config, sampling: Sampling) -> dict[str, Any]:
    """What every output must say of its figures and text, and the seed to repeat them."""
    return {
        "emulated": emulated(config),
        "synthetic": config.source.synthetic,
        "lossy": sampling.lossy,
        "seed": sampling.seed if sampling.temperature else None,
    }


def write_trace(plan: build.Plan, reports: Iterable[Report]) -> None:
    """Join the ranks' spans to one file, if one was asked for."""
    if plan.config.trace is None:
        return
    names = ["head: draft and tree"]
    names += [f"stage {i}: layers {s.start}..{s.stop - 1}" for i, s in enumerate(plan.layers, 1)]
    ranks = [(r["rank"], names[r["rank"]], [tuple(e) for e in r["events"]]) for r in reports]
    write_chrome_trace(Path(plan.config.trace), ranks)
