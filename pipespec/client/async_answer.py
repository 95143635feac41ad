"""The requests of one user of an `AsyncClient`, and what arrives of their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from pipespec.controller.log_records import Event, Finished
from pipespec.core import SamplingParams

# From so many events of one request that wait here for a slow reader on no more are read; the log
# keeps them.
MOST_EVENTS = 256


class Sender(Protocol):
    """What the requests of one user need of the client of all."""

    async def submit_for(
        self, followed: AsyncAnswer, prompt: Sequence[int], **asked: Any
    ) -> int: ...
    async def add_for(self, followed: AsyncAnswer, request: int, *, known: bool) -> None: ...
    async def wake(self) -> None: ...
    def leave(self, request: int) -> None: ...


class AsyncAnswer:
    """Requests of one user, whose events are received as they come. For one task."""

    def __init__(self, client: Sender):
        self._client = client
        self._open: dict[int, int] = {}  # events that wait here, of each that has not finished
        self._events: list[tuple[int, Event]] = []
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._error: Exception | None = None
        self._num_failed = 0

    def __len__(self) -> int:
        """How many have not finished, as far as was received, or have failed."""
        return len(self._open) + self._num_failed

    async def submit(self, prompt: Sequence[int], sampling: SamplingParams, **fields: Any) -> int:
        """Put a request in the queue and follow it; its number. Raises Unreachable. `prompt` are
        token ids; prompt and answer must fit into the model's context, which ends an answer that
        does not. `fields` are others of `Request`; `max_new_tokens` is needed."""
        return await self._client.submit_for(self, prompt, sampling=sampling, **fields)

    async def add(self, request: int) -> None:
        """Follow a request that is in the log, from its first event on."""
        await self._client.add_for(self, request, known=False)

    async def next(self, timeout: float | None = None) -> list[tuple[int, Event]]:
        """The next events, each with its request; [] if none comes within `timeout` seconds. Raises
        RankFailed or Unreachable if the cluster is gone for good."""
        if not self._news.is_set():
            # `asyncio.timeout` takes as long as all else here, and this is once for every token.
            waking = timeout is not None and self._loop.call_later(timeout, self._news.set)
            try:
                await self._news.wait()
            finally:
                if waking:
                    waking.cancel()
        if self._error:
            raise self._error
        events, self._events = self._events, []
        self._news.clear()
        for request, event in events:
            if isinstance(event, Finished):
                del self._open[request]
        full = any(count >= MOST_EVENTS for count in self._open.values())
        self._open = dict.fromkeys(self._open, 0)
        if full:  # there is room again
            await self._client.wake()
        return events

    def interrupt(self, error: Exception) -> None:
        """Have `next` raise an error; what has not finished is still to be left."""
        self._error = error
        self._news.set()

    def leave(self) -> None:
        for request in self._open:
            self._client.leave(request)
        self._open.clear()

    # --- for the client -----------------------------------------------------------------------

    def expect(self, request: int) -> None:
        self._open[request] = 0

    def waiting(self, request: int) -> int:
        """How many events of a request were not taken."""
        return self._open.get(request, 0)

    def push(self, request: int, event: Event) -> None:
        self._open[request] += 1
        self._events.append((request, event))
        self._news.set()

    def fail(self, request: int, error: Exception) -> None:
        if self._open.pop(request, None) is not None:
            self._num_failed += 1
        self.interrupt(error)
