"""The controller as one rank sees it: the task graph in Redis, and the request log."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np

from pipespec.controller.log_records import entries_of, unpack_request, unpack_shared
from pipespec.controller.redis_connection import RedisConnection
from pipespec.controller.request_log import KEEP_FINISHED_S, RequestLog
from pipespec.controller.task_graph import Graph, Task, TaskKind
from pipespec.core import DraftTokens, Request
from pipespec.errors import StaleEpoch
from pipespec.system.liveness import Waiting
from pipespec.timing.batch_times import NO_TIMES, BatchTimes
from pipespec.timing.batch_times import pack as pack_times
from pipespec.timing.batch_times import unpack as unpack_times

# More open steps than this are a bug (a rank completes nothing), not a deep pipeline.
MAX_OPEN_STEPS = 1024
# Blocking pops under way, so that as many announcements need no further trip.
POPS = 32
# How often a waiting rank checks whether an earlier command of its own was refused.
LOOK_S = 0.5
# How long the ready lists of an old epoch keep the entry that ends its ranks, and draft tokens of a
# lossy sequence are kept after the last ones.
KEEP_STALE_S = 60
# How many steps the stream for dashboards holds, and for how long after the last one.
MAX_PUBLISHED_STEPS = 256
KEEP_PUBLISHED_S = 10
# The entry of a ready list that lua/cancel.lua makes, before the number of a request.
CANCEL = b"CANCEL "
# The entry of a ready list that lua/includes/notify_head.lua makes.
ARRIVED = b"ARRIVED"


class Controller(RequestLog):
    """One rank's client, for one epoch. Not for several threads, but for `look`. `submit` and
    `complete` do not wait for Redis: an error of theirs surfaces at a later call, or at once if
    Redis was quick. A second connection always has blocking pops of the rank's ready list under way
    before they are needed, so an announced task costs its owner half a round trip, however many are
    announced. `kv_tokens` tokens of text fit the rank's KV cache; None: it has none. `row_times`:
    of its batches, as far as they are measured. `computing`: its attention backend and other
    choices (`ModelSlice.outcome`), for `pipespec status`. Raises Unreachable or StaleEpoch."""

    def __init__(
        self,
        url: str,
        *,
        namespace: str,
        epoch: int,
        rank: int,
        kv_tokens: int | None = None,
        row_times: BatchTimes = NO_TIMES,
        computing: Mapping[str, Any] | None = None,
    ):
        # An epoch ends with a rank's connection.
        super().__init__(url, namespace=namespace, epoch=epoch)
        self.rank = rank
        self._graph = (
            self._keys.epoch,
            self._keys.graph(epoch),
            self._keys.ready(epoch),
        )
        self._ready: dict[str, bytes] = {}
        # The newest step whose task of a kind this rank has completed; it completes them in
        # order, so an announcement of an older one comes too late to be of use.
        self._completed: dict[TaskKind, int] = {}
        self._call(
            "join_epoch",
            self._keys.joining(epoch, self._keys.ranks(epoch)),
            *(epoch, rank, os.getpid(), "" if kv_tokens is None else kv_tokens),
            *(pack_times(row_times), "" if computing is None else json.dumps(computing)),
        )
        self._announcements = RedisConnection(url)
        self._pops = 0
        # Held but for the blocks of `unattended`.
        self._attending = threading.Lock()
        self._attending.acquire()
        self._cancelled: set[int] = set()
        # Whether the queue may hold a request, and whether it was empty and closed when the head
        # read it last. A new epoch begins without a notification, so the head reads once.
        self._arrived = True
        self._closed = False
        # How many requests were left there, and what waited at the head then.
        self._num_left = 0
        self._waiting: Mapping[str, tuple[int, int]] = {}
        # Of each lossy sequence: the last entry of its draft tokens that was read.
        self._draft_positions: dict[int, str] = {}
        self._send_blocking_pop()

    def close(self) -> None:
        self._announcements.close()
        super().close()

    @contextmanager
    def unattended(self) -> Iterator[None]:
        """A block that may last, as it waits for another rank, and does not use this."""
        self._attending.release()
        try:
            yield
        finally:
            self._attending.acquire()

    def look(self) -> None:
        """From another thread, while this is unattended: raise the error of an earlier command."""
        if self._attending.acquire(blocking=False):
            try:
                self._pipe.drain()
            finally:
                self._attending.release()

    def submit(self, graph: Graph) -> None:
        """Adds the tasks of a step; each step of an epoch follows the one before."""
        announced = {target for _, target in graph.edges}
        tasks = " ".join(f"{task.id} {'a' if task in announced else 't'}" for task in graph.tasks)
        edges = " ".join(f"{source.id} {target.id}" for source, target in graph.edges)
        self._send("submit", self._graph, self._epoch, graph.step, MAX_OPEN_STEPS, tasks, edges)

    def complete(self, tasks: Sequence[Task], payload: bytes = b"") -> None:
        """Records tasks of this rank as complete, each with `payload`. A rank completes its tasks
        of one kind in the order of their steps. It may complete a task before everything in front
        of it is complete, and before it was submitted."""
        ids = [task.id for task in tasks]
        self._send("complete", self._graph, self._epoch, MAX_OPEN_STEPS, payload, *ids)
        for task in tasks:
            self._completed[task.kind] = task.step
            self._ready.pop(task.id, None)
        self._send_blocking_pop()

    def wait(
        self, task: Task, timeout: float | None = None, *, or_request: bool = False
    ) -> bytes | None:
        """The payload of an announced task of this rank, once it is ready: the payloads of what
        came before it, concatenated in the order of completion. None: it is not ready within
        `timeout` seconds, or before a request arrives (`or_request`). Each task can be waited for
        once. Raises StaleEpoch when a new epoch has begun."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with Waiting():
            while (payload := self._take(task)) is None:
                if or_request and self._arrived:
                    return None
                left = max(0.0, deadline - time.monotonic())
                if not self._read_announcement(min(left, LOOK_S)):
                    # An earlier command that was refused may be the reason why nothing comes.
                    self._pipe.drain()
                    if left <= LOOK_S:
                        return None
        return payload

    def kv_tokens(self, stages: int) -> int:
        """How many tokens of text fit the KV cache of every rank, once so many stages have joined.
        Raises StaleEpoch."""
        with Waiting():
            while True:
                found = self._pipe.call("HGETALL", self._keys.kv_tokens(self._epoch))
                held = {int(rank): int(n) for rank, n in zip(found[::2], found[1::2], strict=True)}
                if len(held.keys() - {0}) >= stages:
                    return min(held.values())
                self._read_announcement(LOOK_S / 10)

    def next_requests(
        self,
        count: int,
        waiting: Mapping[str, tuple[int, int]] = MappingProxyType({}),
        *,
        wait: bool,
    ) -> list[tuple[Request, tuple[int, ...]]] | None:
        """Takes up to `count` requests off the queue, each with the tokens that an earlier epoch
        has accepted; and, whatever `count` is, those that the head must know to be fair, by the
        last that waits there of each tenant (`Request.queue_key`). Only for the head. Redis is
        queried only if it may have any. With `wait` this waits for at least one; otherwise it may
        return []. None: the queue is empty and closed. Raises StaleEpoch when a new epoch has
        begun."""
        while self._read_announcement(0.0):
            pass
        while True:
            left = self._num_left and (count > 0 or waiting != self._waiting)
            if (self._arrived or left) and (found := self._admit(count, waiting)):
                return found
            if self._closed:
                return None
            if not wait:
                return []
            self._pipe.drain()
            with Waiting():
                self._read_announcement(LOOK_S)

    def report(self, request: int, stats: dict[str, Any]) -> None:
        keys = self._keys
        names = (keys.epoch, keys.request(request), keys.reports(request))
        text = json.dumps(stats)
        self._send("report", names, self._epoch, self.rank, text, KEEP_FINISHED_S)

    def publish_draft_tokens(self, sequence: int, draft: DraftTokens) -> None:
        """Publishes the draft tokens that the head schedules of a lossy sequence in a step. The
        rule of acceptance chooses among the children of the newest token, whose rows are still in
        earlier stages."""
        key = self._keys.draft_tokens(self._epoch, sequence)
        self._pipe.send(
            "XADD", key, "MAXLEN", "~", MAX_OPEN_STEPS, "*", "draft", pack_draft_tokens(draft)
        )
        self._pipe.send("EXPIRE", key, KEEP_STALE_S)
        self._pipe.drain()

    def read_draft_tokens(self, sequence: int) -> list[DraftTokens]:
        """The draft tokens of a sequence that the head has published since the last call."""
        key = self._keys.draft_tokens(self._epoch, sequence)
        found: list[DraftTokens] = []
        seen = self._draft_positions.get(sequence, "0")
        reply = self._pipe.call("XREAD", "STREAMS", key, seen)
        for entry, fields in entries_of(reply[0][1]) if reply else []:
            found.append(unpack_draft_tokens(fields[b"draft"]))
            self._draft_positions[sequence] = entry
        return found

    def publish_statistics(self, statistics: Mapping[str, int], counts: Mapping[str, int]) -> None:
        """Publishes the head's state, and its counts in this epoch."""
        self._set_epoch_fields(self._keys.statistics(self._epoch), statistics)
        self._set_epoch_fields(self._keys.counts(self._epoch), counts)

    def publish_stage_stats(self, measured: BatchTimes, counts: Mapping[str, int]) -> None:
        """Publishes the times of this stage's batches for the head, and its counts since the epoch
        began for `pipespec status` and /metrics."""
        if measured.points:
            self._set_epoch_fields(
                self._keys.row_times(self._epoch), {str(self.rank): pack_times(measured)}
            )
        if counts:
            own = {f"{name}/{self.rank}": count for name, count in counts.items()}
            self._set_epoch_fields(self._keys.counts(self._epoch), own)

    def _set_epoch_fields(self, key: str, fields: Mapping[str, Any]) -> None:
        pairs = [item for pair in fields.items() for item in pair]
        self._send("set_epoch_fields", (self._keys.epoch, key), self._epoch, *pairs)

    def row_times(self) -> list[BatchTimes]:
        found = self._pipe.call("HVALS", self._keys.row_times(self._epoch))
        return [unpack_times(packed.decode()) for packed in found]

    def watched_requests(self, requests: Sequence[int]) -> set[int] | None:
        """Those of the requests whose trees a dashboard shows; None: no dashboard is open."""
        own = map(self._keys.watched_request, requests)
        any_dashboard, *found = self._pipe.call("MGET", self._keys.watched, *own)
        if any_dashboard is None:
            return None
        return {request for request, mark in zip(requests, found, strict=True) if mark is not None}

    def publish_step(self, fields: Mapping[str, bytes]) -> None:
        pairs = [item for pair in fields.items() for item in pair]
        names = (self._keys.epoch, self._keys.published_steps)
        self._send(
            "publish_step", names, self._epoch, MAX_PUBLISHED_STEPS, KEEP_PUBLISHED_S, *pairs
        )

    def finish(
        self,
        request: int,
        reason: str,
        prefill_ns: int | None = None,
        cached: int | None = None,
    ) -> None:
        super().finish(request, reason, prefill_ns, cached)
        self._cancelled.discard(request)

    def drop_draft_tokens(self, sequence: int) -> None:
        self._draft_positions.pop(sequence, None)

    def cancelled(self, request: int) -> bool:
        return request in self._cancelled

    def _admit(
        self, count: int, waiting: Mapping[str, tuple[int, int]]
    ) -> list[tuple[Request, tuple[int, ...]]]:
        keys = self._keys
        names = (
            keys.epoch,
            keys.queue,
            keys.admitted,
            keys.requests,
            keys.closed(self._epoch),
            keys.finished,
            keys.arrived(self._epoch),
        )
        last = [
            each
            for tenant, (priority, request) in waiting.items()
            for each in (tenant, priority * 2**32 + request)  # as lua/enqueue.lua orders them
        ]
        closed, self._num_left, parts, *taken = self._call(
            "admit", names, self._epoch, KEEP_FINISHED_S, count, *last
        )
        shared = {n: unpack_shared(spec) for n, spec in zip(parts[::2], parts[1::2], strict=True)}
        self._arrived, self._closed, self._waiting = False, bool(closed), waiting
        found = []
        for number, own, length, first in taken:
            request = unpack_request(number, shared[first], own)
            resumed = length > len(request.prompt)
            found.append((request, self.tokens(number) if resumed else ()))
        return found

    def _take(self, task: Task) -> bytes | None:
        assert task.rank == self.rank, f"task {task.id} is not of rank {self.rank}"
        return self._ready.pop(task.id, None)

    def _send_blocking_pop(self) -> None:
        if self._pops < POPS // 2:
            for _ in range(POPS - self._pops):
                self._announcements.send("BLPOP", f"{self._graph[2]}:{self.rank}", 0)
            self._pops = POPS

    def _read_announcement(self, timeout: float) -> bool:
        """Reads one announcement within `timeout` seconds; whether there was one."""
        self._send_blocking_pop()
        if not self._announcements.readable(timeout):
            return False
        self._pops -= 1
        _, item = self._announcements.read()
        if item == b"STALE":
            raise StaleEpoch(f"Epoch {self._epoch} is over: a newer one has begun.")
        if item == ARRIVED:
            self._arrived = True
            return True
        if item.startswith(CANCEL):
            self._cancelled.add(int(item[len(CANCEL) :]))
            return True
        name, _, payload = item.partition(b" ")
        task = Task.parse(name.decode())
        if task.step > self._completed.get(task.kind, -1):
            self._ready[task.id] = payload
        return True


def pack_draft_tokens(draft: DraftTokens) -> bytes:
    """Little-endian int64: the step; then parents, tokens, and the bits of the log-probabilities,
    as many of each."""
    logps = draft.logps.astype("<f8").view("<i8")
    columns = (draft.parents, draft.tokens, logps)
    return np.concatenate(([draft.step], *columns)).astype("<i8").tobytes()


def unpack_draft_tokens(payload: bytes) -> DraftTokens:
    numbers = np.frombuffer(payload, "<i8")
    parents, tokens, logps = numbers[1:].reshape(3, -1)
    return DraftTokens(int(numbers[0]), parents, tokens, logps.view("<f8"))
