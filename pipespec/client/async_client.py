"""Submits requests to a cluster, follows their answers, cancels them and collects reports. One
client (`attach`) serves any number of tasks of one event loop: all requests are followed over one
connection. A task that leaves the block of `AsyncClient.follow` cancels what has not finished.
Callers without an event loop have the same in `pipespec.client.sync_client`."""

# Longer than 350 lines: one reader of one connection, and what it hands the events to.
from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from pipespec.client import registry
from pipespec.client.model_info import ModelInfo
from pipespec.client.registry import RunningCluster
from pipespec.cluster.deployment.rank_assignment import RankAssignment
from pipespec.controller.async_request_log import (
    AsyncRedisConnection,
    AsyncRequestLog,
    TelemetryReader,
    block_ms,
)
from pipespec.controller.log_records import Accepted, Event, Finished, entries_of, event_from
from pipespec.controller.redis_connection import ANSWER_TIMEOUT_S, RETRY_S, password
from pipespec.controller.redis_keys import RedisKeys
from pipespec.core import Request, SamplingParams
from pipespec.errors import ConfigError, ControllerError, RankFailed, UnknownRequest, Unreachable
from pipespec.timing.clock import monotonic_ns
from pipespec.timing.stats import Report, empty_report

# How long all requests may be silent before the cluster is looked at, and if it is our own.
HEARTBEAT_S, OWN_HEARTBEAT_S = 0.5, 0.05
# How long the ranks may take to report at the end, and if some of them may be lost.
REPORTS_TIMEOUT_S, LOST_REPORTS_S = 60.0, 2.0
# Entries of one stream that are read at once.
MOST_ENTRIES = 256
# From so many events of one request that wait here for a slow reader on no more are read; the log
# keeps them.
MOST_EVENTS = 256
# Requests whose first token's arrival is remembered until their reports are read.
MOST_FIRST_TOKENS = 1 << 16


@dataclass
class Followed:
    """A followed request: its stream and the last entry that was read, in the log if `known`, and
    how many of its events were not taken."""

    answer: AsyncAnswer
    stream: bytes
    position: str = "0"
    known: bool = True
    waiting: int = 0


class AsyncAnswer:
    """Requests of one user, whose events are received as they come. For one task."""

    def __init__(self, client: AsyncClient):
        self._client = client
        self.open: dict[int, Followed] = {}  # each that has not finished
        self._events: list[tuple[int, Event]] = []
        self._news = asyncio.Event()
        self._error: Exception | None = None
        self._failed = False  # whether a request was given up that had not finished

    def __len__(self) -> int:
        """How many have not finished, as far as was received; at least 1 once one was given up, so
        that its reader learns why from `next`."""
        return len(self.open) + self._failed

    async def submit(self, prompt: Sequence[int], sampling: SamplingParams, **fields: Any) -> int:
        """Put a request in the queue and follow it; its number. Raises Unreachable. `prompt` are
        token ids; prompt and answer must fit into the model's context, which ends an answer that
        does not. `fields` are others of `Request`; `max_new_tokens` is needed."""
        request = Request(0, tuple(prompt), sampling=sampling, **fields)
        return (await self.submit_all([request]))[0]

    async def submit_all(self, requests: Sequence[Request]) -> list[int]:
        """The same for requests that differ in prompt, length and seed alone; their `id` is not
        looked at. Raises ConfigError if they may occupy too much, and LogFull."""
        client = self._client
        context = client.served.context
        assert all(0 < len(each.prompt) <= context for each in requests), (
            "the KV pools are made for no more"
        )
        log = client.log
        asking = asyncio.ensure_future(log.enqueue(requests, context))
        try:
            # Their numbers must be known, or they could not be cancelled.
            numbers = await asyncio.shield(asking)
        except asyncio.CancelledError:
            client.cancel(log, asking)
            raise
        if log is not client.log:  # meanwhile the cluster has become another
            raise client.ended()
        for number in numbers:
            await client.follow_for(self, number, known=True)
        return numbers

    async def add(self, request: int) -> None:
        """Follow a request that is in the log, from its first event on."""
        await self._client.follow_for(self, request, known=False)

    async def next(self, timeout: float | None = None) -> list[tuple[int, Event]]:
        """The next events, each with its request; [] if none comes within `timeout` seconds. Raises
        RankFailed or Unreachable if the cluster is gone for good."""
        if not self._news.is_set():
            # `asyncio.timeout` takes as long as all else here, and this is once for every token.
            loop = asyncio.get_running_loop()
            waking = timeout is not None and loop.call_later(timeout, self._news.set)
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
                del self.open[request]
        full = any(followed.waiting >= MOST_EVENTS for followed in self.open.values())
        for followed in self.open.values():
            followed.waiting = 0
        if full:  # there is room again
            await self._client.wake()
        return events

    def interrupt(self, error: Exception) -> None:
        """Have `next` raise an error; what has not finished is still to be left."""
        self._error = error
        self._news.set()

    def leave(self) -> None:
        for request in self.open:
            self._client.leave(request)
        self.open.clear()

    # --- for the client -----------------------------------------------------------------------

    def push(self, request: int, event: Event) -> None:
        self.open[request].waiting += 1
        self._events.append((request, event))
        self._news.set()

    def fail(self, request: int, error: Exception) -> None:
        if self.open.pop(request, None):
            self._failed = True
        self.interrupt(error)


