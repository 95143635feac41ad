"""A controller and links that tell one rank a story, so that its loop runs in one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pipespec.controller.graph import Graph, Kind, Task
from pipespec.controller.records import Accepted
from pipespec.controller.verdict import pack
from pipespec.core import (
    DECIDED,
    KIND,
    NODE,
    PARENT,
    SEQUENCE,
    TOKEN,
    Batch,
    Guesses,
    Request,
    Verdict,
)
from pipespec.engine.lineage import Lineage, LiveNodes
from pipespec.row_times import Measured
from pipespec.sampling.decide import Walk


class StoryOver(Exception):
    """A rank has sent as many batches as the story has."""


class StoryController:
    """What a rank hears: requests, and the verdict of each step when it asks for it.

    Args:
        verdicts: those of a step.
        cancels: requests that nobody waits for any more.
    """

    def __init__(
        self,
        requests: Iterable[Request] = (),
        verdicts: Callable[[int], list[Verdict]] = lambda step: [],
        answers: dict[int, tuple[int, ...]] | None = None,
        cancels: Iterable[int] = (),
    ):
        self._requests = {request.id: request for request in requests}
        self._queue = list(self._requests.values())
        self._verdicts = verdicts
        self._answers = answers or {}
        self._cancels = set(cancels)
        self.submitted: list[int] = []
        self.completed: list[Task] = []
        self.payloads: list[bytes] = []
        self.accepted: dict[int, list[int]] = {}
        self.logged: list[list[int]] = []  # the requests of each call of `accept`
        self.finished: dict[int, str] = {}
        self.prefill_ns: dict[int, int | None] = {}
        self.cached: dict[int, int | None] = {}
        self.reports: dict[int, dict[str, Any]] = {}
        self.guesses: dict[int, list[Guesses]] = {}  # by sequence
        self.statistics: dict[str, int] = {}
        self.counts: dict[str, int] = {}
        self.times = Measured()
        self.watches: set[int] | None = None  # requests
        self.shown: list[dict[str, bytes]] = []

    def next_requests(
        self, count: int, *, wait: bool
    ) -> list[tuple[Request, tuple[int, ...]]] | None:
        taken, self._queue = self._queue[:count], self._queue[count:]
        return [(request, self._answers.get(request.id, ())) for request in taken] or None

    def request(self, request: int) -> Request:
        return self._requests[request]

    def tokens(self, request: int) -> tuple[int, ...]:
        return self._answers.get(request, ())

    def tell(self, sequence: int, guesses: Guesses) -> None:
        self.guesses.setdefault(sequence, []).append(guesses)

    def drop_guesses(self, sequence: int) -> None:
        self.guesses.pop(sequence, None)

    def publish(self, statistics: Mapping[str, int], counts: Mapping[str, int]) -> None:
        self.statistics = dict(statistics)
        self.counts = dict(counts)

    def publish_work(self, measured: Measured, counts: Mapping[str, int]) -> None:
        self.times = measured
        self.counts = dict(counts)

    def row_times(self) -> list[Measured]:
        return []

    def watched(self, requests: Sequence[int]) -> set[int] | None:
        return None if self.watches is None else self.watches & set(requests)

    def show(self, fields: Mapping[str, bytes]) -> None:
        self.shown.append(dict(fields))

    def cancelled(self, request: int) -> bool:
        return request in self._cancels

    def submit(self, graph: Graph) -> None:
        self.submitted.append(graph.step)

    def complete(self, tasks: Sequence[Task], payload: bytes = b"") -> None:
        self.completed += tasks
        if payload:
            self.payloads.append(payload)

    def wait(self, task: Task, timeout: float | None = None) -> bytes:
        if task.kind is Kind.TRANSFER:
            return np.zeros(1, "<i8").tobytes()
        return pack(self._verdicts(task.step), 0)

    def poll(self, task: Task, timeout: float = 0.0) -> bytes | None:
        return self.wait(task)

    def accept(self, pieces: Iterable[tuple[int, Accepted]]) -> None:
        self.logged.append([])
        for request, piece in pieces:
            self.logged[-1].append(request)
            self.accepted.setdefault(request, []).extend(piece.tokens)

    def finish(
        self,
        request: int,
        reason: str,
        prefill_ns: int | None = None,
        cached: int | None = None,
    ) -> None:
        self.finished[request] = reason
        self.cached[request] = cached
        self.prefill_ns[request] = prefill_ns

    def report(self, request: int, stats: dict[str, Any]) -> None:
        self.reports[request] = stats


class StoryLink:
    """What a rank receives, and what it has sent: `most` batches, then StoryOver is raised."""

    def __init__(self, rank: int, arriving: Iterable[Batch] = (), most: int = 1000):
        self.rank = rank
        self.most = most
        self.sent: list[Batch] = []
        self._arriving = iter(arriving)

    def recv(self) -> Batch:
        return next(self._arriving)

    def send(self, batch: Batch) -> None:
        if len(self.sent) == self.most:
            raise StoryOver
        self.sent.append(batch)

    def abort(self) -> None:
        raise AssertionError("nobody ends a story")

    def close(self) -> None:
        self._arriving = iter(())


class StoryStages:
    """Stages that decide what given texts say, `num_steps` steps after the head sent a row.

    Args:
        link: what the head sends into.
        texts: of each request, prompt included.
    """

    def __init__(self, link: StoryLink, num_steps: int, texts: Mapping[int, Sequence[int]]):
        self._link, self._num_steps, self._texts = link, num_steps, texts
        self._open: dict[int, tuple[Sequence[int], Lineage]] = {}

    def verdicts(self, step: int) -> list[Verdict]:
        """What the last stage says after a step."""
        leaving = step - self._num_steps
        if leaving < 0:
            return []
        batch = self._link.sent[leaving]
        for number in (*batch.released, *batch.preempted):
            del self._open[number]
        for opening in batch.opened:
            self._open[opening.sequence] = (
                self._texts[opening.request],
                Lineage(opening.sequence, LiveNodes(), opening.shared),
            )
        found = []
        for number, (text, lineage) in self._open.items():
            mine = batch.rows[batch.rows[:, SEQUENCE] == number]
            if not len(mine):
                continue
            lineage.nodes.admit(mine, {number: lineage})
            asked = mine[mine[:, KIND] != DECIDED]
            nodes, parents, tokens = (asked[:, i].tolist() for i in (NODE, PARENT, TOKEN))
            walk = Walk(lineage.tip, nodes, parents, tokens)
            for token in text[lineage.decided :]:
                if walk.row is not None:
                    walk.go_on(token)
            if walk.tokens:
                found.append(Verdict(number, lineage.decided, tuple(walk.tokens)))
                lineage.apply(found[-1])
        return found
