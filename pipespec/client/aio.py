"""Asks a cluster from an event loop, for any number of users at once.

    async with attach(running, patience=600) as client, client.follow() as followed:
        request = await followed.submit(prompt, sampling, max_new_tokens=64)
        while len(followed):
            for request, event in await followed.next():
                ...

All requests are followed over one connection. Whoever leaves the block of `follow` before they
have finished cancels them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from pipespec.client import registry
from pipespec.client.registry import RunningCluster
from pipespec.client.served import ServedModel
from pipespec.controller.aio import AsyncLog, AsyncStreams, Forgotten
from pipespec.controller.connection import ANSWER_TIMEOUT_S, RETRY_S, password
from pipespec.controller.overview import Overview, Unfinished
from pipespec.controller.records import Event, Finished
from pipespec.controller.watching import AsyncWatch
from pipespec.core import Sampling
from pipespec.errors import ConfigError, ControllerError, RankFailed, Unreachable

# How long all requests may be silent before the cluster is looked at.
HEARTBEAT_S = 0.5
# From so many events of one request that wait here for a slow reader on no more are read; the log
# keeps them.
MOST_EVENTS = 256


class AsyncClient:
    """Asks the cluster of one name, for the tasks of one event loop.

    When the cluster, or its Redis, is away, requests wait for up to `patience` seconds. A cluster
    that is started again under the same name with the same data (`controller.data`) goes on with
    them; of one that is another they fail.
    """

    def __init__(self, running: RunningCluster, patience: float):
        self.running = running
        self.patience = patience
        self.away = False  # whether the cluster is known not to answer
        self._connect()
        self._readers: dict[int, AsyncFollowed] = {}  # of every request that is followed
        self._leaving: set[asyncio.Task[None]] = set()  # cancellations that are under way

    @property
    def served(self) -> ServedModel:
        return self.running.served

    @asynccontextmanager
    async def follow(self) -> AsyncIterator[AsyncFollowed]:
        """Requests of one user; what has not finished at the end is cancelled."""
        followed = AsyncFollowed(self)
        try:
            yield followed
        finally:
            followed.leave()

    async def look(self) -> Overview | None:
        """How the cluster is doing; None: nothing is known of it. Raises Unreachable."""
        return await self._log.look()

    async def unfinished(self, most: int) -> list[Unfinished]:
        """The first `most` requests that the cluster has, and as many of those that wait, whoever
        asked for them. Raises Unreachable."""
        return await self._log.unfinished(most)

    async def cancel(self, request: int) -> None:
        """End a request, whoever waits for it; one that has finished stays as it is. Raises
        Unreachable, or ControllerError if it is not in the log."""
        await self._log.cancel(request)

    def watch(self, request: int | None) -> AsyncWatch:
        """The steps of the cluster as they come, with the tree of a request if one is named."""
        running = self.running
        return AsyncWatch(running.url, namespace=running.namespace, request=request)

    # --- for AsyncFollowed --------------------------------------------------------------------

    async def _submit(self, followed: AsyncFollowed, prompt: Sequence[int], **asked: object) -> int:
        assert 0 < len(prompt) < self.served.context, "the KV pools are made for no more"
        log = self._log
        asking = asyncio.ensure_future(log.enqueue(prompt=tuple(prompt), **asked))
        try:
            # Its number must be known, or it could not be cancelled.
            request = await asyncio.shield(asking)
        except asyncio.CancelledError:
            self._meanwhile(self._cancel_late(log, asking))
            raise
        if log is not self._log:  # meanwhile the cluster has become another
            raise self._ended()
        self._readers[request] = followed
        followed.expect(request)
        await self._streams.add(request)
        return request

    def _leave(self, request: int) -> None:
        """Nobody waits for a request any more."""
        self._readers.pop(request, None)
        self._streams.drop(request)
        self._meanwhile(self._cancel(self._log, request))

    def _meanwhile(self, work: Coroutine[Any, Any, None]) -> None:
        """Work for which nobody waits but the end of this client."""
        task = asyncio.ensure_future(work)
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    @staticmethod
    async def _cancel(log: AsyncLog, request: int) -> None:
        # A cluster that is gone decodes nothing, and a log that has forgotten it neither.
        with suppress(ControllerError):
            await log.cancel(request)

    @staticmethod
    async def _cancel_late(log: AsyncLog, asking: asyncio.Future[int]) -> None:
        with suppress(ControllerError):
            await log.cancel(await asking)

    # --- the one reader -----------------------------------------------------------------------

    def _connect(self) -> None:
        running = self.running
        self._log = AsyncLog(running.url, namespace=running.namespace, patience=self.patience)
        self._streams = AsyncStreams(running.url, self._log, namespace=running.namespace)

    async def _disconnect(self) -> None:
        await self._streams.close()
        await self._log.close()

    async def _read(self) -> None:
        """Hand events to who waits for them, and find the cluster again when it was away."""
        since: float | None = None
        while True:
            problem: Unreachable | None = None
            events: list[tuple[int, Event]] = []
            try:
                events = await self._streams.next(HEARTBEAT_S)
            except Forgotten as error:
                self._fail([error.request], self._ended())
            except Unreachable as error:
                problem = error
            for request, event in events:
                self._hand(request, event)
            if events or (problem is None and not await self._gone()):
                since, self.away = None, False
                continue
            self.away = True
            since = since or time.monotonic()
            if await self._found_again():
                continue
            if time.monotonic() - since > self.patience:
                self._fail([*self._readers], problem or self._ended())
            await asyncio.sleep(RETRY_S)

    def _hand(self, request: int, event: Event) -> None:
        followed = self._readers.get(request)
        if followed is None:
            return
        if isinstance(event, Finished):
            del self._readers[request]
        followed.hear(request, event)
        if followed.waiting(request) == MOST_EVENTS:
            self._streams.hold(request)

    async def _gone(self) -> bool:
        """Whether the cluster has ended, as far as can be known while its Redis answers."""
        if self.running.owner.here:
            return self.running.owner.gone
        try:
            return await self._log.look() is None
        except Unreachable:
            return False  # the next read says so

    async def _found_again(self) -> bool:
        """Whether the cluster's name now belongs to one that was started again."""
        try:
            found = await asyncio.to_thread(registry.find, self.running.name)
        except ConfigError:  # it is not up, or not yet
            return False
        if found == self.running:
            return False
        before, self.running = self.running, found
        if _log_of(found) == _log_of(before):
            await self._log.move(found.url)
            await self._streams.move(found.url)
        else:
            self._fail([*self._readers], self._ended())
            self._log.patience = 0
            await self._disconnect()
            self._connect()
        return True

    def _fail(self, requests: Sequence[int], error: Exception) -> None:
        for request in requests:
            if followed := self._readers.pop(request, None):
                self._streams.drop(request)
                followed.fail(request, error)

    def _ended(self) -> RankFailed:
        return RankFailed(
            f"The cluster {self.running.name!r} ended before the request was finished; ask again "
            "when it is up."
        )

    async def _close(self) -> None:
        """Once nobody follows anything: see to it that what was cancelled is, if Redis answers."""
        self._log.patience = 0
        if self._leaving:
            _, late = await asyncio.wait(self._leaving, timeout=ANSWER_TIMEOUT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._disconnect()


class AsyncFollowed:
    """Requests of one user, whose events are heard as they come. For one task."""

    def __init__(self, client: AsyncClient):
        self._client = client
        self._open: dict[int, int] = {}  # events that wait here, of each that has not finished
        self._events: list[tuple[int, Event]] = []
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._error: Exception | None = None

    def __len__(self) -> int:
        """How many have not finished, as far as was heard."""
        return len(self._open)

    async def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        max_new_tokens: int,
        stop: Sequence[str] = (),
        eos: Sequence[int] = (),
        priority: int = 0,
    ) -> int:
        """Put a request in the queue and follow it; its number. As `Client.submit`.

        Raises Unreachable.
        """
        return await self._client._submit(
            self,
            prompt,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            stop=tuple(stop),
            eos=tuple(eos),
            priority=priority,
        )

    async def next(self, timeout: float | None = None) -> list[tuple[int, Event]]:
        """The next events, each with its request; [] if none comes within `timeout` seconds.

        Raises RankFailed or Unreachable if the cluster is gone for good.
        """
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
        for request, count in self._open.items():
            self._open[request] = 0
            if count >= MOST_EVENTS:
                await self._client._streams.release(request)
        return events

    def interrupt(self, error: Exception) -> None:
        """Have `next` raise an error; what has not finished is still to be left."""
        self._error = error
        self._news.set()

    def leave(self) -> None:
        """Cancel what has not finished."""
        for request in self._open:
            self._client._leave(request)
        self._open.clear()

    # --- for the client -----------------------------------------------------------------------

    def expect(self, request: int) -> None:
        """Events of a request will come."""
        self._open[request] = 0

    def waiting(self, request: int) -> int:
        """How many events of a request were not taken."""
        return self._open.get(request, 0)

    def hear(self, request: int, event: Event) -> None:
        """An event has come."""
        self._open[request] += 1
        self._events.append((request, event))
        self._news.set()

    def fail(self, request: int, error: Exception) -> None:
        """Nothing more will come of a request."""
        self._open.pop(request, None)
        self._error = error
        self._news.set()


@asynccontextmanager
async def attach(running: RunningCluster, patience: float) -> AsyncIterator[AsyncClient]:
    """Ask a cluster that runs, for as long as the block lasts."""
    client = AsyncClient(running, patience)
    async with asyncio.TaskGroup() as tasks:  # should the reader fail, so does the block
        reading = tasks.create_task(client._read())
        try:
            yield client
        finally:
            reading.cancel()
            await client._close()


def _log_of(running: RunningCluster) -> tuple[str | None, str]:
    """What tells request logs apart: a private Redis is known by its password, and elsewhere
    every cluster has a namespace of its own."""
    return password(running.url), running.namespace
