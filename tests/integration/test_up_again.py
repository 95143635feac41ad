"""A cluster that dies and is started again under its name goes on with what was unfinished."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from pipespec.client import registry
from pipespec.client.async_answer import AsyncAnswer
from pipespec.client.async_client import attach
from pipespec.controller.log_records import Accepted
from pipespec.core import SamplingParams
from tests.helpers.sandbox import PATIENCE_S, Sandbox
from tests.helpers.waiting import until

pytestmark = pytest.mark.slow
NAME = "lab"
SETTINGS = ("--name", NAME, "cluster.stages=2", "cluster.devices=[cpu]")
PROMPT = "Once upon a time there was a king who"
NUM_TOKENS = 60


async def ask(followed: AsyncAnswer, prompt: list[int]) -> None:
    await followed.submit(
        prompt, SamplingParams(temperature=0.8, seed=3), max_new_tokens=NUM_TOKENS
    )


async def heard(followed: AsyncAnswer, enough: int = NUM_TOKENS) -> list[int]:
    """The tokens that come, until there are enough or the request has finished."""
    tokens: list[int] = []
    while len(followed) and len(tokens) < enough:
        for _, event in await followed.next(PATIENCE_S):
            if isinstance(event, Accepted):
                tokens += event.tokens
    return tokens


@pytest.mark.long  # test_serve_own.py kills a launcher in every run
@pytest.mark.timeout(400)  # it starts two clusters
def test_client_gets_the_same_tokens_when_the_launcher_dies_and_is_started_again(
    place: Sandbox,
) -> None:
    def start() -> None:
        code, _, err = place.run("up", "--detach", *SETTINGS)
        assert (code, err) == (0, "")

    async def story() -> None:
        running = registry.find(NAME)
        prompt = running.served.encode(PROMPT)
        async with attach(running, PATIENCE_S) as client, client.follow() as followed:
            await ask(followed, prompt)
            tokens = await heard(followed, 5)
            assert 0 < len(tokens) < NUM_TOKENS
            os.kill(running.owner.pid, signal.SIGKILL)
            await asyncio.to_thread(until, lambda: not place.processes())
            data = place.folder / "pipespec" / f"{NAME}.data"
            assert data.stat().st_mode & 0o777 == 0o700
            await asyncio.to_thread(start)
            assert registry.find(NAME).owner != running.owner
            tokens += await heard(followed)
            await ask(followed, prompt)
            assert tokens == await heard(followed)
            assert len(tokens) == NUM_TOKENS

    start()
    asyncio.run(story())
    assert place.run("down", NAME) == (0, f"{NAME} has ended.\n", "")
    assert [file.name for file in (place.folder / "pipespec").iterdir()] == [f"{NAME}.log"]
