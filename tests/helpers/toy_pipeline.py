"""A head's scheduler and draft, and real stages over a toy model, in one thread and any order.

The toy computes with what lies in the slots that a row attends to, so a text comes out wrong if
any slot has another's content. It counts; nothing is rounded.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from pipespec.controller.task_graph import Task
from pipespec.controller.verdict_exchange import unpack_verdicts
from pipespec.core import Batch, PromptLogprobs, Request, Verdict
from pipespec.engine.attention.attention_plan import AttentionPlan
from pipespec.engine.recurrence.recurrent_layers import RecurrentLayers
from pipespec.engine.slice.runner import SliceRunner
from pipespec.engine.slice.whole_slice import WholeSlice
from pipespec.head.proposer import Proposal
from pipespec.head.proposers.draft_model import DraftModelProposer
from pipespec.head.proposers.parallel import ParallelDraft
from pipespec.head.proposers.token_map import TokenMap
from pipespec.head.scheduler import Scheduler
from pipespec.head.scheduler_types import ProposalBatch, SchedulerConfig
from pipespec.head.sequence import NOT_IN_PIPELINE, Sequence
from pipespec.head.step import run_step
from pipespec.stage.stage_loop import StageLoop, StageSettings
from pipespec.timing.batch_times import BatchTimes
from pipespec.timing.trace import Timeline

VOCABULARY = 5
PRIME = 65521


class ToyModel:
    """A slice of one layer: what leaves a row is a sum over all that it attends to."""

    vocab_size = VOCABULARY
    hidden_size = input_size = 1
    taps = ()
    parallel = WholeSlice()
    reads_in_place = True

    def __init__(self, num_slots: int):
        self.stored = np.zeros(num_slots, np.int64)
        self.rows = 0
        self.recurrent = RecurrentLayers([], num_slots)

    def forward(
        self, inputs: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        self.rows += len(plan.write)
        self.stored[plan.write] = inputs.numpy().astype(np.int64).reshape(-1)
        found = np.zeros((len(plan.write), 1), np.float32)
        for row, slots in self.paths(plan):
            found[row] = layer(self.stored[slots], np.arange(len(slots)))
        return torch.from_numpy(found)

    def move_kv(self, old: np.ndarray, new: np.ndarray) -> None:
        self.stored[new] = self.stored[old]

    def paths(self, plan: AttentionPlan) -> Iterator[tuple[int, np.ndarray]]:
        """The slots of the text up to each row."""
        for segment in plan.segments:
            for row, position in enumerate(segment.positions.tolist()):
                seen = segment.mask[row]
                where = np.concatenate(
                    (np.arange(len(segment.prefix)), segment.tree_positions[seen])
                )
                assert sorted(where.tolist()) == list(range(position + 1)), "a row sees its text"
                slots = np.concatenate((segment.prefix, segment.tree[seen]))
                yield segment.rows.start + row, slots[np.argsort(where)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return 4 * torch.eye(VOCABULARY)[hidden[:, 0].long() % VOCABULARY]

    def best_tokens(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best = self.logits(hidden).max(-1)
        return best.values, best.indices


class ForeignToy(ToyModel):
    """The toy as a draft with other tokens: those of `tokens.ids` for the toy's own, and as many
    others, which are parts of tokens that it lacks, or none of the target's."""

    def __init__(self, num_slots: int, tokens: TokenMap):
        super().__init__(num_slots)
        self.vocab_size = 2 * VOCABULARY
        self.ours = np.arange(self.vocab_size)
        known = np.flatnonzero(tokens.ids >= 0)
        self.ours[tokens.ids[known]] = known
        self.columns = torch.from_numpy(tokens.ids[known])
        self.known = torch.from_numpy(known)

    def forward(
        self, inputs: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        return super().forward(torch.from_numpy(self.ours[inputs.numpy()]), positions, plan)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        found = torch.full(
            (len(hidden), self.vocab_size), 9.0
        )  # of tokens that it must not propose
        found[:, self.columns] = super().logits(hidden)[:, self.known]
        return found


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
        self.visible = 0  # verdicts
        self.next_visible = 0  # when the stage has computed its batch
        self.scored: dict[int, int] = {}  # tokens of each prompt that were reported

    def unattended(self) -> AbstractContextManager[None]:
        return nullcontext()

    def complete(self, tasks: list[Task], payload: bytes = b"") -> None:
        self.visible = max(self.visible, self.next_visible)

    def wait(
        self, task: Task, timeout: float | None = None, *, or_request: bool = False
    ) -> bytes | None:
        if timeout is not None:
            return self.drawn[task.step] if task.step < self.visible else None
        assert task.step < len(self.drawn), "a stage waits for what cannot arrive"
        return self.drawn[task.step]

    def add_prompt_logprobs(self, request: int, logprobs: PromptLogprobs) -> None:
        assert logprobs.base == self.scored.get(request, 0) + 1
        self.scored[request] = logprobs.base + len(logprobs.logprobs) - 1

    def drop_draft_tokens(self, sequence: int) -> None: ...
    def report(self, request: int, stats: dict[str, Any]) -> None: ...
    def publish_stage_stats(self, measured: BatchTimes, counts: Mapping[str, int]) -> None: ...


class LastBoard(Board):
    """The controller of the last stage, which draws the verdicts."""

    def complete(self, tasks: list[Task], payload: bytes = b"") -> None:
        self.drawn.append(payload)


class Link:
    """Connects a rank with the queue of arriving batches and that of the next rank."""

    returns = None

    def __init__(self, rank: int, arriving: deque[Batch], next_rank: deque[Batch] | None):
        self.rank = rank
        self._arriving = arriving
        self._next_rank = next_rank

    def recv(self) -> Batch:
        return self._arriving.popleft()

    def send(self, batch: Batch) -> None:
        assert self._next_rank is not None
        self._next_rank.append(batch)


class ToyPipeline:
    """One epoch. Its user calls `step` and `run_stage` in any order."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        draft_slots: int,
        answers: dict[int, list[int]],
        parallel: ParallelDraft | None = None,
        tokens: TokenMap | None = None,
        make_model: Callable[[int], Any] = ToyModel,
        vocabulary: int = VOCABULARY,
        make_link: Callable[[int, deque[Batch], deque[Batch] | None], Link] = Link,
    ):
        """`answers`: what was decided of each request, which grows; `parallel`: if a pass of the
        draft guesses several tokens; `tokens`: of a draft with others; `make_model`: a model of so
        many slots, first the draft, then that of each stage; `vocabulary`: of the target."""
        num_stages = config.num_stages
        draft = make_model(draft_slots) if tokens is None else ForeignToy(draft_slots, tokens)
        self.scheduler = Scheduler(config)
        self.draft = DraftModelProposer(
            SliceRunner(draft, draft_slots),
            config.prefill_chunk,
            vocabulary,
            max_retained=config.max_retained,
            states=config.make_states(),
            parallel=parallel,
            tokens=tokens,
        )
        self.drawn: list[bytes] = []
        self.num_received = 0  # verdicts that the head has applied
        self.boards = [Board(self.drawn) for _ in range(num_stages - 1)] + [LastBoard(self.drawn)]
        self.inbox: list[deque[Batch]] = [deque() for _ in self.boards]
        self.stages = [
            StageLoop(
                SliceRunner(make_model(config.num_slots), config.num_slots),
                make_link(1 + i, arriving, next_rank),
                board,
                StageSettings(num_stages),
                Timeline(),
            )
            for i, (board, arriving, next_rank) in enumerate(
                zip(self.boards, self.inbox, [*self.inbox[1:], None], strict=True)
            )
        ]
        self.answers = answers
        self.rows_read = 0  # of prompts
        self.cancelled: list[int] = []  # requests, until the head hears of it
        self._accepted: list[Verdict] = []
        self._elapsed_ms = 0.0
        self._receive: Callable[[], None] = lambda: None

    def add(self, request: Request) -> None:
        """Take a request in, with what was decided of it."""
        answer = tuple(self.answers.setdefault(request.id, []))
        self.scheduler.admission.add(request, lambda token: False, 0, answer)

    def cancel(self, request: int) -> None:
        sequence = self.scheduler.admission.cancel(request)
        if sequence is not None:
            self.end_sequence(sequence)

    def step(self, receive: Callable[[], None]) -> Batch:
        """A step of the head; `receive` runs while it waits for verdicts, and may run stages."""
        self._receive = receive
        batch = run_step(self.scheduler, self)
        assert self.scheduler.admission.free_slots >= 0
        assert self.scheduler.admission.slots_needed <= self.scheduler.config.num_slots
        self.rows_read += int((batch.rows[:, 5] != 0).sum())
        self.draft.runner.check_integrity()
        return batch

    def begin_step(self) -> None:
        """See `pipespec.head.step.Pipeline`, as for the other methods that `run_step` calls."""
        self._elapsed_ms = 0.0

    def elapsed_ms(self) -> float:
        return self._elapsed_ms

    def start_sequence(self, sequence: Sequence) -> None:
        self.draft.start_sequence(sequence.context)

    def propose(self, work: ProposalBatch) -> tuple[list[Proposal | None], float]:
        self._log()
        return self.draft.propose(work.requests, work.children), 1.0

    def receive_verdicts(self) -> None:
        self._receive()
        self._elapsed_ms = 1.0

    def drop_cancelled(self) -> None:
        for request in self.cancelled:
            self.cancel(request)
        self.cancelled.clear()

    def end_sequence(self, sequence: Sequence) -> None:
        self._log()
        if sequence.number != NOT_IN_PIPELINE:
            self.draft.end_sequence(sequence.number)
            sequence.leave_pipeline()

    def send(self, batch: Batch) -> None:
        self.inbox[0].append(batch)

    def after_send(self) -> None:
        self._log()

    def receive_next(self) -> None:
        """The head applies the verdicts of the next step."""
        for verdict in unpack_verdicts(self.drawn[self.num_received])[0]:
            progress = self.scheduler.apply(verdict, now=0)
            if progress is None:
                continue
            self.answers[progress.sequence.request.id] += progress.accepted.tokens
            self._accepted.append(progress.accepted)
            if progress.reason:
                self.end_sequence(progress.sequence)
        self.num_received += 1

    def num_runnable(self, rank: int) -> int:
        """How many batches a stage can compute."""
        return len(self.inbox[rank - 1])

    def run_stage(self, rank: int, *, visible: int = 0) -> None:
        """A stage computes a batch; so many verdicts are visible after that."""
        self.boards[rank - 1].next_visible = visible
        self.stages[rank - 1].run_step()
        self.stages[rank - 1].runner.check_integrity()

    def orderly_step(self) -> Batch:
        """A step of the head while each stage computes the batch that has arrived, the last one
        first: the others apply its verdict."""

        def receive() -> None:
            for rank in range(len(self.stages), 0, -1):
                if self.num_runnable(rank):
                    self.run_stage(rank, visible=len(self.drawn))
            if self.num_received < len(self.drawn):
                self.receive_next()

        return self.step(receive)

    def _log(self) -> None:
        for verdict in self._accepted:
            self.draft.accept_verdict(verdict)
        self._accepted.clear()
