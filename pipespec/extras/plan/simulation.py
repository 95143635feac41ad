"""What a cluster will do, predicted before it is built: `pipespec plan`. Pure.

`simulate` drives the head's own scheduler (`pipespec.head.scheduler`) before stages that are only
times, with a synthetic draft of the stated accuracy. docs/planning.md has the derivation of the
closed forms, and its limits. Above 350 lines, as it has every call of a running pipeline.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from pipespec.core import NODE, SEQUENCE, Batch, Request, Verdict
from pipespec.extras.emulation.machine import TimeCurve
from pipespec.extras.emulation.synthetic_proposer import Accuracy, DrawnDraft, SyntheticProposer
from pipespec.extras.plan.pipeline_times import Machine, TextRecord
from pipespec.head.policies.policy import SpeculationPolicy, check_rounds
from pipespec.head.proposer import Proposal, Proposer
from pipespec.head.proposers.calibration import CalibratedProposer, Calibration
from pipespec.head.scheduler import Scheduler
from pipespec.head.scheduler_types import ProposalBatch, SchedulerConfig
from pipespec.head.sequence import Sequence as HeadSequence
from pipespec.head.step import run_step
from pipespec.head.tree import ROOT
from pipespec.limits import MAX_SEED, check_whole
from pipespec.timing.batch_times import RowTimes, profiled_sizes

MAX_TOKENS = 10**6
MAX_REQUESTS = 4096
# The simulated text is random, and longer than what is decoded, so that no draft token reaches its
# end.
VOCABULARY = 1 << 15
BEYOND = 512
# The text of one of several requests is so many times as long as the mean of the answers.
AHEAD = 4

# Steps between two reports of the stages' times.
LEARNED_EVERY = 16

Rounds = int | str


class TokenArrival(NamedTuple):
    """A decided token: its request, when the head has it on the simulated clock in ms, how many
    steps after its parent's row its own was fed, and whether that was before it was decided."""

    request: int
    ms: float
    delay: int
    hit: bool


OnToken = Callable[[TokenArrival], None]


@dataclass
class Simulation:
    """Counts between the first decided token and the last, with so many batches `in_flight`.

    `delays[d]` counts the tokens whose row was fed d steps after their parent's, `[in_flight + 1]`;
    `hits` those that had been fed before they were decided.
    """

    delays: np.ndarray
    hits: int = 0
    steps: int = 0
    rows: int = 0
    rounds: int = 0
    ms: float = 0.0

    def __add__(self, other: Simulation) -> Simulation:
        return Simulation(
            *(getattr(self, each.name) + getattr(other, each.name) for each in fields(self))
        )

    @property
    def in_flight(self) -> int:
        return len(self.delays) - 1

    @property
    def tokens(self) -> int:
        return int(self.delays.sum())

    @property
    def tbt_ms(self) -> float:
        """The mean time between tokens."""
        return self.ms / self.tokens

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps

    @property
    def error(self) -> float:
        """Standard error of `tokens_per_step`, as if the delays were independent."""
        delay = np.arange(len(self.delays))
        mean = delay @ self.delays / self.tokens
        variance = (delay - mean) ** 2 @ self.delays / self.tokens
        return float(self.tokens_per_step**2 * math.sqrt(variance / self.tokens))


