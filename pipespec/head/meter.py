"""Measurements of a running pipeline, from which the head makes the policies' state."""

from __future__ import annotations

from collections import deque

import numpy as np

from pipespec.head.feed.policy import PipelineState, Rate
from pipespec.row_times import MEMORY, UNKNOWN, Ema, Measured, Points, RowTimes, largest_like

# What it takes to hear a verdict that has been there.
AT_ONCE_MS = 0.3


class Meter:
    """What the head has seen of its pipeline. Holds no clock: durations are told to it.

    The two ways of decoding, with guesses and without, are measured separately, each anew
    when it is taken up again. A guessing pipeline needs `num_stages` steps to fill, which
    are left out.

    Args:
        num_stages: steps that a batch takes through the pipeline.
        rounds: draft rounds that a step has whatever time they take.
        max_rows: rows of a batch.
    """

    def __init__(self, num_stages: int, rounds: int = 1, max_rows: int = 1) -> None:
        self.num_stages = num_stages
        self._rounds = rounds
        # Tokens by rows, and KV slots that these read.
        self._offered = np.zeros((2, max_rows))
        self._offers = 0  # steps of which that is the mean
        # Rows of the batches on the way, and how many of them are of prompts.
        self._in_flight: deque[tuple[int, int]] = deque(maxlen=num_stages)
        self._quiet = Ema()  # ms per step without rows of prompts
        self._computed = (0, 0)  # the most of both that a stage computes in this step
        self._draft = Ema()
        self._drafting = Ema()  # ms of the rounds that a step has anyway
        self._drafted_ms = 0.0  # of this step
        self._verdict = Ema()
        self._by_rows = RowTimes()  # ms per step, by the largest batch on its way
        self._stages = UNKNOWN  # ms of a stage, as the stages have measured it
        self._beside = Ema()  # ms of a step beside its stages
        self._plain = Ema()  # ms per step
        self._plain_requests = Ema()  # that were decoding in such a step
        self._guessing = Ema()  # ms per step
        self._tokens = Ema()  # tokens per guessing step
        self._made_guesses = False
        self._streak = 0
        self.rounds = 0  # of this step
        self._last_round_ms = 0.0

    def begin(self) -> None:
        """A step begins, in which the stages compute what is on its way."""
        self._computed = (
            max((rows for rows, _ in self._in_flight), default=0),
            max((of_prompts for _, of_prompts in self._in_flight), default=0),
        )
        self.rounds = 0
        self._last_round_ms = self._drafted_ms = 0.0

    def round(self, ms: float, *, measured: bool = True) -> None:
        """The draft expanded the tree once, or (not measured) read a piece of the prompt."""
        self.rounds += 1
        self._last_round_ms = ms
        if self.rounds <= self._rounds:
            self._drafted_ms += ms
        if measured:
            self._draft.add(ms)

    def verdict(self, elapsed_ms: float, wait_ms: float, tokens: int) -> None:
        """The head began to wait when the step had lasted `elapsed_ms`; then the verdict came
        and decided so many tokens.

        One that decided none may have come at once, as the last stage had nothing to compute;
        the others still do, so it does not tell how long a step lasts.

        Who did not wait does not know how long the verdict had been there, only that the last
        round may have been one too many: the sample is where that round began.
        """
        if not tokens:
            return
        late = wait_ms < AT_ONCE_MS
        self._verdict.add(elapsed_ms - self._last_round_ms if late else elapsed_ms + wait_ms)

    def step(self, ms: float, tokens: int, *, guesses: bool, requests: int = 1) -> None:
        """A step in which so many requests were decoding (not reading prompts) lasted `ms` and
        decided `tokens`.

        `guesses`: the draft worked in this step, or guesses were in the pipeline.
        """
        if guesses != self._made_guesses or not self._streak:
            self._made_guesses, self._streak = guesses, 0
            if guesses:
                self._guessing, self._tokens = Ema(), Ema()
            else:
                self._plain, self._plain_requests = Ema(), Ema()
        self._streak += 1
        if not guesses:
            self._plain.add(ms)
            self._plain_requests.add(requests)
        elif self._streak > self.num_stages:
            self._guessing.add(ms)
            self._tokens.add(tokens)
        rows, of_prompts = self._computed
        if not of_prompts:
            self._quiet.add(ms)
        if rows:
            self._by_rows.add(rows, ms)
            if self._stages.points:
                self._beside.add(max(ms - _at(self._stages.whole(), rows), 0.0))

    def stages(self, measured: Measured) -> None:
        """How long the stages' own batches take, as they have measured it."""
        self._stages = measured

    def offered(self, chances: np.ndarray, slots: np.ndarray) -> None:
        """Rows that were offered in this step, by their chances to lie on an accepted path,
        falling, and the KV slots that each reads beside those before it, `[rows]` both."""
        rows = np.zeros(self._offered.shape)
        for row, values in zip(rows, (chances, slots), strict=True):
            row[: len(values)] = values[: len(row)]
        self._offers += 1
        # A new array: states hold the old one.
        self._offered = self._offered + (np.cumsum(rows, 1) - self._offered) / min(
            self._offers, MEMORY
        )
        self._drafting.add(self._drafted_ms)

    def fed(self, rows: int, of_prompts: int = 0) -> None:
        """A batch of so many rows entered the pipeline, `of_prompts` of them of prompts."""
        self._in_flight.append((rows, of_prompts))

    def rows_within(self, stretch: float, roots: int) -> int | None:
        """The largest batch with which a step lasts at most `stretch` times as long as without
        rows of prompts, when so many roots are fed anyway; twice the largest seen, if that did;
        None: nothing was measured.
        """
        curve = self._curve(self._stages.whole())
        if self._quiet.value is None or not curve:
            return None
        most_ms = stretch * max(self._quiet.value, _at(curve, roots))
        fits = [point for point in curve if point[1] <= most_ms]
        if len(fits) == len(curve):
            return 2 * curve[-1][0]
        rows, ms = fits[-1] if fits else (0, 0.0)
        next_rows, next_ms = curve[len(fits)]
        between = int(rows + (next_rows - rows) * (most_ms - ms) / (next_ms - ms))
        # Where the time leaps it does so after a size, not between.
        return min(between, largest_like(rows)) if rows else between

    def state(self, step: int, *, end: int, elapsed_ms: float, requests: int = 1) -> PipelineState:
        """The state at this moment of a step."""
        return PipelineState(
            num_stages=self.num_stages,
            step=step,
            requests=requests,
            end=end,
            rounds=self.rounds,
            elapsed_ms=elapsed_ms,
            draft_ms=self._draft.value,
            verdict_ms=self._verdict.value,
            tokens_per_step=self._tokens.value,
            step_ms=self._curve(self._stages.points),
            slot_ms=self._stages.slot_ms,
            offered=self._offered[0] if self._offers else None,
            offered_slots=self._offered[1] if self._offers else None,
            drafting_ms=self._drafting.value or 0.0,
            plain=self._rate(self._plain, (self._plain_requests.value or 0) / self.num_stages),
            guessing=self._rate(self._guessing, self._tokens.value),
            made_guesses=self._made_guesses,
            streak=self._streak,
        )

    def _rate(self, step_ms: Ema, tokens_per_step: float | None) -> Rate | None:
        if step_ms.value is None or not tokens_per_step:
            return None
        return Rate(step_ms.value / tokens_per_step, step_ms.samples)

    def _curve(self, stages: Points) -> Points:
        """Step time by rows: as the stages know it, who see batches of more sizes, and what
        steps last beside; without word of them by the steps alone."""
        if not stages:
            return self._by_rows.points()
        beside = self._beside.value or 0.0
        return tuple((rows, ms + beside) for rows, ms in stages)


def _at(points: Points, rows: int) -> float:
    known, ms = np.array(points).T
    return float(np.interp(rows, known, ms))
