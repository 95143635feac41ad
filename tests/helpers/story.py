"""A scripted controller and links, so that the loop of one rank runs in one thread."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pipespec.controller.log_records import Accepted
from pipespec.controller.task_graph import Graph, Task, TaskKind
from pipespec.controller.verdict_exchange import pack_verdicts
from pipespec.core import (
    COMMITTED,
    KIND,
    NODE,
    PARENT,
    SEQUENCE,
    TOKEN,
    Batch,
    DraftTokens,
    Request,
    Verdict,
)
from pipespec.engine.slice.parent_rule import Lineage, LiveNodes
from pipespec.sampling.verifier import AcceptedPath
from pipespec.timing.batch_times import BatchTimes


class StoryOver(Exception):
    """A rank has sent as many batches as the script has."""


class StoryController:
    """Gives a rank requests, and the verdicts of each step.

    What a rank writes can be read back.

    Args:
        verdicts: those on the batch of a step.
        lag: a verdict has arrived once the rank has computed so many batches after its own. Where a
            rank waits for it, it arrives earlier.
        cancels: requests that are cancelled.
    """

    def __init__(
        self,
        requests: Iterable[Request] = (),
        verdicts: Callable[[int], list[Verdict]] = lambda step: [],
        lag: int = 1,
        cancels: Collection[int] = (),
    ):
        self._requests = {request.id: request for request in requests}
        self._queue = list(self._requests.values())
        self.verdicts = verdicts
        self._lag = lag
        self._cancels = cancels
        self.submitted: list[int] = []
        self.completed: list[Task] = []
        self.payloads: list[bytes] = []
        self.accepted: dict[int, list[int]] = {}
        self.logged: list[list[int]] = []  # the requests of each call of `accept`
        self.finished: dict[int, str] = {}
        self.reports: dict[int, dict[str, Any]] = {}
        self.draft_tokens: dict[int, list[DraftTokens]] = {}  # by sequence
        self._num_read: dict[int, int] = {}  # of them, by sequence
        self.counts: dict[str, int] = {}
        self.times = BatchTimes()  # that a stage has published last
        self.shown: list[dict[str, bytes]] = []

    def next_requests(
        self, count: int, waiting: Mapping[str, tuple[int, int]], *, wait: bool
    ) -> list[tuple[Request, tuple[int, ...]]] | None:
        taken, self._queue = self._queue[:count], self._queue[count:]
        return [(request, ()) for request in taken] or None

    def publish_draft_tokens(self, sequence: int, draft: DraftTokens) -> None:
        self.draft_tokens.setdefault(sequence, []).append(draft)

    def read_draft_tokens(self, sequence: int) -> list[DraftTokens]:
        published = self.draft_tokens.get(sequence, [])
        found = published[self._num_read.get(sequence, 0) :]
        self._num_read[sequence] = len(published)
        return found

    def drop_draft_tokens(self, sequence: int) -> None:
        self.draft_tokens.pop(sequence, None)
        self._num_read.pop(sequence, None)

    def publish_statistics(self, statistics: Mapping[str, int], counts: Mapping[str, int]) -> None:
        self.counts = dict(counts)

    def publish_stage_stats(self, measured: BatchTimes, counts: Mapping[str, int]) -> None:
        self.times = measured
        self.counts = dict(counts)

    def row_times(self) -> list[BatchTimes]:
        return []

    def watched_requests(self, requests: Sequence[int]) -> set[int] | None:
        return None

    def publish_step(self, fields: Mapping[str, bytes]) -> None:
        self.shown.append(dict(fields))

    def cancelled(self, request: int) -> bool:
        return request in self._cancels

    def unattended(self) -> AbstractContextManager[None]:
        return nullcontext()

    def submit(self, graph: Graph) -> None:
        self.submitted.append(graph.step)

    def complete(self, tasks: Sequence[Task], payload: bytes = b"") -> None:
        self.completed += tasks
        if payload:
            self.payloads.append(payload)

    def wait(
        self, task: Task, timeout: float | None = None, *, or_request: bool = False
    ) -> bytes | None:
        computed = [each.step for each in self.completed if each.kind is TaskKind.COMPUTE]
        newest = max(computed, default=-1)
        assert timeout is not None or task.step <= newest, "a rank waits for what cannot arrive"
        if timeout is not None and task.step + self._lag > newest:
            return None
        return pack_verdicts(self.verdicts(task.step), 0)

    def accept(self, pieces: Iterable[tuple[int, Accepted]]) -> None:
        self.logged.append([])
        for request, piece in pieces:
            self.logged[-1].append(request)
            answer = self.accepted.setdefault(request, [])
            length = len(self._requests[request].prompt) + len(answer)
            answer.extend(piece.tokens[max(0, length - piece.base) :])

    def finish(
        self, request: int, reason: str, prefill_ns: int | None = None, cached: int | None = None
    ) -> None:
        self.finished.setdefault(request, reason)

    def report(self, request: int, stats: dict[str, Any]) -> None:
        self.reports[request] = stats


class StoryLink:
    """The batches that a rank receives and sends; it sends `most`, then StoryOver is raised."""

    returns = None

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
        raise AssertionError("a script has no abort")

    def close(self) -> None:
        self._arriving = iter(())


class StoryStages:
    """Stages that decide the tokens of given texts.

    Args:
        link: the one that the head sends into.
        texts: of each request, prompt included.
    """

    def __init__(self, link: StoryLink, texts: Mapping[int, Sequence[int]]):
        self._link, self._texts = link, texts
        self._open: dict[int, tuple[Sequence[int], Lineage]] = {}

    def verdicts(self, step: int) -> list[Verdict]:
        """The verdicts of the last stage on the batch of a step."""
        batch = self._link.sent[step]
        for number in (*batch.finished, *batch.preempted):
            del self._open[number]
        for opening in batch.started:
            self._open[opening.sequence] = (
                self._texts[opening.request],
                Lineage(opening.sequence, LiveNodes(), opening.shared_len),
            )
        found = []
        for number, (text, lineage) in self._open.items():
            mine = batch.rows[batch.rows[:, SEQUENCE] == number]
            if not len(mine):
                continue
            lineage.nodes.admit(mine, {number: lineage})
            asked = mine[mine[:, KIND] != COMMITTED]
            nodes, parents, tokens = (asked[:, i].tolist() for i in (NODE, PARENT, TOKEN))
            path = AcceptedPath(lineage.tip, nodes, parents, tokens)
            for token in text[lineage.decided :]:
                if path.row is not None:
                    path.append(token)
            if path.tokens:
                found.append(Verdict(number, lineage.decided, tuple(path.tokens)))
                lineage.apply(found[-1])
        return found
