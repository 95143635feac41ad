"""Reading a request log without a cluster, as a user of one does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipespec.client.model_info import ModelInfo
from pipespec.client.registry import Owner, RunningCluster
from pipespec.client.sync_client import PATIENCE_S, attach
from pipespec.controller.async_request_log import AsyncRequestLog
from pipespec.controller.log_records import Event
from pipespec.engine.checkpoint.tokenizer import BackendTokenizer
from tools.rig.requests import RequestClient

# A model of which nothing but its context matters.
ANY_MODEL = ModelInfo("any", 1 << 20, context=1 << 20, eos=(), tokenizer=BackendTokenizer(""))


@contextmanager
def client_of(url: str, namespace: str, patience: float = PATIENCE_S) -> Iterator[RequestClient]:
    """A client of a request log that processes of this machine write to."""
    running = RunningCluster(
        "rig", url, namespace, 1, Owner.this(), "here", (), ANY_MODEL, num_ranks=1, started=0.0
    )
    with attach(running, patience) as client:
        yield RequestClient(client.thread)


def events_of(url: str, namespace: str, request: int) -> list[Event]:
    """All events of a request, up to its end."""
    events: list[Event] = []
    with client_of(url, namespace) as client, client.follow() as followed:
        client.run(followed.add(request))
        while len(followed):
            events += [event for _, event in client.run(followed.next())]
    return events


def reports_of(
    url: str, namespace: str, request: int, count: int, timeout: float = 10.0, **options: bool
) -> dict[int, dict[str, Any]]:
    """`AsyncRequestLog.reports`."""

    async def read() -> dict[int, dict[str, Any]]:
        log = AsyncRequestLog(url, namespace=namespace, patience=PATIENCE_S)
        try:
            return await log.reports(request, count, timeout, **options)
        finally:
            await log.close()

    return asyncio.run(read())
