"""What a cluster will do, predicted before it is built: `pipespec plan`.

A pipeline of n stages decides a token when the row of the token before it leaves the last
stage, n steps after that row was fed. So with f(j) the step in which token j's row was fed, the
time between two tokens is f(j+1) - f(j) steps: the token's *delay*. It is never more than n, as
a token that no one guessed is fed when it is decided, and

    steps per token = sum over d from 0 to n of d * P(delay = d).

With one level per step (SpecPipe, PipeDec) a token was either guessed in time, delay 1, or not
at all, delay n. With h the share that was guessed this gives, in tokens per step,

    1 / (h + (1 - h) * n).

With `best_first` a token can also share its parent's batch (delay 0) or come late (2 to n - 1),
and no closed form is known: `simulate` drives the head's own scheduler (`pipespec.head.scheduler`)
against a synthetic draft of the stated accuracy. docs/planning.md has the derivation and its
limits. Everything here is pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipespec.core import NODE, SEQUENCE, Batch, Request, Verdict
from pipespec.emulation import TimeCurve, mean
from pipespec.errors import ConfigError
from pipespec.head.feed.policy import FeedPolicy
from pipespec.head.feed.rounds import check_rounds
from pipespec.head.scheduler import Scheduler
from pipespec.head.scoring import MID_ROWS, ScoreWork
from pipespec.head.source.protocol import Candidates
from pipespec.head.source.synthetic import Accuracy, SyntheticSource
from pipespec.head.tree import ROOT
from pipespec.head.work import DraftWork, SchedulerConfig
from pipespec.limits import MAX_MS, MAX_SEED, check_number, check_whole
from pipespec.row_times import RowTimes

# The simulated text is random, and longer than what is decoded, so that no guess meets its end.
VOCABULARY = 1 << 15
BEYOND = 512
MAX_TOKENS = 10**6
MAX_REQUESTS = 4096
# A request may come so many times as far as the mean of all before the others are done.
AHEAD = 4

# Steps between two words of the stages on how long batches take.
LEARNED_EVERY = 16

Rounds = int | str


@dataclass(frozen=True)
class Machine:
    """What the pipeline is made of.

    One time curve per stage; `hop_ms` from the end of a stage's computation to the start of the
    next one's, the verdict's way included; `draft_ms` of one draft round and `mid_ms` of a pass of
    the mid-size model, which works beside the head; `slot_ms` for each KV slot that a stage reads.
    Stages that form a group count as one, with the sum of their times.
    Raises ConfigError.
    """

    stages: tuple[TimeCurve, ...]
    hop_ms: float = 0.0
    draft_ms: float = 0.0
    slot_ms: float = 0.0
    mid_ms: float = 0.0

    def __post_init__(self) -> None:
        if not self.stages:
            raise ConfigError("A pipeline without stages cannot be planned; give 1 or more.")
        for name in ("hop_ms", "draft_ms", "slot_ms", "mid_ms"):
            check_number(name, getattr(self, name), 0, MAX_MS)

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def plain_tbt_ms(self) -> float:
        """Plain pipeline parallelism: one row goes through every stage."""
        return sum(curve.ms(1) + self.hop_ms for curve in self.stages)

    def shared(self, size: int, sum_ms: float) -> Machine:
        """The same devices, `size` of them computing the layers of so many stages together: each a
        part of every matrix. `sum_ms` is what adding up takes them for the layers of one of these
        stages. Raises ConfigError."""
        if size == 1:
            return self
        check_whole("tensor_parallel", size, 1, self.num_stages)
        check_number("sum_ms", sum_ms, 0, MAX_MS)
        if self.num_stages % size:
            raise ConfigError(
                f"{self.num_stages} stages cannot be made of groups of {size} devices; give a "
                "number that divides the stages."
            )
        groups = [self.stages[i : i + size] for i in range(0, self.num_stages, size)]
        stages = tuple(mean(group, size * sum_ms) for group in groups)
        return replace(self, stages=stages)

    def stage_ms(self, rows: Sequence[int], slots: Sequence[int]) -> list[float]:
        """What each stage computes in a step in which it has so many rows, which read so many KV
        slots."""
        return [
            curve.ms(count) + self.slot_ms * read
            for curve, count, read in zip(self.stages, rows, slots, strict=True)
        ]


def level_equation(hit_rate: float, num_stages: int) -> float:
    """Tokens per step where a token is either guessed in time or costs a refill."""
    return 1 / (hit_rate + (1 - hit_rate) * num_stages)


def specpipe_ms(hit_rate: float, stage_ms: Sequence[float]) -> float:
    """SpecPipe's expected time of a token, E(T) = max t_i(w) + (1 - P(w)) sum t_i(w).

    A miss costs a whole pipeline beyond its step, where in this schedule it costs that in all.
    """
    return max(stage_ms) + (1 - hit_rate) * sum(stage_ms)


@dataclass
class Simulation:
    """What happened between the first decided token and the last.

    `delays[d]` counts the tokens whose row was fed d steps after their parent's, `[stages + 1]`;
    `hits` those that had been fed before they were decided.
    """

    delays: np.ndarray
    hits: int = 0
    steps: int = 0
    rows: int = 0
    rounds: int = 0
    ms: float = 0.0

    @property
    def tokens(self) -> int:
        return int(self.delays.sum())

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


def simulate(
    policy: FeedPolicy,
    machine: Machine,
    accuracy: Accuracy,
    *,
    rounds: Rounds,
    num_tokens: int,
    seed: int = 0,
    num_requests: int = 1,
    max_rows: int = 0,
    mid: Accuracy | None = None,
) -> Simulation:
    """Decode some `num_tokens` with the head's own scheduler; the stages count rows only.

    `rounds`: draft rounds per step at most, or "auto"; `max_rows`: see `SchedulerConfig`; `mid`:
    the accuracy of a mid-size model that scores MID_ROWS nodes per pass, None: there is none. With
    many requests, all of them are there the whole time, and the tokens are those of all.
    """
    check_rounds(rounds)
    check_whole("tokens", num_tokens, 1, MAX_TOKENS)
    check_whole("seed", seed, 0, MAX_SEED)
    check_whole("requests", num_requests, 1, MAX_REQUESTS)
    pipeline = SimulatedPipeline(
        policy, machine, accuracy, rounds, num_tokens, seed, num_requests, max_rows, mid
    )
    while pipeline.result.tokens < num_tokens:
        pipeline.step()
    return pipeline.result


class SimulatedPipeline:
    """The head's scheduler before stages that are times and texts.

    It runs on a clock that the machine drives. Prompts are one token, answers are random.
    """

    def __init__(
        self,
        policy: FeedPolicy,
        machine: Machine,
        accuracy: Accuracy,
        rounds: Rounds,
        num_tokens: int,
        seed: int,
        num_requests: int = 1,
        max_rows: int = 0,
        mid: Accuracy | None = None,
    ):
        self.machine = machine
        random = np.random.default_rng(seed)
        length = num_tokens if num_requests == 1 else AHEAD * num_tokens // num_requests
        self.texts = [
            random.integers(VOCABULARY, size=length + BEYOND).tolist() for _ in range(num_requests)
        ]
        for i, text in enumerate(self.texts):  # texts are told apart by their prompts
            text[0] = (self.texts[0][0] + i) % VOCABULARY
        self.scheduler = Scheduler(
            SchedulerConfig(
                policy,
                num_steps=machine.num_stages,
                rounds=rounds,
                prefill_chunk=1,
                context_limit=len(self.texts[0]) + 1,
                max_num_seqs=num_requests,
                max_rows=max_rows,
                mid_rows=0 if mid is None else MID_ROWS,
            )
        )
        self.source = SyntheticSource(accuracy, self.texts, VOCABULARY, seed)
        # With one seed both go wrong at the same places.
        self.mid = SyntheticSource(mid or accuracy, self.texts, VOCABULARY, seed)
        # The pass under way, what it will say, and when.
        self.scoring: tuple[ScoreWork, list[Candidates | None], float] | None = None
        self.now_ms = 0.0  # when this step began
        # The step in which a node of a request was fed, by its id.
        self.fed_at = [np.zeros(1 << 12, np.int64) for _ in self.texts]
        for i, text in enumerate(self.texts):
            request = Request(i, tuple(text[:1]), max_new_tokens=len(text))
            self.scheduler.add(request, lambda token: False, now=0)
        self.times = RowTimes()
        for curve in machine.stages:  # as the stages measure them before they begin
            for rows in (1, policy.max_rows):
                self.times.add(rows, curve.ms(rows))
        self.scheduler.learn(self.times.measured())
        self.result = Simulation(np.zeros(machine.num_stages + 1, np.int64))

    def step(self) -> Batch:
        """One step of the pipeline; what entered it."""
        scheduler = self.scheduler
        for sequence in scheduler.admit():
            self.source.begin(sequence.context)
            self.mid.begin(sequence.context)
        waiting = [each.number for each in scheduler.requests if not each.decoding]
        scheduler.begin()
        drafted_ms = 0.0
        rounds = 0
        self.score(drafted_ms)
        while work := scheduler.expansion(drafted_ms):
            self.draft(work)
            drafted_ms += self.machine.draft_ms
            rounds += 1
            self.score(drafted_ms)
        in_flight = self.in_flight()
        stage_ms = self.machine.stage_ms(*in_flight)
        computed_ms = max(stage_ms)
        for ms, rows, slots in zip(stage_ms, *in_flight, strict=True):
            if rows:
                self.times.add(rows, ms, slots)
        if scheduler.step % LEARNED_EVERY == 0:
            scheduler.learn(self.times.measured())
        for request, sequence in list(scheduler.sequences.items()):
            if not sequence.prompt_left:
                verdict = self.verdict(request, counts=waiting in ([], [request]))
                if verdict.tokens:
                    scheduler.apply(verdict, now=0)
        # The draft sends no hidden states and its rounds end before the verdict is heard, so a
        # slow draft hides the hop (PipeDec: max(T_draft, C T_c + T_t)).
        heard_ms = computed_ms + (self.machine.hop_ms if computed_ms else 0.0)
        scheduler.heard(drafted_ms, max(heard_ms - drafted_ms, 0.0))
        scheduler.make_room()
        ms = max(heard_ms, drafted_ms)
        self.take_scores(ms)
        while isinstance(batch := scheduler.next_batch(ms), DraftWork):
            self.draft(batch)
            ms += self.machine.draft_ms
            rounds += 1
        self.enter(batch)
        scheduler.end(ms)
        self.now_ms += ms
        if not waiting:
            self.result.steps += 1
            self.result.rows += len(batch)
            self.result.rounds += rounds
            self.result.ms += ms
        return batch

    def draft(self, work: DraftWork) -> None:
        """One draft round."""
        candidates = self.source.expand(work.asked, work.children)
        self.scheduler.graft(work, candidates, self.machine.draft_ms)

    def score(self, elapsed_ms: float) -> None:
        """The mid-size model, at a moment of this step: what it has said is taken, and it is asked
        anew."""
        self.take_scores(elapsed_ms)
        if self.scoring is None and (work := self.scheduler.scoring()):
            found = self.mid.expand(work.asked, work.children)
            self.scoring = work, found, self.now_ms + elapsed_ms + self.machine.mid_ms

    def take_scores(self, elapsed_ms: float) -> None:
        if self.scoring is not None:
            work, found, due_ms = self.scoring
            if due_ms <= self.now_ms + elapsed_ms:
                self.scoring = None
                self.scheduler.rescore(work, found)

    def enter(self, batch: Batch) -> None:
        """Remember when the rows of a batch were fed."""
        owners = batch.rows[:, SEQUENCE]
        for request in dict.fromkeys(owners.tolist()):
            ids = batch.rows[owners == request, NODE]
            fed_at = self.fed_at[request]
            while ids.max() >= len(fed_at):
                fed_at = np.concatenate((fed_at, np.zeros_like(fed_at)))
            fed_at[ids] = batch.step
            self.fed_at[request] = fed_at

    def in_flight(self) -> tuple[list[int], list[int]]:
        """Live rows in each stage, of the batch fed 1, 2, ... n steps ago, and the KV slots that
        they read."""
        rows = np.zeros(self.machine.num_stages + 1, np.int64)
        slots = np.zeros_like(rows)
        for request, sequence in self.scheduler.sequences.items():
            if sequence.prompt_left:
                continue
            tree = sequence.tree
            ages = self.scheduler.step - self.fed_at[request][tree.id[tree.fed]]
            here = np.bincount(ages, minlength=len(rows))
            rows += here
            slots += (here > 0) * len(sequence.context.tokens) + here
        return rows[1:].tolist(), slots[1:].tolist()

    def verdict(self, request: int, *, counts: bool) -> Verdict:
        """The last stage keeps drawing while the newest token is in the batch it has computed.

        `counts`: whether the tokens enter the result, as all other requests are past their first.
        """
        sequence = self.scheduler.sequences[request]
        tree, base = sequence.tree, len(sequence.context.tokens)
        text, fed_at = self.texts[request], self.fed_at[request]
        now = self.scheduler.step
        leaving = now - self.machine.num_stages
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
                self.result.delays[entered - leaving] += 1
                self.result.hits += hit
        return Verdict(request, base, tuple(tokens))
