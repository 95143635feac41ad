"""Measurements of a running pipeline, which give the policies their state. Above 350 lines, as all
averages are fed and read at one place."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf

import numpy as np

from pipespec.head.decoding_modes import (
    BESIDE,
    BETWEEN,
    ONE_TREE,
    PLAIN,
    LearntSteps,
    SpeculationTrials,
)
from pipespec.head.in_flight import MOST_IN_FLIGHT
from pipespec.head.policies.policy import (
    NO_PROBABILITIES,
    OfferedRows,
    PipelineState,
    TargetBatch,
)
from pipespec.head.row_budget import Selection
from pipespec.timing.batch_times import (
    MEMORY,
    NO_TIMES,
    BatchTimes,
    Ema,
    LinearTimes,
    Points,
    RowTimes,
    ms_at,
    size_bucket,
)

# The target size is at most so many times the largest that steps have had.
GROWTH = 4
# So many times what the head needs for a batch, or more, lies between two.
SPARE = 1.2
# A wait for a verdict that is no longer than this found it there.
AT_ONCE_MS = 0.3
# Rounds after which the head waits for a verdict for this share of their time delay nothing.
SLACK = 0.2


@dataclass(slots=True)
class _ThisStep:
    """What the present step has had so far; `computed` is what was in the pipeline when it began,
    as `StepStats._in_flight`."""

    computed: list[tuple[int, int]] = field(default_factory=list)
    rounds: int = 0
    rounds_beside: int = 0  # before the verdict
    reads: bool = False  # whether the draft read text in one of them
    last_round_ms: float = 0.0
    beside_ms: float = 0.0  # of rounds before the verdict
    drafted_ms: float = 0.0  # of the rounds that every step has
    delaying_ms: float = 0.0  # of rounds after the verdict
    waited_ms: float = 0.0  # for it
    verdict_received: bool = False
    most_rows: float = inf  # of its batch, below the target size, as the cost of more is unknown
    grows: bool = False  # whether it has that many
    # Of batches whose verdicts came: ms since they were sent, and the rows then in flight by batch.
    passes: list[tuple[float, list[int]]] = field(default_factory=list)
    rows: int = field(init=False)  # of the largest batch, which a stage computes
    prompt_rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.rows = max((rows for rows, _ in self.computed), default=0)
        self.prompt_rows = max((prompt_rows for _, prompt_rows in self.computed), default=0)


class StepStats:
    """Averages over the steps of a pipeline, fed by what happens in each. Holds no clock: durations
    are arguments.

    Args:
        rounds: draft rounds that every step has, however long they take.
        learnt: where whole steps are measured; None: times are those of stages, which are stated.
    """

    def __init__(
        self,
        num_stages: int,
        rounds: int = 1,
        max_rows: int = 1,
        *,
        overlap: bool = True,
        learnt: LearntSteps | None = None,
    ) -> None:
        self._num_stages = num_stages
        self._rounds = rounds
        self._learnt = learnt
        # Batches that are to be in flight, as learnt; None: it is not learnt.
        self.in_flight = None if learnt is None else learnt.in_flight
        self._now = _ThisStep()
        self.mode = BESIDE if overlap else BETWEEN  # how this step decodes
        self._speculates: bool | None = None  # as learnt
        self._trial_rows: int | None = None
        self._target_rows = 1
        # Of `OfferedRows`: probabilities, certain rows, KV slots and presence, each by row.
        # By the batches in flight, as trees grow otherwise with each number of them.
        self._max_rows = max_rows
        self._offered = defaultdict[int, np.ndarray](lambda: np.zeros((4, max_rows)))
        self._fed, self._fed_per_answer = defaultdict[int, Ema](Ema), Ema()
        # Rows of the batches in the pipeline, and how many of them are of prompts.
        self._in_flight: deque[tuple[int, int]] = deque(maxlen=max(num_stages, MOST_IN_FLIGHT))
        self.without_prompts = Ema()  # ms per step without rows of prompts
        self._draft = LinearTimes()  # of a round, by the nodes that it expands
        self._drafting = Ema()  # ms of the rounds that every step has
        self._head = Ema()  # ms of a step in which the head neither drafts nor waits
        self._reading = Ema()  # ms for a token of text that the draft reads
        self._reads_ms = 0.0  # of rounds that have read a part of a prompt
        # By the batches in flight: ms until a verdict, and what of it is beyond the stages' own
        # time, while no draft round delays them.
        self._verdict, self._beside_stages = defaultdict[int, Ema](Ema), defaultdict[int, Ema](Ema)
        self.due_ms = inf  # from the start of a step until its batch should be sent
        self._undelayed_steps = 0  # in a row
        self._by_rows = RowTimes()  # ms per step, by the largest batch in the pipeline
        self._stages = NO_TIMES  # ms of a stage, as the stages have measured it
        self._overhead = Ema()  # ms of a step beyond its stages and the draft beside them
        # Each for about so many requests, of which others take another time for a token.
        self._trials = defaultdict[int, SpeculationTrials](lambda: SpeculationTrials(num_stages))
        self._children = NO_PROBABILITIES  # of candidates, averaged over so many proposals
        self._proposals = 0

    def begin_step(self) -> None:
        """A step begins; the stages compute the batches in the pipeline."""
        self._now = _ThisStep([*self._in_flight][-self.num_stages :])

    @property
    def num_stages(self) -> int:
        """Steps from a batch to its verdict, which is the number of batches in flight."""
        return self._num_stages if self.in_flight is None else self.in_flight

    @property
    def _is_deep(self) -> bool:
        """Whether more batches are to be in flight than there are stages."""
        return self.num_stages > self._num_stages

    @property
    def least_ms(self) -> float:
        """What the slower of a stage and the draft takes for a batch of one row; 0 if unknown."""
        stage_ms = _stage_ms(self._stages, 1) if self._stages.points else 0.0
        return max(stage_ms, self._draft.ms - self._draft.each_ms * (self._draft.count - 1))

    @property
    def batch_ms(self) -> float:
        """What the slower of a stage and the head takes for a batch that begins with a draft round,
        with time to spare; 0 if unknown."""
        return max(SPARE * (self._draft.ms + (self._head.value or 0.0)), self.least_ms)

    @property
    def rounds(self) -> int:
        """Draft rounds that this step has had."""
        return self._now.rounds

    @property
    def overlap(self) -> bool:
        """Whether they are made beside the stages in this step."""
        return self.mode != BETWEEN

    def choose_mode(self, requests: int, unread: int = 0) -> None:
        """Choose how this step decodes so many requests, by what was learnt of steps; the draft has
        not read so many tokens of their texts."""
        if self._learnt is not None:
            read_ms = (self._reading.value or 0.0) * unread
            self.mode = self._learnt.next_mode(requests, read_ms)
            self.in_flight = self._learnt.in_flight
            self._speculates = self.mode != PLAIN

    def choose_trial(self, target: TargetBatch | None) -> TargetBatch | None:
        """The target size, or another that this step tries, as its time is unknown."""
        self._trial_rows = None
        self._target_rows = 1 if target is None else target.rows
        if self._learnt is not None and target is not None and self._speculates is not False:
            known = self._learnt.times.times
            # The largest size grows step by step: what many rows cost must not be found out by
            # many seconds.
            largest = round(GROWTH * max([1, *(rows for rows, _ in known.measured)]))
            if target.rows > largest:
                self._now.most_rows = largest
                target = replace(target, rows=largest)
            self._trial_rows = self._learnt.trials.next_rows(known, target.rows, self._max_rows)
            if self._trial_rows is not None:
                return replace(target, rows=self._trial_rows)
        return target

    def add_round(
        self, ms: float, nodes: int = 1, unread: int = 0, *, measured: bool = True
    ) -> None:
        """A draft round expanded so many nodes, or (not measured) proposed nothing; it read so many
        tokens of text first, the last of them if it is measured. With any it says nothing about
        what others take."""
        now = self._now
        now.rounds += 1
        now.last_round_ms = ms
        now.reads |= unread > 0
        if now.rounds <= self._rounds:
            now.drafted_ms += ms
        if unread:
            self._reads_ms += ms
        if measured and unread:
            self._reading.add(self._reads_ms / unread)
            self._reads_ms = 0.0
        elif measured:
            self._draft.add(nodes, ms)
        if now.verdict_received:  # the stages wait for it
            self._undelayed_steps = 0
            now.delaying_ms += ms
        else:
            now.rounds_beside += 1
            now.beside_ms += ms

    def add_proposal(self, logps: np.ndarray) -> None:
        """Candidates have log-probabilities `[nodes, children]`, the best ones first."""
        if not logps.size:
            return
        found = np.exp(logps).mean(0)
        known, new = np.zeros((2, max(len(found), len(self._children))))
        known[: len(self._children)], new[: len(found)] = self._children, found
        self._proposals = min(self._proposals + 1, MEMORY)
        self._children = known + (new - known) / self._proposals

    def add_verdict(self, elapsed_ms: float, wait_ms: float, tokens: int) -> None:
        """The head began to wait when the step had lasted `elapsed_ms`; after `wait_ms` the verdict
        arrived and decided so many tokens. One without tokens may be early, so it is not measured.

        If the head did not have to wait, the last draft round may have been one too many: the
        sample is the moment when that round began. Rounds that last longer than the stages compute
        delay later verdicts, which would then seem to leave time for as many rounds. So what a
        verdict takes beyond the stages' own time is measured while no round does that.
        """
        stage_ms = self._computing_ms()
        self._now.verdict_received = True
        self._now.waited_ms += wait_ms
        slack = wait_ms >= SLACK * elapsed_ms
        delayed = stage_ms is None or (elapsed_ms > stage_ms and not slack)
        self._undelayed_steps = 0 if delayed else self._undelayed_steps + 1
        if not tokens:
            return
        if stage_ms is not None and self._undelayed_steps > self.num_stages:
            self._beside_stages[self.num_stages].add(max(elapsed_ms + wait_ms - stage_ms, 0.0))
        late = wait_ms < AT_ONCE_MS
        verdict = self._verdict[self.num_stages]
        verdict.add(elapsed_ms - self._now.last_round_ms if late else elapsed_ms + wait_ms)

    def add_pass(self, ms: float, batches: int) -> None:
        """A batch, one of so many in flight, got its verdict `ms` after it was sent."""
        if self._is_deep:
            self._now.passes.append((ms, [rows for rows, _ in [*self._in_flight][-batches:]]))

    def add_step(self, ms: float, tokens: int, *, speculating: bool, requests: int = 1) -> None:
        """A step in which so many requests were decoding (not reading prompts) lasted `ms` and
        decided `tokens`. `speculating`: the draft worked, or draft tokens were in the pipeline."""
        # Without draft tokens a request decides one token in each pass, unless batches are chosen
        # for themselves.
        counted = speculating or (self.num_stages == 1 and not self.overlap)
        self._trials[size_bucket(requests)].add(
            ms, tokens if counted else requests / self.num_stages, speculating=speculating
        )
        now = self._now
        self._head.add(max(ms - now.waited_ms - now.beside_ms - now.delaying_ms, 0.0))
        if not now.prompt_rows:
            self.without_prompts.add(ms)
        if self._learnt is not None and not now.prompt_rows:
            for computed, took_ms in self._rows_and_ms(ms):
                self._learnt.add(computed, took_ms, now.rounds_beside)
            if self._speculates or (self._speculates is not None and not speculating):
                trying = self._speculates and (now.grows or self._learnt.trials.pending)
                self._learnt.modes.add(ms, tokens, self._target_rows, counts=not trying)
        if now.rows:
            self._by_rows.add(now.rows, ms)
            if self._stages.points:
                stage_ms = ms_at(self._stages.with_slots(), now.rows)
                self._overhead.add(max(ms - max(stage_ms, now.beside_ms), 0.0))

    def _rows_and_ms(self, ms: float) -> Iterator[tuple[list[int], float]]:
        """What this step, which lasted `ms`, says of the rows in the pipeline and the time of a
        step with them.

        With more batches in flight than stages, steps are as long as the head makes them, or until
        there is a row to send; what rows cost shows in how long a batch is in flight.
        """
        now = self._now
        found = [([rows for rows, _ in now.computed], ms - now.delaying_ms)]
        if self._is_deep:
            found = [(rows, took_ms / self.num_stages) for took_ms, rows in now.passes]
        slots_ms = self._stages.slot_ms * self._stages.slots
        for rows, took_ms in found:
            yield rows, took_ms - min(slots_ms, took_ms / 2)

    def set_stage_times(self, measured: BatchTimes) -> None:
        self._stages = measured
        if self._learnt is not None:
            self._learnt.set_stage_times(measured.points, self._drafting.value or 0.0)

    def add_candidates(self, selection: Selection) -> None:
        """Count the rows that were offered and selected in this step."""
        offered, of_fed = self._offered[self.num_stages], self._fed[self.num_stages]
        rows = np.zeros_like(offered)
        rows[1, : selection.num_certain] = 1
        rows[3, : len(selection.probabilities)] = 1
        for i, values in ((0, selection.probabilities), (2, selection.kv_slots)):
            rows[i, : len(values)] = values[: rows.shape[1]]
        fed = sum(map(len, selection.nodes))
        of_fed.add(fed)
        self._now.grows = fed >= self._now.most_rows
        # A new array: states hold the old one.
        offered = offered + (rows - offered) / min(of_fed.samples, MEMORY)
        self._offered[self.num_stages] = offered
        if not self._now.reads:
            self._drafting.add(self._now.drafted_ms)

    @property
    def rows_per_answer(self) -> float:
        """Of each answer in a batch with rows of answers."""
        return self._fed_per_answer.value or 1.0

    def add_answers(self, rows: int, answers: int) -> None:
        """A batch has so many rows of so many answers, those of crowds left out."""
        if rows:
            self._fed_per_answer.add(rows / answers)

    def add_batch(self, rows: int, prompt_rows: int = 0) -> None:
        self._in_flight.append((rows, prompt_rows))

    def rows_within(self, stretch: float, roots: int, least_ms: float | None) -> int | None:
        """The largest batch which the stages compute in `stretch` times the time of so many roots,
        or of `least_ms`; or twice the largest measured one. None: nothing was measured."""
        curve = self._curve(self._stages.with_slots())
        if least_ms is None or not curve:
            return None
        return _rows_within(curve, stretch * max(least_ms, ms_at(curve, roots)))

    def rows_beside(self, stretch: float, rows: int) -> int | None:
        """The largest batch with which a step lasts `stretch` times as long as with `rows`, by
        whole steps where these are learnt, as ranks may share cores; else as `rows_within`."""
        if not (curve := self._learnt_points()):
            return self.rows_within(stretch, rows, 0.0)
        return _rows_within(curve, stretch * ms_at(curve, rows))

    def state(
        self,
        step: int,
        *,
        end: int,
        elapsed_ms: float,
        requests: int = 1,
        target: TargetBatch | None = None,
        most_held: int = 2**62,
    ) -> PipelineState:
        """The state at this moment of a step."""
        offered = None
        if (fed := self._fed[self.num_stages].value) is not None:
            probabilities, certain, kv_slots, present = self._offered[self.num_stages]
            offered = OfferedRows(probabilities, certain, kv_slots, fed, present)
        one_tree = self.mode == ONE_TREE
        steps_at_a_time = self.num_stages if one_tree else 1  # those of a pass count as one
        points = self._learnt_points() or self._curve(self._stages.points)
        if one_tree:
            points = tuple((rows, ms * self.num_stages) for rows, ms in points)
        rows = requests / self.num_stages
        trials, speculates = self._trials[size_bucket(requests)], self._speculates
        if speculates is None:
            known = bool(self._stages.points)
            least_ms = _stage_ms(self._stages, max(rows, 1)) / rows if known else None
            speculates = trials.speculates(least_ms)
        return PipelineState(
            num_stages=self.num_stages // steps_at_a_time,
            one_tree=one_tree,
            step=step,
            requests=requests,
            overlap=self.overlap,
            end=end,
            rounds=self._now.rounds,
            elapsed_ms=elapsed_ms,
            draft_ms=self._draft.ms if self._draft.samples else None,
            draft_nodes=self._draft.count,
            draft_node_ms=self._draft.each_ms,
            verdict_ms=self._verdict_ms(),
            tokens_per_step=trials.speculative.tokens.value,
            step_ms=points,
            by_mean=self._learnt is not None and self._learnt.times.by_mean,
            trial_rows=self._trial_rows,
            speculates=speculates,
            slot_ms=self._stages.slot_ms * steps_at_a_time,
            offered=offered,
            drafting_ms=self._drafting.value or 0.0,
            target=target,
            most_held=most_held,
            token_ms=trials.token_ms,
            child_probabilities=self._children,
        )

    def _learnt_points(self) -> Points:
        """What whole steps have taken by rows."""
        return () if self._learnt is None else self._learnt.times.times.points

    def _computing_ms(self) -> float | None:
        """What the stages need for the largest batch in the pipeline."""
        rows = self._now.rows
        return _stage_ms(self._stages, rows) if rows and self._stages.points else None

    def _verdict_ms(self) -> float | None:
        """From the start of a step until its verdict, if no draft round delays the stages."""
        stage_ms = self._computing_ms()
        verdict_ms = self._verdict[self.num_stages].value
        if verdict_ms is None or stage_ms is None:
            return verdict_ms if self.due_ms == inf else self.due_ms
        return min(
            verdict_ms, self.due_ms, stage_ms + (self._beside_stages[self.num_stages].value or 0.0)
        )

    def _curve(self, stages: Points) -> Points:
        """Step time by rows: that of the stages plus the overhead of a step; if the stages have
        measured nothing, that of the steps alone."""
        if not stages:
            return self._by_rows.points()
        beside = self._overhead.value or 0.0
        return tuple((rows, ms + beside) for rows, ms in stages)


@lru_cache(maxsize=8)  # asked several times per step, and measured once a second
def _stage_ms(stages: BatchTimes, rows: float) -> float:
    return ms_at(stages.with_slots(), rows)


def _rows_within(curve: Points, most_ms: float) -> int:
    """The largest batch that takes so long, or twice the largest measured one."""
    fits = [point for point in curve if point[1] <= most_ms]
    if len(fits) == len(curve):
        return 2 * round(curve[-1][0])
    rows, ms = fits[-1] if fits else (0, 0.0)
    next_rows, next_ms = curve[len(fits)]
    between = int(rows + (next_rows - rows) * (most_ms - ms) / (next_ms - ms))
    # Where the time jumps, it does so at the end of a size.
    return min(between, size_bucket(round(rows))) if rows else between