class OwnCluster(Protocol):
    """A cluster that this process runs (`ClusterSession`), asked from the client's thread."""

    def check(self) -> None:
        """Raise RankFailed if it has ended, so that no open request will finish."""

    def reporters(self) -> tuple[int, bool]:
        """How many ranks report on a request, and whether some reports may be lost."""


class AsyncClient:
    """A client of one cluster, for the tasks of one event loop. When the cluster's Redis is away,
    requests wait for it for up to `patience` seconds. With `follows_restarts` they also wait so
    long for a cluster that has ended: one that is started again under the same name with the same
    data (`controller.data`) goes on with them; of one that is another they fail. Without it they
    fail at once. `own`: the cluster, if this process runs it.

    Times in its reports are those of this machine's `clock`: where the cluster's is another, they
    are moved by the least delay with which a first token arrived here, so that they include the way
    of that token. `log` is the request log of all users, another once the name belongs to another
    cluster; `away`: the cluster is known not to answer."""

    def __init__(
        self,
        running: RunningCluster,
        patience: float,
        *,
        follows_restarts: bool = True,
        own: OwnCluster | None = None,
        clock: Callable[[], int] = monotonic_ns,
    ):
        self.running = running
        self.patience = patience
        self.away = False
        self._broken: Exception | None = None  # why nothing is read any more
        self._follows_restarts = follows_restarts
        self._own = own
        self._clock = clock
        self._followed: dict[int, Followed] = {}  # every request that has not finished
        self._listener = secrets.token_hex(8)  # the name of the stream that ends a read
        self._reading = False  # whether a read waits that nobody has ended
        self._connect()
        self._leaving: set[asyncio.Task[None]] = set()  # cancellations that are under way
        self._first_seen: dict[int, int] = {}  # request: when its first token came here
        self._offset_ns: int | None = None  # what moves the cluster's times to this clock

    @property
    def served(self) -> ModelInfo:
        return self.running.served

    @asynccontextmanager
    async def follow(self) -> AsyncIterator[AsyncAnswer]:
        """Requests of one user; what has not finished at the end is cancelled."""
        followed = AsyncAnswer(self)
        try:
            yield followed
        finally:
            followed.leave()

    async def reports(self, request: int) -> list[Report]:
        """What every rank says of a finished request whose events were read, the head's first. One
        that was lost with what it had to say has a blank report. Raises Unreachable, or
        ControllerError if ranks do not report."""
        count, partial = await self._reporters()
        timeout = LOST_REPORTS_S if partial else REPORTS_TIMEOUT_S
        found = await self.log.reports(request, count, timeout, partial=partial)
        head, *stages = (found.get(rank) or empty_report(rank) for rank in range(count))
        seen = self._first_seen.pop(request, None)
        if seen is not None and head["token_ns"]:
            late = seen - head["token_ns"][0]
            self._offset_ns = late if self._offset_ns is None else min(self._offset_ns, late)
        offset = self._offset_ns or 0
        return [{**head, "token_ns": [at + offset for at in head["token_ns"]]}, *stages]

    def watch(self, request: int | None) -> TelemetryReader:
        """The steps of the cluster as they come, with the tree of a request if one is named."""
        running = self.running
        return TelemetryReader(running.url, namespace=running.namespace, request=request)

    # --- for AsyncAnswer ----------------------------------------------------------------------

    async def follow_for(self, answer: AsyncAnswer, request: int, *, known: bool) -> None:
        """Follow a request, which is in the log for certain if `known`. Raises the reader's end."""
        if self._broken is not None:
            raise self._broken
        followed = Followed(answer, self._keys.events(request).encode(), known=known)
        self._followed[request] = answer.open[request] = followed
        await self.wake()

    def leave(self, request: int) -> None:
        self._followed.pop(request, None)
        self._first_seen.pop(request, None)
        self.cancel(self.log, [request])

    def cancel(self, log: AsyncRequestLog, requests: list[int] | asyncio.Future[list[int]]) -> None:
        """Cancel requests; only the end of this client waits for it."""

        async def cancelling() -> None:
            # A cluster that is gone decodes nothing, and a log that has forgotten them or refused
            # them neither.
            with suppress(ControllerError, ConfigError):
                for request in requests if isinstance(requests, list) else await requests:
                    with suppress(UnknownRequest):
                        await log.cancel(request)

        task = asyncio.ensure_future(cancelling())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def wake(self) -> None:
        """Have a read that is under way begin anew, as there is more to read."""
        if self._reading:
            self._reading = False  # one that wants it is enough
            await self.log.wake(self._listener)

    # --- the one reader -----------------------------------------------------------------------

    def _connect(self) -> None:
        running = self.running
        self._keys = RedisKeys(running.namespace)
        self.log = AsyncRequestLog(running.url, namespace=running.namespace, patience=self.patience)
        self._pipe = AsyncRedisConnection(running.url)
        self._position = "0"  # in the stream that ends a read

    async def _disconnect(self) -> None:
        await self._pipe.close()
        await self.log.close()

    async def _read(self) -> None:
        """Read until the client is closed; an earlier end is raised to every task that waits."""
        try:
            await self._read_all()
        except Exception as error:
            self._broken = error
            self._fail([*self._followed], error)
            raise

    async def _read_all(self) -> None:
        """Hand events to the tasks that wait for them, and find a cluster that was away again."""
        since: float | None = None
        looked = time.monotonic()  # when the cluster was last known to be up
        while True:
            problem: Unreachable | None = None
            end: RankFailed | None = None
            any_read = False
            busy = self._own is not None and self._followed
            heartbeat = OWN_HEARTBEAT_S if busy else HEARTBEAT_S
            try:
                any_read = await self._read_once(looked + heartbeat - time.monotonic())
            except Unreachable as error:
                problem = error
            if problem or (not any_read and time.monotonic() >= looked + heartbeat):
                end = await self._end()
            elif not any_read:  # woken
                continue
            if problem is None and end is None:
                since, self.away, looked = None, False, time.monotonic()
                continue
            self.away = True
            since = since or time.monotonic()
            if self._follows_restarts and await self._found_again():
                continue
            late = time.monotonic() - since > self.patience
            if late or (end is not None and not self._follows_restarts):
                self._fail([*self._followed], end or problem or self.ended())
            await asyncio.sleep(RETRY_S)

    async def _read_once(self, timeout: float) -> bool:
        """Hand on the events that come within `timeout` seconds; whether there were any. Raises
        Unreachable, at once; the next call connects again and goes on where this one was."""
        if not self._pipe.connected:  # nothing is known of what Redis holds now
            for followed in self._followed.values():
                followed.known = False
        for request, followed in [*self._followed.items()]:
            if not followed.known:  # one that is not in the log would never have an event
                if not await self._pipe.call("EXISTS", self._keys.request(request)):
                    self._fail([request], self.ended())
                followed.known = True
        # Of one whose reader is slow nothing is read: the log keeps it.
        read = {
            followed.stream: (request, followed)
            for request, followed in self._followed.items()
            if followed.waiting < MOST_EVENTS
        }
        listener = self._keys.listener(self._listener)
        positions = (*(followed.position for _, followed in read.values()), self._position)
        block = block_ms(timeout)
        options = ("COUNT", MOST_ENTRIES, "BLOCK", block, "STREAMS", *read, listener)
        self._reading = True
        try:
            reply = await self._pipe.call("XREAD", *options, *positions, timeout=block / 1000)
        finally:
            self._reading = False
        any_read = False
        for stream, entries in reply or []:
            last = entries[-1][0].decode()
            if stream not in read:  # it was only woken, which says nothing of the cluster
                self._position = last
                continue
            any_read = True
            request, followed = read[stream]
            followed.position = last
            for _, fields in entries_of(entries):
                if self._followed.get(request) is followed:  # else it has ended, or was left
                    self._hand(request, followed.answer, event_from(fields))
        return any_read

    def _hand(self, request: int, answer: AsyncAnswer, event: Event) -> None:
        if isinstance(event, Finished):
            del self._followed[request]
        elif isinstance(event, Accepted) and not self.running.owner.here:
            # It came from a machine with another clock.
            self._first_seen.setdefault(request, self._clock())
            if len(self._first_seen) > MOST_FIRST_TOKENS:  # the reports are not read
                del self._first_seen[next(iter(self._first_seen))]
        answer.push(request, event)

    async def _end(self) -> RankFailed | None:
        """Why no open request will finish, as far as can be known while Redis answers."""
        if self._own is not None:
            try:
                self._own.check()
            except RankFailed as error:
                return error
            return None
        if self.running.owner.here:
            return self.ended() if self.running.owner.gone else None
        try:
            return self.ended() if await self.log.look() is None else None
        except Unreachable:
            return None  # the next read says so

    async def _reporters(self) -> tuple[int, bool]:
        if self._own is not None:
            return self._own.reporters()
        if (now := await self.log.epoch()) is None:
            return self.running.num_ranks, False
        number, assignment = now  # hosts may have joined or left since it is up
        count = len(RankAssignment.decode(assignment).workers) if assignment else 0
        return count or self.running.num_ranks, number > self.running.epoch

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
            self._pipe.url = found.url
            await self._pipe.close()
            await self.log.move(found.url)
        else:
            self._fail([*self._followed], self.ended())
            self.log.patience = 0
            await self._disconnect()
            self._connect()
        return True

    def _fail(self, requests: Sequence[int], error: Exception) -> None:
        for request in requests:
            if followed := self._followed.pop(request, None):
                followed.answer.fail(request, error)

    def ended(self) -> RankFailed:
        return RankFailed(
            f"The cluster {self.running.name!r} on {self.running.host} ended before the request "
            "was finished; ask again when it is up."
        )

    async def _close(self) -> None:
        """Once no task follows anything: see to it that what was cancelled is, if Redis answers."""
        self.log.patience = 0
        if self._leaving:
            _, late = await asyncio.wait(self._leaving, timeout=ANSWER_TIMEOUT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._disconnect()


@asynccontextmanager
async def attach(
    running: RunningCluster, patience: float, **options: Any
) -> AsyncIterator[AsyncClient]:
    """A client of a running cluster, for as long as the block lasts; see `AsyncClient`. Should the
    reader fail, so does the block, with the same error."""
    client = AsyncClient(running, patience, **options)
    try:
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(client._read())
            try:
                yield client
            finally:
                reading.cancel()
                await client._close()
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]  # the others came of it
        raise first from first.__cause__


def _log_of(running: RunningCluster) -> tuple[str | None, str]:
    """The identity of a request log: that of a private Redis is its password, and elsewhere
    every cluster has a namespace of its own."""
    return password(running.url), running.namespace
