"""The request log as users of a cluster see it, from an event loop; what it has in common with the
ranks' is in `request_log` (the commands) and `log_records` (the format)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import redis
from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from pipespec.controller.cluster_status import (
    ClusterStatus,
    Unfinished,
    parse_status,
    parse_unfinished,
    status_commands,
    unfinished_commands,
)
from pipespec.controller.log_records import entries_of
from pipespec.controller.lua_scripts import ScriptsLost, evalsha, load_scripts, translate
from pipespec.controller.redis_connection import (
    ANSWER_TIMEOUT_S,
    PROBE_S,
    RETRY_S,
    AsyncPinnedConnection,
    explain,
    is_pinned,
    options_of,
)
from pipespec.controller.redis_keys import RedisKeys
from pipespec.controller.request_log import cancelling, enqueuing
from pipespec.core import Request
from pipespec.errors import ControllerError, Unreachable
from pipespec.timing.stats import empty_report

# How long Redis keeps the stream that wakes a listener who is gone.
KEEP_LISTENER_S = 3600
# A blocking read is renewed this often, so that a silent Redis is noticed.
LISTEN_S = 5.0
# How long a conversation can be continued, and how many bytes all of them may take.
KEEP_CONVERSATION_S = 3600
MAX_CONVERSATION_BYTES = 64 * 2**20
# How long the key of a reader of steps exists, and how often it is renewed.
WATCH_S = 3
RENEW_S = 1.0
# Steps that are read at once.
MOST_STEPS = 64


class AsyncRedisConnection:
    """A connection that is made when it is needed. Its callers take turns. Raises Unreachable
    whenever Redis is gone; the next call connects again."""

    def __init__(self, url: str, *, scripts: bool = False):
        """`scripts`: load the Lua scripts on every connection."""
        self.url = url
        self._scripts = scripts
        self._turn = asyncio.Lock()
        self._connection: AbstractConnection | None = None
        self._answered = False

    @property
    def connected(self) -> bool:
        return self._connection is not None

    async def call(self, *command: Any, timeout: float = 0.0) -> Any:
        """The reply to a command, which itself may block for `timeout` seconds."""
        return (await self.batch([command], timeout))[-1]

    async def batch(self, commands: Sequence[tuple[Any, ...]], timeout: float = 0.0) -> list[Any]:
        """The replies to commands that are sent together. Raises what an error among them means."""
        async with self._turn:
            try:
                if self._connection is None:
                    await self._open()
                return await self._exchange(commands, timeout)
            except BaseException as error:
                # A call that is cancelled leaves unread replies behind.
                if not isinstance(error, ControllerError) or isinstance(error, Unreachable):
                    await self._disconnect()
                raise

    async def close(self) -> None:
        async with self._turn:
            await self._disconnect()

    async def _open(self) -> None:
        self._answered = False
        # Time is limited here: what the package does about it swallows cancellations in Python
        # 3.11, and takes a late reply for none.
        options = options_of(self.url, ANSWER_TIMEOUT_S) | {"socket_timeout": None}
        pool = ConnectionPool.from_url(self.url, retry=Retry(NoBackoff(), 0), **options)
        if is_pinned(self.url):
            pool.connection_class = AsyncPinnedConnection
        self._connection = pool.make_connection()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._connection.connect()
        except (redis.RedisError, OSError) as error:
            raise explain(self.url, error, ANSWER_TIMEOUT_S) from None
        if self._scripts:
            loading = [("SCRIPT", "LOAD", script) for script in load_scripts().values()]
            await self._exchange(loading, 0.0)

    async def _exchange(self, commands: Sequence[tuple[Any, ...]], timeout: float) -> list[Any]:
        connection = self._connection
        assert connection is not None
        replies: list[Any] = []
        refused: ControllerError | None = None
        try:
            async with asyncio.timeout(timeout + ANSWER_TIMEOUT_S):
                packed = connection.pack_commands(commands)
                await connection.send_packed_command(packed, check_health=False)
                for _ in commands:
                    try:
                        replies.append(await connection.read_response(disable_decoding=True))
                    except redis.ResponseError as error:
                        refused = refused or translate(error)
        except (redis.RedisError, OSError) as error:
            raise explain(self.url, error, ANSWER_TIMEOUT_S, self._answered) from None
        self._answered = True
        if refused:
            raise refused
        return replies

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(redis.RedisError, OSError):
                await connection.disconnect(nowait=True)


class AsyncRequestLog:
    """Submits requests, cancels them, and reads what the ranks report. For the tasks of one event
    loop. When Redis goes away, a call connects again and repeats itself for up to `patience`
    seconds; after that Unreachable is raised."""

    def __init__(self, url: str, *, namespace: str, patience: float):
        self.patience = patience
        self._keys = RedisKeys(namespace)
        self._pipe = AsyncRedisConnection(url, scripts=True)
        self._reports = AsyncRedisConnection(url)  # on which a wait for reports holds up no request

    async def close(self) -> None:
        await self._pipe.close()
        await self._reports.close()

    async def move(self, url: str) -> None:
        """The same log is found elsewhere now."""
        self._pipe.url = self._reports.url = url
        await self.close()

    async def enqueue(self, requests: Sequence[Request], context: int) -> list[int]:
        """Puts requests of one user in the queue (`enqueuing`); their ids. Raises LogFull."""
        first: int = await self._patiently(self._pipe, enqueuing(self._keys, requests, context))
        return [*range(first, first + len(requests))]

    async def check_writable(self) -> None:
        """Raises WritesRefused if Redis reads, but writes nothing."""
        await self._pipe.call("SET", self._keys.probe, "", "EX", PROBE_S)

    async def cancel(self, request: int) -> None:
        """Ends a request whose client no longer waits, with the reason "cancelled": at once if it
        is in the queue, else as soon as the head receives the cancellation. One that has finished
        stays as it is. Raises ControllerError if it is not in the log."""
        await self._patiently(self._pipe, cancelling(self._keys, request))

    async def keep_conversation(self, name: str, conversation: bytes) -> None:
        """Keeps what a later request may continue, for an hour and within a bound."""
        keys = self._keys
        names = (keys.conversation_order, keys.conversation_bytes, keys.conversations)
        bounds = (KEEP_CONVERSATION_S, MAX_CONVERSATION_BYTES)
        command = evalsha("keep_conversation", names, name, conversation, *bounds)
        await self._patiently(self._pipe, command)

    async def conversation(self, name: str) -> bytes | None:
        """What was kept under a name; None: nothing, or not any more."""
        command = ("GET", f"{self._keys.conversations}:{name}")
        found: bytes | None = await self._patiently(self._pipe, command)
        return found

    async def forget_conversation(self, name: str) -> bool:
        """Deletes what was kept under a name; whether there was anything. Its bytes count towards
        the bound until it would have been the oldest one, as those of an expired one do."""
        command = ("DEL", f"{self._keys.conversations}:{name}")
        return bool(await self._patiently(self._pipe, command))

    async def reports(
        self, request: int, count: int, timeout: float, *, partial: bool = False
    ) -> dict[int, dict[str, Any]]:
        """The report of every rank on a request, by rank; a later report replaces an earlier. Waits
        for `count` ranks; of a request that never reached the stages only the head reports. If they
        take longer than `timeout` seconds it raises ControllerError or, if `partial`, returns what
        there is."""
        deadline = time.monotonic() + timeout
        found: dict[int, dict[str, Any]] = {}
        position = "0"
        while len(found) < count:
            left = deadline - time.monotonic()
            if left <= 0 and partial:
                break
            if left <= 0:
                raise ControllerError(
                    f"Only {len(found)} of {count} ranks ({sorted(found)}) reported on request "
                    f"{request} within {timeout:g} seconds."
                )
            block = block_ms(min(left, LISTEN_S))
            command = ("XREAD", "BLOCK", block, "STREAMS", self._keys.reports(request), position)
            reply = await self._patiently(self._reports, command, block / 1000)
            for entry, fields in entries_of(reply[0][1]) if reply else []:
                position = entry
                found[int(fields[b"rank"])] = json.loads(fields[b"report"])
            if found.get(0, {}).get("alone"):
                found = {rank: empty_report(rank) for rank in range(count)} | found
        return dict(sorted(found.items()))

    async def wake(self, listener: str) -> None:
        """End the wait of a listener; one that must connect again needs not to be woken."""
        key = self._keys.listener(listener)
        with suppress(Unreachable):
            await self._pipe.batch(
                [("XADD", key, "MAXLEN", 1, "*", "more", ""), ("EXPIRE", key, KEEP_LISTENER_S)]
            )

    async def epoch(self) -> tuple[int, str] | None:
        """The cluster's epoch and its assignment; None: nothing is known of the cluster."""
        command = ("XREVRANGE", self._keys.assignments, "+", "-", "COUNT", 1)
        for number, (_, assignment) in await self._patiently(self._pipe, command):
            return int(number.partition(b"-")[0]), assignment.decode()
        return None

    async def look(self) -> ClusterStatus | None:
        """As `read_status` does, without patience."""
        epoch = await self._pipe.call("GET", self._keys.epoch)
        if epoch is None:
            return None
        replies = await self._pipe.batch(status_commands(self._keys, int(epoch)))
        return parse_status(int(epoch), replies[-1])

    async def unfinished(self, most: int) -> list[Unfinished]:
        """The first `most` requests that the head has, and as many of those that wait, in order."""
        replies = await self._pipe.batch(unfinished_commands(self._keys, most))
        return parse_unfinished(replies[-1])

    async def _patiently(
        self, pipe: AsyncRedisConnection, command: tuple[Any, ...], timeout: float = 0.0
    ) -> Any:
        since: float | None = None
        while True:
            try:
                return await pipe.call(*command, timeout=timeout)
            except (Unreachable, ScriptsLost):
                await pipe.close()
                now = time.monotonic()
                since = since or now
                if now - since >= self.patience:  # which may have become less meanwhile
                    raise
                await asyncio.sleep(RETRY_S)