class SimulatedPipeline:
    """The head's scheduler before stages that are times and texts: a `pipespec.head.step.Pipeline`.

    It runs on a clock that the machine drives: in each step a batch enters and another one's
    verdict arrives, with `in_flight` batches on their way (0: as many as stages), or as many as
    the scheduler has learnt. Prompts are one token, answers are random. With many requests, all of
    them are there the whole time. `rounds`: draft rounds per step at most, or "auto"; `max_rows`:
    see `SchedulerConfig`; `calibration`: of the draft's stated probabilities, which goes on; None:
    they are right. `on_token` is called for every token that is counted, in the order in which they
    arrive. Raises ConfigError.
    """

    def __init__(
        self,
        policy: SpeculationPolicy,
        machine: Machine,
        draft: DrawnDraft,
        rounds: Rounds,
        num_tokens: int,
        seed: int = 0,
        num_requests: int = 1,
        max_rows: int = 0,
        *,
        in_flight: int = 0,
        calibration: Calibration | None = None,
        on_token: OnToken = lambda arrival: None,
    ):
        check_rounds(rounds)
        check_whole("seed", seed, 0, MAX_SEED)
        check_whole("requests", num_requests, 1, MAX_REQUESTS)
        self.machine = machine
        self.on_token = on_token
        self.most_in_flight = in_flight or machine.num_stages
        self.in_flight = deque[int]()  # batches without a verdict, by step
        random = np.random.default_rng(seed)
        length = num_tokens if num_requests == 1 else AHEAD * num_tokens // num_requests
        self.texts = [
            random.integers(VOCABULARY, size=length + BEYOND).tolist() for _ in range(num_requests)
        ]
        for i, text in enumerate(self.texts):  # prompts differ, so that texts do
            text[0] = (self.texts[0][0] + i) % VOCABULARY
        self.now_ms = 0.0  # when this step began
        context_limit = len(self.texts[0]) + 1
        self.proposer: Proposer = SyntheticProposer(draft, self.texts, VOCABULARY, seed)
        if calibration is not None:
            self.proposer = CalibratedProposer(self.proposer, calibration)
        self.scheduler = Scheduler(
            SchedulerConfig(
                policy,
                num_stages=self.most_in_flight,
                rounds=rounds,
                prefill_chunk=1,
                context_limit=context_limit,
                max_num_seqs=num_requests,
                max_rows=max_rows,
                overlap=machine.overlap,
            )
        )
        self.step_ms = 0.0  # how long this step has lasted
        self.arriving: list[tuple[int, int, bool]] = []  # tokens: request, delay and hit
        self.rounds = 0  # of the draft, in this step
        self.reading: list[int] = []  # requests that had no token of their answer when it began
        # The step in which a node of a request was fed, by its id.
        self.fed_at = [np.zeros(1 << 12, np.int64) for _ in self.texts]
        for i, text in enumerate(self.texts):
            request = Request(i, tuple(text[:1]), max_new_tokens=len(text))
            self.scheduler.admission.add(request, lambda token: False, now=0)
        self.times = RowTimes()
        for curve in machine.stages:  # as the stages measure them before they begin
            for rows in profiled_sizes(policy.max_rows):
                self.times.add(rows, self.entering_ms(curve, rows))
        self.scheduler.update_stage_times(self.times.measured())
        self.result = Simulation(np.zeros(self.most_in_flight + 1, np.int64))

    def run(self, num_tokens: int) -> Simulation:
        while self.result.tokens < num_tokens:
            self.step()
        return self.result

    def step(self) -> Batch:
        """One step of the pipeline; what entered it."""
        batch = run_step(self.scheduler, self)
        self.now_ms += self.step_ms
        if not self.reading:
            self.result.steps += 1
            self.result.rows += len(batch)
            self.result.rounds += self.rounds
            self.result.ms += self.step_ms
        return batch

    def start_sequence(self, sequence: HeadSequence) -> None:
        """See `pipespec.head.step.Pipeline`, as for the other methods that `run_step` calls."""
        self.proposer.start_sequence(sequence.context)

    def begin_step(self) -> None:
        self.step_ms, self.rounds = 0.0, 0
        self.reading = [
            each.number for each in self.scheduler.admission.requests if not each.decoding
        ]

    def elapsed_ms(self) -> float:
        return self.step_ms

    def propose(self, work: ProposalBatch) -> tuple[Sequence[Proposal | None], float]:
        round_ms = self.machine.round_ms(sum(len(each.nodes) for each in work.requests))
        self.step_ms += round_ms
        self.rounds += 1
        return self.proposer.propose(work.requests, work.children), round_ms

    def receive_verdicts(self) -> None:
        """The draft sends no hidden states and its rounds end before the verdict arrives, so a slow
        draft hides the hops (PipeDec: max(T_draft, C T_c + T_t))."""
        rows, slots = self.live_rows()
        stages = self.machine.computed(rows), self.machine.computed(slots)
        for curve, count, read in zip(self.machine.stages, *stages, strict=True):
            if count:
                self.times.add(count, self.entering_ms(curve, count), read)
        if self.scheduler.step % LEARNED_EVERY == 0:
            self.scheduler.update_stage_times(self.times.measured())
        while len(self.in_flight) >= len(rows):
            self.apply_verdicts(self.in_flight.popleft())
        self.step_ms = max(self.batch_ms(rows), self.step_ms)
        for request, delay, hit in self.arriving:
            self.on_token(TokenArrival(request, self.now_ms + self.step_ms, delay, hit))
        self.arriving.clear()

    def entering_ms(self, curve: TimeCurve, rows: int) -> float:
        """What the head measures of a stage, with its link, which a running head learns from whole
        steps."""
        return self.machine.entering_ms(curve, rows, self.most_in_flight // self.machine.num_stages)

    def batch_ms(self, rows: Sequence[int]) -> float:
        """From one batch to the next, with so many rows in flight, the newest batch first."""
        return self.machine.batch_ms(rows)

    def drop_cancelled(self) -> None: ...

    def end_sequence(self, sequence: HeadSequence) -> None: ...

    def after_send(self) -> None: ...

    def send(self, batch: Batch) -> None:
        """Remember when the rows of a batch were fed."""
        self.in_flight.append(batch.step)
        owners = batch.rows[:, SEQUENCE]
        for request in dict.fromkeys(owners.tolist()):
            ids = batch.rows[owners == request, NODE]
            fed_at = self.fed_at[request]
            while ids.max() >= len(fed_at):
                fed_at = np.concatenate((fed_at, np.zeros_like(fed_at)))
            fed_at[ids] = batch.step
            self.fed_at[request] = fed_at

    def live_rows(self) -> tuple[list[int], list[int]]:
        """Live rows of the batch fed 1, 2, ... steps ago, of as many as should be in flight, and
        the KV slots that they read."""
        wanted = self.scheduler.stats.in_flight or self.most_in_flight
        rows = np.zeros(max(wanted, len(self.in_flight)) + 1, np.int64)
        slots = np.zeros_like(rows)
        for request, sequence in self.scheduler.admission.sequences.items():
            if sequence.prompt_left:
                continue
            tree = sequence.tree
            ages = self.scheduler.step - self.fed_at[request][tree.id[tree.fed]]
            here = np.bincount(ages, minlength=len(rows))
            rows += here
            slots += (here > 0) * len(sequence.context.tokens) + here
        return rows[1 : wanted + 1].tolist(), slots[1 : wanted + 1].tolist()

    def apply_verdicts(self, leaving: int) -> None:
        """The last stage has computed the batch of that step."""
        for request, sequence in list(self.scheduler.admission.sequences.items()):
            if not sequence.prompt_left:
                counts = self.reading in ([], [request])
                verdict = self.verdict(request, leaving, counts=counts)
                progress = self.scheduler.apply(verdict, now=0) if verdict.tokens else None
                if progress is not None:
                    self.proposer.accept_verdict(progress.accepted)

    def verdict(self, request: int, leaving: int, *, counts: bool) -> Verdict:
        """The last stage keeps drawing while the newest token is in the batch it has computed.

        `counts`: whether the tokens enter the result, as all other requests are past their first.
        """
        sequence = self.scheduler.admission.sequences[request]
        tree, base = sequence.tree, len(sequence.context.tokens)
        text, fed_at = self.texts[request], self.fed_at[request]
        now = self.scheduler.step
        tokens: list[int] = []
        node: int | None = ROOT
        entered = int(fed_at[tree.id[ROOT]]) if tree.fed[ROOT] else now
        while node is not None and entered == leaving:
            token = text[base + len(tokens)]
            tokens.append(token)
            node = tree.child(node, token)
            hit = node is not None and bool(tree.fed[node])
            entered = int(fed_at[tree.id[node]]) if hit else now
            if base + len(tokens) > 2 and counts:
                self.result.delays[min(entered - leaving, self.result.in_flight)] += 1
                self.result.hits += hit
                self.arriving.append((request, entered - leaving, hit))
        return Verdict(request, base, tuple(tokens))


def level_equation(hit_rate: float, num_stages: int) -> float:
    """Tokens per step if a token is either drafted in time or costs a refill."""
    return 1 / (hit_rate + (1 - hit_rate) * num_stages)


def simulate(
    policy: SpeculationPolicy,
    machine: Machine,
    accuracy: Accuracy,
    *,
    rounds: Rounds,
    num_tokens: int,
    **how: Any,
) -> Simulation:
    """Decode some `num_tokens` with the head's own scheduler; the stages count rows only. `how`:
    further arguments of `SimulatedPipeline`. With many requests the tokens are those of all."""
    check_whole("tokens", num_tokens, 1, MAX_TOKENS)
    return SimulatedPipeline(policy, machine, accuracy, rounds, num_tokens, **how).run(num_tokens)


def simulate_texts(
    policy: SpeculationPolicy,
    machine: Machine,
    texts: Iterable[TextRecord],
    *,
    rounds: Rounds,
    in_flight: int = 0,
) -> list[Simulation]:
    """Decode texts of which a draft was recorded, one after another, as `simulate` does.

    The head learns from one text to the next how sure the draft may be, as a running one does.
    """
    calibration = Calibration()
    found = []
    for text in texts:
        later = len(text.ranks) - 1  # the first token is not counted
        how: Any = {"in_flight": in_flight, "calibration": calibration}
        pipeline = SimulatedPipeline(policy, machine, text, rounds, later, **how)
        found.append(pipeline.run(later))
        pipeline.proposer.end_sequence(0)
    return found
