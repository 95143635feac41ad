"""A head's scheduler and draft, and real stages over a toy model, in one thread and any order.

The toy computes with what lies in the slots that a row attends to, so a text comes out wrong if
any slot has another's content. It counts; nothing is rounded.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from pipespec.controller.graph import Layout, Task
from pipespec.controller.verdict import pack
from pipespec.core import Batch, Request, Scored, Verdict
from pipespec.emulation import Pace
from pipespec.engine.attention.plan import AttentionPlan
from pipespec.engine.runner import SliceRunner
from pipespec.head.scheduler import Scheduler
from pipespec.head.sequence import NOT_OPEN, Sequence
from pipespec.head.source.draft_model import DraftModelSource
from pipespec.head.source.parallel import Parallel
from pipespec.head.work import DraftWork, SchedulerConfig
from pipespec.stage.loop import StageLoop, StageSettings
from pipespec.trace import Timeline

VOCABULARY = 5
PRIME = 65521


class ToyModel:
    """A slice of one layer: what leaves a row is a sum over all that it attends to."""

    vocab_size = VOCABULARY
    hidden_size = 1

    def __init__(self, num_slots: int):
        self.stored = np.zeros(num_slots, np.int64)
        self.rows = 0

    def forward(
        self, inputs: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        self.rows += len(plan.write)
        self.stored[plan.write] = inputs.numpy().astype(np.int64).reshape(-1)
        found = np.zeros((len(plan.write), 1), np.float32)
        for segment in plan.segments():
            for row, position in enumerate(segment.positions.tolist()):
                seen = segment.mask[row]
                where = np.concatenate(
                    (np.arange(len(segment.prefix)), segment.tree_positions[seen])
                )
                assert sorted(where.tolist()) == list(range(position + 1)), "a row sees its text"
                slots = np.concatenate((segment.prefix, segment.tree[seen]))
                found[segment.rows.start + row] = layer(self.stored[slots], where)
        return torch.from_numpy(found)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return 4 * torch.eye(VOCABULARY)[hidden[:, 0].long() % VOCABULARY]


def layer(stored: np.ndarray, positions: np.ndarray) -> int:
    return int((31 + (stored + 7) * (positions**2 + 3)).sum()) % PRIME


def text_of(request: Request, num_stages: int) -> list[int]:
    """The answer that the toy gives."""
    text = list(request.prompt)
    for _ in range(request.max_new_tokens):
        row = np.array(text)
        for _ in range(num_stages):
            row = np.array([layer(row[: i + 1], np.arange(i + 1)) for i in range(len(row))])
        text.append(int(row[-1]) % VOCABULARY)
    return text[len(request.prompt) :]


class Board:
    """The controller of one stage: which verdicts it can see, of those that were drawn."""

    def __init__(self, drawn: list[bytes]):
        self.drawn = drawn
        self.visible = 0
        self.scored: dict[int, int] = {}  # tokens of each prompt that were told of

    def poll(self, task: Task, timeout: float = 0.0) -> bytes | None:
        return self.drawn[task.step] if task.step < self.visible else None

    def wait(self, task: Task) -> bytes:
        assert task.step < len(self.drawn), "a stage waits for what cannot come"
        return self.drawn[task.step]

    def score(self, request: int, told: Scored) -> None:
        assert told.base == self.scored.get(request, 0) + 1
        self.scored[request] = told.base + len(told.logprobs) - 1

    def drop_guesses(self, sequence: int) -> None: ...


class Link:
    """What a stage is given comes by hand."""

    def __init__(self, rank: int):
        self.rank = rank


class ToyPipeline:
    """One epoch. Whoever drives it calls `send` and `work` as `cluster.sync` allows."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        free: bool,
        draft_slots: int,
        answers: dict[int, list[int]],
        parallel: Parallel | None = None,
    ):
        """`answers`: what was decided of each request, which grows; `parallel`: if a pass of the
        draft guesses several tokens."""
        num_stages = config.num_steps
        layout = Layout(num_stages, sync="free" if free else "lockstep")
        self.scheduler = Scheduler(config)
        self.draft = DraftModelSource(
            SliceRunner(ToyModel(draft_slots), draft_slots),
            config.prefill_chunk,
            VOCABULARY,
            max_retained=config.max_retained,
            parallel=parallel,
        )
        self.drawn: list[bytes] = []
        self.verdicts: list[list[Verdict]] = []
        self.heard = 0  # by the head
        self.boards = [Board(self.drawn) for _ in range(num_stages)]
        self.stages = [
            StageLoop(
                SliceRunner(ToyModel(config.num_slots), config.num_slots),
                Link(1 + i),
                board,
                StageSettings(layout, Pace(), 0.0),
                Timeline(),
            )
            for i, board in enumerate(self.boards)
        ]
        self.inbox = [deque([Batch(-1)]) for _ in self.stages]
        self.answers = answers
        self.rows_read = 0  # of prompts
        self.cancelled: list[int] = []  # requests, until the head hears of it
        self._accepted: list[Verdict] = []

    def add(self, request: Request) -> None:
        """Take a request in, with what was decided of it."""
        answer = tuple(self.answers.setdefault(request.id, []))
        self.scheduler.add(request, lambda token: False, 0, answer)

    def cancel(self, request: int) -> None:
        sequence = self.scheduler.cancel(request)
        if sequence is not None:
            self._left(sequence)

    def begin(self) -> None:
        """The head's step up to where it waits for verdicts."""
        for sequence in self.scheduler.admit():
            self.draft.begin(sequence.context)
        self.scheduler.begin()
        while work := self.scheduler.expansion(0.0):
            self._expand(work)

    def hear(self) -> None:
        """The head follows the next verdict."""
        for verdict in self.verdicts[self.heard]:
            progress = self.scheduler.apply(verdict, now=0)
            if progress is None:
                continue
            self.answers[progress.sequence.request.id] += progress.accepted.tokens
            self._accepted.append(progress.accepted)
            if progress.reason:
                self._left(progress.sequence)
        self.heard += 1

    def send(self) -> Batch:
        """The rest of the head's step: its batch is on its way."""
        scheduler = self.scheduler
        scheduler.heard(0.0, 1.0)
        for request in self.cancelled:
            self.cancel(request)
        self.cancelled.clear()
        for sequence in scheduler.make_room():
            self._left(sequence)
        while isinstance(batch := scheduler.next_batch(0.0), DraftWork):
            self._log()
            self._expand(batch)
        self.inbox[0].append(batch)
        self._log()
        scheduler.end(1.0)
        assert scheduler.free_slots >= 0
        assert scheduler._filled + scheduler.cache.held <= scheduler.num_slots
        self.rows_read += int((batch.rows[:, 5] != 0).sum())
        self.draft.runner.check_integrity()
        return batch

    def work(self, rank: int, *, seen: int | None = None) -> None:
        """A step of a stage; running free, it sees so many verdicts after it has computed."""
        loop, free = self.stages[rank - 1], seen is not None
        batch = self.inbox[rank - 1].popleft()
        if free:
            loop.catch_up()
        loop.share(batch)
        loop.release(batch)
        loop.open(batch)
        computed = loop.compute(batch)
        if loop.last:
            self.verdicts.append(loop._verdicts)
            self.drawn.append(pack(loop._verdicts, 0))
            loop.receiver.heard += 1
            loop.follow(loop._verdicts)
        elif free:
            assert seen is not None
            self.boards[rank - 1].visible = max(self.boards[rank - 1].visible, seen)
            loop.catch_up()
        else:
            loop.follow(loop.receiver.verdict())
        if not loop.last:
            self.inbox[rank].append(loop.prune(computed))
        loop.step += 1
        loop.runner.check_integrity()

    def lockstep(self) -> Batch:
        """A step of everybody, the last stage first: its verdict is what the others wait for."""
        self.begin()
        for rank in range(len(self.stages), 0, -1):
            self.work(rank)
        self.hear()
        return self.send()

    def _expand(self, work: DraftWork) -> None:
        self.scheduler.graft(work, self.draft.expand(work.asked, work.children), 1.0)

    def _left(self, sequence: Sequence) -> None:
        self._log()
        if sequence.number != NOT_OPEN:
            self.draft.end(sequence.number)
            sequence.leave()

    def _log(self) -> None:
        for verdict in self._accepted:
            self.draft.accept(verdict)
        self._accepted.clear()
