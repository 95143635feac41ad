"""The controller as one rank sees it: the task graph in Redis, and the request log."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pipespec.controller.connection import Pipe
from pipespec.controller.graph import Graph, Kind, Task
from pipespec.controller.guesses import NO_MORE, pack, unpack
from pipespec.controller.records import entries_of, unpack_request
from pipespec.controller.requests import KEEP_FINISHED_S, RequestLog
from pipespec.core import Guesses, Request
from pipespec.errors import ControllerError, StaleEpoch
from pipespec.row_times import UNKNOWN, Measured
from pipespec.row_times import pack as pack_times
from pipespec.row_times import unpack as unpack_times
from pipespec.system.waiting import spin

# More open steps than this are a mistake (a rank completes nothing), not a deep pipeline.
MAX_OPEN_STEPS = 1024
# How often a rank that waits looks whether an earlier command of its own was refused.
LOOK_S = 0.5
# How long a rank of an old epoch can still learn that it is over.
KEEP_STALE_S = 60
# How often a last stage asks for guesses that the head is just telling.
AGAIN_S = 0.0005
# How many steps are shown at a time to who watches, and for how long after the last.
SHOWN_STEPS = 256
KEEP_SHOWN_S = 10
# What lua/cancel.lua puts before the number of a request.
CANCEL = b"CANCEL "
# What lua/includes/arrived.lua says.
ARRIVED = b"ARRIVED"


class Controller(RequestLog):
    """One rank's client, for one epoch. Not for several threads.

    `submit` and `complete` do not wait for Redis: an error of theirs surfaces at a later
    call, or at once if Redis was quick. A second connection always has a blocking pop of the
    rank's ready list under way before it is needed, so an announced task costs its owner half
    a round trip.

    Args:
        kv_tokens: how many tokens of text the rank holds; None: it holds none and needs not to.
        row_times: how long its batches take by their rows, as far as it knows.
        spins: see `pipespec.system.waiting`.
        computing: how it computes, for whoever asks (`ModelSlice.outcome`); None: it does not.

    Raises Unreachable or StaleEpoch.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str,
        epoch: int,
        rank: int,
        kv_tokens: int | None = None,
        row_times: Measured = UNKNOWN,
        spins: bool = False,
        computing: Mapping[str, Any] | None = None,
    ):
        # An epoch ends with a rank's connection.
        super().__init__(url, namespace=namespace, epoch=epoch, patience=0)
        self.rank = rank
        self._graph = (
            self._keys.epoch,
            self._keys.graph(epoch),
            self._keys.ready(epoch),
        )
        self._ready: dict[str, bytes] = {}
        # The newest step whose task of a kind this rank has completed; it completes them in
        # order, so an announcement of an older one comes too late to be of use.
        self._completed: dict[Kind, int] = {}
        keys = (
            self._keys.epoch,
            self._keys.ranks(epoch),
            self._keys.kv_tokens(epoch),
            self._keys.row_times(epoch),
            self._keys.computing(epoch),
        )
        how = "" if computing is None else json.dumps(computing)
        tokens = "" if kv_tokens is None else kv_tokens
        self._call("attach", keys, epoch, rank, os.getpid(), tokens, pack_times(row_times), how)
        self._announcements = Pipe(url)
        self._spins = spins
        self._listening = False
        self._cancelled: set[int] = set()
        # Whether there may be something in the queue, and whether it was empty and closed when
        # this rank, the head, asked last. When an epoch begins nobody says what is there.
        self._arrived = True
        self._closed = False
        # Of a lossy sequence: the last entry that was read, and its step.
        self._told: dict[int, tuple[str, int]] = {}
        self._listen()

    def close(self) -> None:
        self._announcements.close()
        super().close()

    def submit(self, graph: Graph) -> None:
        """Adds the tasks of a step; each step of an epoch follows the one before."""
        flags = {Kind.JOIN: "v"}
        tasks = " ".join(
            f"{task.id} {'a' if task in graph.announced else flags.get(task.kind, 't')}"
            for task in graph.tasks
        )
        edges = " ".join(f"{source.id} {target.id}" for source, target in graph.told)
        self._send("submit", self._graph, self._epoch, graph.step, MAX_OPEN_STEPS, tasks, edges)

    def complete(self, tasks: Sequence[Task], payload: bytes = b"") -> None:
        """Records tasks of this rank as complete, each with `payload`.

        A rank completes its tasks of one kind in the order of their steps. It may complete
        a task before everything in front of it is complete, and before it was submitted.
        """
        ids = [task.id for task in tasks]
        self._send("complete", self._graph, self._epoch, MAX_OPEN_STEPS, payload, *ids)
        for task in tasks:
            self._completed[task.kind] = task.step
            self._ready.pop(task.id, None)
        self._listen()

    def wait(self, task: Task, timeout: float | None = None) -> bytes:
        """Waits until an announced task of this rank is ready; returns its payload.

        That is the payloads of what came before it, concatenated in the order of completion.
        Each task can be waited for once. Raises StaleEpoch when a new epoch has begun, and
        ControllerError after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (payload := self._take(task)) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise ControllerError(
                    f"Task {task.id} was not ready within {timeout:g} seconds: a rank before it "
                    "may have stopped."
                )
            # Replies of earlier commands are read here too: one that was refused may be the
            # reason why nothing comes.
            self._pipe.drain()
            left = LOOK_S if deadline is None else min(LOOK_S, deadline - time.monotonic())
            self._hear(max(0.0, left))
        return payload

    def poll(self, task: Task, timeout: float = 0.0) -> bytes | None:
        """The payload of an announced task of this rank if it is ready within `timeout` seconds,
        else None."""
        deadline = time.monotonic() + timeout
        while (payload := self._take(task)) is None:
            if not self._hear(max(0.0, deadline - time.monotonic())):
                self._pipe.drain()
                return None
        return payload

    def kv_tokens(self, stages: int) -> int:
        """How many tokens of text every rank holds, once so many stages have joined this epoch.

        Raises StaleEpoch.
        """
        while True:
            found = self._pipe.call("HGETALL", self._keys.kv_tokens(self._epoch))
            held = {int(rank): int(n) for rank, n in zip(found[::2], found[1::2], strict=True)}
            if len(held.keys() - {0}) >= stages:
                return min(held.values())
            self._hear(LOOK_S / 10)

    def next_requests(
        self, count: int, *, wait: bool
    ) -> list[tuple[Request, tuple[int, ...]]] | None:
        """Takes up to `count` requests off the queue, at least one, each with the tokens of its
        answer that an earlier epoch has decided. Only for the head.

        Redis is asked only when it has said that something arrived. []: there is nothing now;
        with `wait` this waits until there is. None: the queue is empty and closed. Raises
        StaleEpoch when a new epoch has begun.
        """
        while self._hear(0.0):
            pass
        while True:
            if self._arrived and (found := self._admit(count)):
                return found
            if self._closed:
                return None
            if not wait:
                return []
            self._pipe.drain()
            self._hear(LOOK_S, idle=True)

    def report(self, request: int, stats: dict[str, Any]) -> None:
        """Adds what this rank has to say about a request (anything that JSON can hold)."""
        self._send_report(self.rank, request, stats)

    def tell(self, sequence: int, guesses: Guesses) -> None:
        """Tells the last stage what this rank, the head, feeds of a lossy sequence in a step."""
        key = self._keys.guesses(self._epoch, sequence)
        self._pipe.send("XADD", key, "MAXLEN", "~", MAX_OPEN_STEPS, "*", "guesses", pack(guesses))
        self._pipe.send("EXPIRE", key, KEEP_STALE_S if guesses is NO_MORE else KEEP_FINISHED_S)
        self._pipe.drain()

    def told(self, sequence: int, until: int | None) -> list[Guesses]:
        """What the head has told of a sequence since this was asked last.

        Waits until it has told of the step `until`; None: what there is. Raises StaleEpoch.
        """
        key = self._keys.guesses(self._epoch, sequence)
        found: list[Guesses] = []
        while True:
            seen = self._told.get(sequence, ("0", -1))
            reply = self._pipe.call("XREAD", "STREAMS", key, seen[0])
            for entry, fields in entries_of(reply[0][1]) if reply else []:
                found.append(unpack(fields[b"guesses"]))
                self._told[sequence] = seen = entry, found[-1].step
            if until is None or seen[1] >= until:
                return found
            self._hear(AGAIN_S)

    def publish(self, statistics: Mapping[str, int], counts: Mapping[str, int]) -> None:
        """Show whoever asks how the cluster is what this rank, the head, is doing, and what it
        has counted since the epoch began."""
        self._tell(self._keys.statistics(self._epoch), statistics)
        self._tell(self._keys.counts(self._epoch), counts)

    def publish_work(self, measured: Measured, counts: Mapping[str, int]) -> None:
        """Tell the head how long this rank's batches take, and whoever asks what this rank has
        counted since the epoch began."""
        if measured.points:
            self._tell(self._keys.row_times(self._epoch), {str(self.rank): pack_times(measured)})
        if counts:
            own = {f"{name}/{self.rank}": count for name, count in counts.items()}
            self._tell(self._keys.counts(self._epoch), own)

    def _tell(self, key: str, fields: Mapping[str, Any]) -> None:
        pairs = [item for pair in fields.items() for item in pair]
        self._send("tell", (self._keys.epoch, key), self._epoch, *pairs)

    def row_times(self) -> list[Measured]:
        """What the stages have told of that so far."""
        found = self._pipe.call("HVALS", self._keys.row_times(self._epoch))
        return [unpack_times(word.decode()) for word in found]

    def watched(self, requests: Sequence[int]) -> set[int] | None:
        """Those of the requests whose trees are watched; None: nobody watches anything."""
        own = map(self._keys.watched_request, requests)
        anybody, *found = self._pipe.call("MGET", self._keys.watched, *own)
        if anybody is None:
            return None
        return {request for request, mark in zip(requests, found, strict=True) if mark is not None}

    def show(self, fields: Mapping[str, bytes]) -> None:
        """Show whoever watches what this rank, the head, has done in a step."""
        pairs = [item for pair in fields.items() for item in pair]
        names = (self._keys.epoch, self._keys.shown)
        self._send("show", names, self._epoch, SHOWN_STEPS, KEEP_SHOWN_S, *pairs)

    def finish(
        self,
        request: int,
        reason: str,
        prefill_ns: int | None = None,
        cached: int | None = None,
    ) -> None:
        super().finish(request, reason, prefill_ns, cached)
        self._cancelled.discard(request)

    def drop_guesses(self, sequence: int) -> None:
        """Nothing more will be told of a sequence."""
        self._told.pop(sequence, None)

    def cancelled(self, request: int) -> bool:
        """Whether a user has cancelled the request, as far as this rank, the head, has heard."""
        return request in self._cancelled

    def _admit(self, count: int) -> list[tuple[Request, tuple[int, ...]]]:
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
        closed, *taken = self._call("admit", names, self._epoch, KEEP_FINISHED_S, count)
        self._arrived, self._closed = len(taken) == count, bool(closed)
        found = []
        for number, asked, length in taken:
            request = unpack_request(number, asked)
            decided = length > len(request.prompt)
            found.append((request, self.tokens(number) if decided else ()))
        return found

    def _take(self, task: Task) -> bytes | None:
        assert task.rank == self.rank, f"task {task.id} is not of rank {self.rank}"
        return self._ready.pop(task.id, None)

    def _listen(self) -> None:
        if not self._listening:
            self._announcements.send("BLPOP", f"{self._graph[2]}:{self.rank}", 0)
            self._listening = True

    def _hear(self, timeout: float, *, idle: bool = False) -> bool:
        """Takes in one announcement if it comes within `timeout` seconds; `idle`: no step is under
        way."""
        self._listen()
        if self._spins and timeout and not idle:
            spin(self._announcements.readable, timeout)
        if not self._announcements.readable(timeout):
            return False
        self._listening = False
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