class TelemetryReader:
    """The steps that the head publishes for dashboards as they come, with the tree of one request,
    for one task. A reader sets a key that expires. The head looks for such keys once a second, and
    publishes its steps while there is one (`lua/publish_step.lua`)."""

    def __init__(self, url: str, *, namespace: str, request: int | None):
        keys = RedisKeys(namespace)
        self._pipe = AsyncRedisConnection(url)
        self._stream = keys.published_steps
        self._watch_keys = [keys.watched]
        if request is not None:
            self._watch_keys.append(keys.watched_request(request))
        self._renewed: float | None = None
        self._position: str | None = None  # in the stream; None: not known yet

    async def close(self) -> None:
        await self._pipe.close()

    async def next(self, timeout: float) -> list[dict[bytes, bytes]]:
        """The next steps, each as the head published it (`pipespec.head.tree_telemetry`) with its
        "epoch"; [] if none comes within `timeout` seconds. Raises Unreachable."""
        now = time.monotonic()
        if self._renewed is None or now - self._renewed >= RENEW_S:
            await self._pipe.batch([("SET", key, "", "EX", WATCH_S) for key in self._watch_keys])
            self._renewed = now
        if self._position is None:
            last = await self._pipe.call("XREVRANGE", self._stream, "+", "-", "COUNT", 1)
            self._position = last[0][0].decode() if last else "0"
        block = block_ms(timeout)
        options = ("COUNT", MOST_STEPS, "BLOCK", block)
        command = ("XREAD", *options, "STREAMS", self._stream, self._position)
        found = await self._pipe.call(*command, timeout=block / 1000)
        if not found:
            return []
        entries = entries_of(found[0][1])
        self._position = entries[-1][0]
        return [fields for _, fields in entries]


def block_ms(seconds: float) -> int:
    return max(1, int(seconds * 1000))
