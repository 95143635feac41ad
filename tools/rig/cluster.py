"""A whole cluster in one process: real Redis, real loops, threads for ranks."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore
from transformers import AutoModelForCausalLM

from pipespec.cluster.decide import decide
from pipespec.cluster.deployment.deployment import ControllerAddress, Deployment
from pipespec.cluster.ranks.rank_components import load_model
from pipespec.cluster.ranks.rank_loop import connect_links, join_rank
from pipespec.cluster.ranks.worker import rank_grammars
from pipespec.config.compose import compose
from pipespec.controller import epoch_control
from pipespec.controller.embedded_redis import EmbeddedRedis
from pipespec.controller.log_records import Accepted, Event, Finished
from pipespec.controller.request_log import RequestLog
from pipespec.timing.stats import summarise
from tools.rig.log import events_of, reports_of

NAMESPACE = "test"


def make_deployment(target: Path, draft: Path, *overrides: str) -> Deployment:
    models = f"model.target={target}", f"model.draft={draft}"
    return decide(compose([*models, "cluster.devices=[cpu]", *overrides]))


def serve(deployment: Deployment, server: EmbeddedRedis, epoch: int) -> None:
    """Runs all ranks of an epoch; returns when its queue is closed and empty.

    Raises what the first rank that failed raised.
    """
    where = ControllerAddress(server.url, NAMESPACE, epoch)
    errors: list[BaseException] = []
    store = HashStore()

    def rank(number: int) -> None:
        try:
            torch.set_num_threads(1)
            model = load_model(deployment, number)
            with (
                rank_grammars(deployment, number) as grammars,
                join_rank(deployment, where, number, model, grammars) as (_, run_loop),
                closing(connect_links(deployment, where, number, store)) as link,
            ):
                try:
                    run_loop(link)
                except Exception as error:
                    # Before the link closes, as the neighbours would report that first.
                    errors.append(error)
                    raise
        except Exception as error:  # noqa: BLE001 - raised again below
            if error not in errors:
                errors.append(error)
            # Wakes every rank that waits for a verdict.
            epoch_control.begin_epoch(server.url, NAMESPACE)

    with ThreadPoolExecutor(deployment.num_ranks) as threads:
        list(threads.map(rank, range(deployment.num_ranks)))
    if errors:
        raise errors[0]


def decode(
    deployment: Deployment, server: EmbeddedRedis, requests: Sequence[dict[str, Any]]
) -> list[tuple[list[int], str, dict[str, Any]]]:
    """Token ids, finish reason and statistics of each request, submitted together."""
    out = []
    for number, events in decode_events(deployment, server, requests).items():
        *accepted, finished = events
        assert isinstance(finished, Finished)
        tokens = [t for event in accepted if isinstance(event, Accepted) for t in event.tokens]
        reports = reports_of(server.url, NAMESPACE, number, deployment.num_ranks)
        out.append((tokens, finished.reason, summarise(0, list(reports.values()))))
    return out


def decode_events(
    deployment: Deployment, server: EmbeddedRedis, requests: Sequence[dict[str, Any]]
) -> dict[int, list[Event]]:
    """All events of each request, by its number."""
    epoch = epoch_control.begin_epoch(server.url, NAMESPACE)
    with RequestLog(server.url, namespace=NAMESPACE, epoch=epoch) as log:
        numbers = [log.enqueue(**request) for request in requests]
        log.close_queue()
    serve(deployment, server, epoch)
    return {number: events_of(server.url, NAMESPACE, number) for number in numbers}


def answers(
    deployment: Deployment, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[list[int]]:
    """The token ids of greedy answers to these prompts, submitted together."""
    asked = [{"prompt": tuple(each), "max_new_tokens": max_new_tokens} for each in prompts]
    with EmbeddedRedis() as redis:
        return [tokens for tokens, _, _ in decode(deployment, redis, asked)]


def reference(
    target: Path,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    use_cache: bool = True,
    **settings: Any,
) -> list[list[int]]:
    """The greedy answers of Hugging Face `generate`, one prompt at a time.

    In float32, unless `settings`, arguments of `from_pretrained`, say otherwise.
    """
    model = AutoModelForCausalLM.from_pretrained(target, **{"dtype": torch.float32, **settings})
    out = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        answer = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=0,
            use_cache=use_cache,
        )
        out.append(answer[0, len(prompt) :].tolist())
    return out
