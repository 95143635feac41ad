"""A whole cluster in one process: real Redis, real loops, threads for ranks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from pipespec.cluster import build
from pipespec.cluster.deployment import ControllerAddress, Deployment, decide
from pipespec.config.compose import compose
from pipespec.controller import epochs
from pipespec.controller.records import Accepted
from pipespec.controller.requests import RequestLog
from pipespec.controller.server import EmbeddedRedis
from pipespec.stats import summarise
from pipespec.transport.threads import thread_transports

NAMESPACE = "test"


def make_deployment(target: Path, draft: Path, *overrides: str) -> Deployment:
    return decide(
        compose(
            [
                f"model.target={target}",
                f"model.draft={draft}",
                "cluster.devices=[cpu]",
                *overrides,
            ]
        )
    )


def serve(deployment: Deployment, server: EmbeddedRedis, epoch: int) -> None:
    """Runs all ranks of an epoch; returns when its queue is closed and empty.

    Raises what the first rank that failed raised.
    """
    where = ControllerAddress(server.url, NAMESPACE, epoch)
    errors: list[BaseException] = []
    links = thread_transports(deployment.num_ranks)

    def rank(number: int) -> None:
        try:
            torch.set_num_threads(1)
            model = build.load_model(deployment, number)
            mid = None if number else build.load_model(deployment, 0, mid=True)
            build.serve(deployment, where, number, model, mid, lambda: links[number])
        except Exception as error:  # noqa: BLE001 - raised again below
            errors.append(error)
            # Wakes every rank that waits for a verdict.
            epochs.begin(server.url, NAMESPACE)

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(deployment.num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def decode(
    deployment: Deployment, server: EmbeddedRedis, requests: Sequence[dict[str, Any]]
) -> list[tuple[list[int], str, dict[str, Any]]]:
    """Token ids, finish reason and statistics of each request, decoded one after another."""
    epoch = epochs.begin(server.url, NAMESPACE)
    with RequestLog(server.url, namespace=NAMESPACE, epoch=epoch) as log:
        numbers = [log.enqueue(**asked) for asked in requests]
        log.close_queue()
        serve(deployment, server, epoch)
        out = []
        for number in numbers:
            *accepted, finished = log.stream(number)
            tokens = [t for event in accepted if isinstance(event, Accepted) for t in event.tokens]
            reports = log.reports(number, deployment.num_ranks, timeout=10)
            out.append((tokens, finished.reason, summarise(0, list(reports.values()))))
        return out


def reference(
    target: Path, prompts: Sequence[Sequence[int]], max_new_tokens: int, **settings: Any
) -> list[list[int]]:
    """What Hugging Face `generate` says: greedy, one prompt at a time.

    In float32, unless `settings` tell `from_pretrained` otherwise.
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
        )
        out.append(answer[0, len(prompt) :].tolist())
    return out
