"""One prompt, one cluster, one text: what `pipespec generate` runs."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipespec import build
from pipespec.clock import monotonic_ns
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
from pipespec.types import TokenLogprobs

# How often a silent cluster is looked at, and how long its ranks may take to report at the end.
HEARTBEAT_S = 0.05
REPORTS_TIMEOUT_S = 60.0
# A seed nobody chose is short enough to be typed again, and exact wherever JSON is read.
SEED_BITS = 32


@dataclass(frozen=True)
class Result:
    """A finished request. `stats` is described in `pipespec.stats`.

    `logprobs`, if asked for, has for every token its `token_id` and `logprob` and, as `top`,
    the same two of the most probable tokens: natural logarithms, in the target's own
    distribution.
    """

    text: str
    token_ids: list[int]
    logprobs: list[dict[str, Any]] | None
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    stats: dict[str, Any]


def generate(
    config: Config,
    prompt: str,
    on_text: Callable[[str], None] = lambda piece: None,
    on_loaded: Callable[[int, int], None] = lambda ranks, of: None,
) -> Result:
    """Decode one prompt on a cluster that is started for it and ended after it.

    Args:
        on_text: called with each piece of text as soon as it is final.
        on_loaded: called with how many ranks have loaded their models, and of how many.

    Raises:
        ConfigError, Unreachable: before any rank starts, if anything in the request is wrong.
        RankFailed: a rank died; the others have been ended.
    """
    plan = build.plan(config)
    tokenizer = build.load_tokenizers(plan)
    ids = build.encode(plan, tokenizer, prompt)
    plan = build.fit_context(plan, len(ids))
    with controller(config.controller) as (url, namespace):
        epoch = Controller.new_epoch(url, namespace)
        where = build.Where(url, namespace, epoch)
        with (
            RequestLog(url, namespace=namespace, epoch=epoch) as log,
            launch(
                build.run_rank, (plan, where), num_ranks=plan.num_ranks, port=config.transport.port
            ) as cluster,
        ):
            await_ranks(log, cluster, plan.num_ranks, on_loaded)
            sampling = config.verify.sampling(fresh_seed=secrets.randbits(SEED_BITS))
            enqueued = monotonic_ns()
            request = log.enqueue(
                prompt=tuple(ids),
                max_new_tokens=config.decode.max_new_tokens,
                eos=() if config.decode.ignore_eos else plan.target.eos,
                stop=tuple(config.decode.stop),
                sampling=sampling,
            )
            log.close_queue()
            detokenizer = Detokenizer(tokenizer, ids)
            stops = StopStrings(config.decode.stop)
            pieces: list[str] = []
            tokens: list[int] = []
            logprobs: list[TokenLogprobs] = []

            def show(piece: str) -> None:
                pieces.append(piece)
                on_text(piece)

            reason = ""
            for event in watched(log, cluster, request):
                if isinstance(event, Accepted):
                    tokens += event.tokens
                    logprobs += event.logprobs
                    show(stops.push(detokenizer.push(event.tokens)))
                else:
                    reason = event.reason
            show(stops.push(detokenizer.flush()) + stops.flush())
            reports = list(log.reports(request, plan.num_ranks, REPORTS_TIMEOUT_S).values())
            cluster.wait()
    write_trace(plan, reports)
    return Result(
        text="".join(pieces),
        token_ids=tokens,
        logprobs=None if sampling.logprobs is None else [*map(_report, tokens, logprobs)],
        prompt_tokens=len(ids),
        completion_tokens=len(tokens),
        finish_reason=reason,
        stats=summarise(enqueued, reports)
        | {
            "emulated": bool(config.pace),
            "synthetic": config.source.synthetic,
            "lossy": sampling.lossy,
            "seed": sampling.seed if sampling.temperature else None,
        },
    )


def _report(token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
    return {
        "token_id": token,
        "logprob": logprobs.logprob,
        "top": [{"token_id": id_, "logprob": value} for id_, value in logprobs.top],
    }


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


def watched(log: RequestLog, cluster: LocalCluster, request: int) -> Iterator[Accepted | Finished]:
    """The events of a request; raises what has happened to the cluster if they stop."""
    for event in log.stream(request, heartbeat=HEARTBEAT_S):
        if event is not None:
            yield event
        elif not cluster.poll():
            raise RankFailed("The ranks ended before the request was finished.")


def write_trace(plan: build.Plan, reports: list[Report]) -> None:
    """Join the ranks' spans to one file, if one was asked for."""
    if plan.config.trace is None:
        return
    labels = ["head: draft and tree"]
    labels += [f"stage {i}: layers {s.start}..{s.stop - 1}" for i, s in enumerate(plan.layers, 1)]
    ranks = [(r["rank"], labels[r["rank"]], [tuple(e) for e in r["events"]]) for r in reports]
    write_chrome_trace(Path(plan.config.trace), ranks)
