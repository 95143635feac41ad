"""Workers that prepare requests, and requests that take too much time or memory."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from pipespec.client.model_info import ModelInfo
from pipespec.client.registry import Owner, RunningCluster
from pipespec.cluster.deployment import decide
from pipespec.config.compose import compose
from pipespec.server.api_errors import ApiError
from pipespec.server.preparation import (
    PREVIEW_LENGTH,
    PREVIEW_TOKENS,
    PreparationContext,
    PreparedRequest,
    Preparer,
)
from pipespec.server.preparation_workers import PreparationWorkers
from pipespec.server.request_parsing import RequestDefaults

CHAT = json.dumps({"messages": [{"role": "user", "content": "Hello"}]}).encode()
TEXT = json.dumps({"prompt": "Hello"}).encode()
LIMIT_S = 1.0
LOOPS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
)


def context_of(template: str | None = None) -> PreparationContext:
    served = ModelInfo.of(decide(compose(["model.context=1024"])))
    if template is not None:
        assert served.backend is not None
        served = replace(served, backend=replace(served.backend, chat_template=template))
    running = RunningCluster(
        "lab", "", "nobody", 1, Owner.this(), "here", (), served, num_ranks=5, started=1.0
    )
    return PreparationContext(served, RequestDefaults.of_cluster(running), ("demo",), None)


@pytest.fixture(scope="module")
def context() -> PreparationContext:
    return context_of()


@pytest.fixture
def workers() -> Iterator[PreparationWorkers]:
    workers = PreparationWorkers(most=2, limit_s=LIMIT_S)
    with closing(workers):
        yield workers


def test_endless_template_is_killed_and_delays_no_other_request(
    workers: PreparationWorkers, context: PreparationContext
) -> None:
    endless = context_of(LOOPS)

    async def story() -> None:
        await workers.prepare(context, "/v1/completions", TEXT)
        slow = asyncio.ensure_future(workers.prepare(endless, "/v1/chat/completions", CHAT))
        began = time.monotonic()
        prepared = await workers.prepare(context, "/v1/completions", TEXT)
        assert isinstance(prepared, PreparedRequest)
        while not slow.done():  # what the loop does meanwhile
            await asyncio.sleep(0)
        with pytest.raises(ApiError, match="takes more than 1 s to prepare") as refused:
            await slow
        assert (refused.value.status, refused.value.code) == (400, "request_too_complex")
        assert time.monotonic() - began > LIMIT_S / 2
        # There is a process for the next one.
        assert isinstance(
            await workers.prepare(context, "/v1/chat/completions", CHAT), PreparedRequest
        )

    asyncio.run(story())


def test_template_that_renders_gigabytes_is_refused(
    workers: PreparationWorkers, context: PreparationContext
) -> None:
    async def story() -> None:
        with pytest.raises(ApiError) as refused:
            await workers.prepare(context_of("{{ 'a' * 10**10 }}"), "/v1/chat/completions", CHAT)
        assert refused.value.status == 400
        assert isinstance(
            await workers.prepare(context, "/v1/chat/completions", CHAT), PreparedRequest
        )

    asyncio.run(story())


def test_closing_workers_ends_their_processes_and_fails_their_requests(
    context: PreparationContext,
) -> None:
    workers = PreparationWorkers(most=1, limit_s=600.0)

    async def story() -> None:
        slow = asyncio.ensure_future(
            workers.prepare(context_of(LOOPS), "/v1/chat/completions", CHAT)
        )
        while not workers.processes:
            await asyncio.sleep(0)
        found = workers.processes
        began = time.monotonic()
        await asyncio.to_thread(workers.close)
        assert time.monotonic() - began < 60
        with pytest.raises(ApiError):
            await slow
        assert all(process.poll() is not None for process in found)
        with pytest.raises(RuntimeError):
            await workers.prepare(context, "/v1/completions", TEXT)

    asyncio.run(story())


def test_preview_is_the_beginning_of_what_is_asked(context: PreparationContext) -> None:
    preparer = Preparer(context)

    def preview(path: str, **body: object) -> str:
        prepared = preparer.prepare(path, json.dumps(body).encode())
        assert isinstance(prepared, PreparedRequest)
        return prepared.preview

    turns = [("system", "Be brief."), ("user", "First"), ("assistant", "Yes"), ("user", "Second")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert preview("/v1/chat/completions", messages=messages) == "Second"
    assert preview("/v1/chat/completions", messages=messages[:1]) == ""
    assert preview("/v1/messages", messages=messages[1:], max_tokens=1) == "Second"
    assert (
        preview("/v1/completions", prompt=["One " * 100, "Two"]) == ("One " * 100)[:PREVIEW_LENGTH]
    )
    ids = context.served.tokenizer.encode("Once upon a time", add_special_tokens=False)
    assert preview("/v1/completions", prompt=ids).strip() == "Once upon a time"
    assert len(preview("/v1/completions", prompt=100 * ids[:1])) <= PREVIEW_TOKENS * 10
