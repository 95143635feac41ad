"""What a step takes by the rows in the pipeline, and which way of decoding is the fastest, learnt
from steps as they ran.

Stages measure their batches one by one. Where ranks share cores, links or a device, a step takes
longer than any of them, so here whole steps are measured. Everything is pure: durations are
arguments, and the same steps give the same choices. docs/policies.md has the rules.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pipespec.head.policies.draft_rounds import AUTO
from pipespec.timing.batch_times import Ema, Points, rising, size_bucket

# Steps that a size remembers; of their times, this share at either end counts as chance.
SAMPLES, TRIMMED = 32, 1 / 8
# Times by rows are computed anew after so many steps, and for a size with no more samples at once.
RENEWED_EVERY = 8
# What was known before the first step weighs as many steps; it counts alone again for a size that
# no step has had for so long.
PRIOR_WEIGHT, STALE = 2, 4096
# Steps after which a size is known well enough to need no trial; of so many times as many steps as
# a trial takes, one is a trial.
KNOWN, TRIAL_SHARE = 3, 2
# How often a size is tried at most, also if batches had no room for so many rows.
MOST_TRIALS = 2
# A trial has at most so many times the rows of the target size, or at least that share of them;
# more rows only if they seem to take at most so many times as long.
TRIAL_REACH, NO_DEARER = (2, 1 / 8), 1.25
# Steps that compare whether the sum of the rows in the pipeline explains times better than the
# largest batch, and the share by which it must.
COMPARED, BETTER = 16, 0.97
# A step that lasts longer than so many times what its rows take counts as one that does not.
OUTLIER = 4.0

# Draft rounds beside the stages, as many as fit, or one; as many, but one batch of a whole tree at
# a time in the pipeline; only while the stages wait; none.
BESIDE, ONE_BESIDE, ONE_TREE = "beside", "one_beside", "one_tree"
BETWEEN, PLAIN = "between", "plain"


class SizeTimes:
    """Milliseconds of a step by rows: a mean without outliers for each size, sizes being half
    powers of two, blended with what was known before."""

    def __init__(self, known: Points = (), error: Ema | None = None):
        """`known`: from an earlier run, of which the shape is taken over, not the speed."""
        self._known = known
        self._adopted = False  # whether that is of another way of decoding
        self._stages: Points = ()
        self._sizes: dict[int, deque[tuple[float, float]]] = {}
        self._means: dict[int, tuple[float, float]] = {}  # rows and milliseconds
        self._last: dict[int, int] = {}  # when a size was measured
        self._steps = 0
        self.error = error or Ema()  # of predictions, in ms
        self.points: Points = known

    def adopt(self, other: SizeTimes) -> None:
        """Take over the shape of other times, if nothing is known of these."""
        if not self._known and (other._known or other._means):
            self._known, self._adopted = other.measured, True
            self.points = self._points()

    def set_stage_times(self, stages: Points) -> None:
        """Take over what a stage takes: the first guess."""
        if stages != self._stages:
            self._stages = stages
            self.points = self._points()

    def add(self, rows: float, ms: float) -> None:
        """Add a step."""
        if self.points:
            predicted = self.at(rows)
            self.error.add(min(abs(ms - predicted), predicted))
        self._steps += 1
        size = _size(rows)
        samples = self._sizes.setdefault(size, deque(maxlen=SAMPLES))
        samples.append((rows, ms))
        self._last[size] = self._steps
        took = sorted(each for _, each in samples)
        cut = round(TRIMMED * len(took))
        kept = took[cut : len(took) - cut]
        mean_rows = sum(each for each, _ in samples) / len(samples)
        self._means[size] = mean_rows, sum(kept) / len(kept)
        for old in [each for each, last in self._last.items() if self._steps - last > STALE]:
            del self._sizes[old], self._means[old], self._last[old]
        # Half a millisecond, and one of many steps changes little.
        if len(samples) <= RENEWED_EVERY or self._steps % RENEWED_EVERY == 0:
            self.points = self._points()

    @property
    def measured(self) -> Points:
        """The times of sizes that this run or an earlier one has measured."""
        sizes = {*self._means, *(_size(rows) for rows, _ in self._known)}
        return tuple(point for point in self.points if _size(point[0]) in sizes)

    def at(self, rows: float) -> float:
        """Milliseconds of a step with so many rows."""
        known, ms = np.array(self.points).T
        return float(np.interp(rows, known, ms))

    def samples(self, rows: float) -> int:
        """Steps of about so many rows."""
        return len(self._sizes.get(_size(rows), ()))

    def is_known(self, rows: float) -> bool:
        """Whether steps of about so many rows were measured, in this run or an earlier one."""
        size = _size(rows)
        return self.samples(rows) >= KNOWN or any(_size(each) == size for each, _ in self._known)

    def _points(self) -> Points:
        """Rising times of all sizes that are known.

        Those of an earlier run are scaled by how fast the machine is now. To those of a stage, and
        of another way of decoding, what steps take longer is added.
        """
        means = sorted(self._means.values())
        known = self._known
        if known and means:
            before = np.interp([rows for rows, _ in means], *np.array(known).T)
            took = np.array([ms for _, ms in means])
            ratio = float(np.median(took / np.maximum(before, 1e-6)))
            more = float(np.median(took - before))
            if self._adopted:  # the rows cost what they did there
                known = tuple((rows, max(ms + more, ms * min(ratio, 1) / 2)) for rows, ms in known)
            else:
                known = tuple((rows, ms * ratio) for rows, ms in known)
        base = dict(known)
        sizes = {_size(rows) for rows in base}
        measured = sorted({**base, **dict(means)}.items())
        if self._stages:
            of_stage, stage_ms = np.array(self._stages).T
            at = [rows for rows, _ in measured]
            guess = np.interp(at, of_stage, stage_ms)
            took = np.array([ms for _, ms in measured])
            # Steps that are shorter than stages seemed say how much faster these are.
            faster, more = np.minimum(took / guess, 1), np.maximum(took - guess, 0)
            for rows, ms in self._stages:
                if not at:
                    base[rows] = ms
                elif _size(rows) not in sizes:
                    base[rows] = float(ms * np.interp(rows, at, faster) + np.interp(rows, at, more))
        points = []
        for size, (rows, ms) in self._means.items():
            samples = len(self._sizes[size])
            if base:
                prior = float(np.interp(rows, *np.array(sorted(base.items())).T))
                ms = (PRIOR_WEIGHT * prior + samples * ms) / (PRIOR_WEIGHT + samples)
            points.append((rows, max(ms, 1e-3), PRIOR_WEIGHT + samples))
        sizes = set(self._means)
        points += [
            (rows, ms, PRIOR_WEIGHT) for rows, ms in base.items() if _size(rows) not in sizes
        ]
        return rising(points)


def _size(rows: float) -> int:
    return round(2 * math.log2(max(rows, 1e-3)))


class StepTimes:
    """The times of steps by the rows in the pipeline.

    Where every stage has its own cores a step lasts as long as its largest batch takes; where they
    share them, as long as all rows together. Both are learnt, and the one that predicts better is
    used. In either, rows are those that entered, of which verdicts may have ruled out some.
    """

    def __init__(self, num_stages: int, stored: Mapping[str, Any] | None = None):
        self.num_stages = num_stages
        stored = stored or {}
        self._by_largest, self._by_mean = (
            SizeTimes(
                tuple((float(rows), float(ms)) for rows, ms in stored.get(name, ())),
                Ema(value=stored.get(f"{name}_error"), samples=COMPARED if stored else 0),
            )
            for name in ("largest", "mean")
        )

    def add(self, in_flight: Sequence[int], ms: float) -> None:
        """Add a step during which batches of so many rows were in the pipeline."""
        rows = sum(in_flight)
        if rows:
            if self.times.points:
                ms = min(ms, OUTLIER * self.times.at(self.rows_of(in_flight)))
            self._by_largest.add(max(in_flight), ms)
            if self.num_stages > 1:
                self._by_mean.add(rows / self.num_stages, ms)

    def set_stage_times(self, stages: Points) -> None:
        """Take over what a stage takes: the first guess."""
        self._by_largest.set_stage_times(stages)
        self._by_mean.set_stage_times(stages)

    def adopt(self, other: StepTimes) -> None:
        """Take over the shape of other times, where nothing is known of these."""
        self._by_largest.adopt(other._by_largest)
        self._by_mean.adopt(other._by_mean)
        if other.by_mean and not self._by_mean.error.samples:
            self._by_mean.error = replace(other._by_mean.error)
            self._by_largest.error = replace(other._by_largest.error)

    @property
    def by_mean(self) -> bool:
        """Whether times follow the mean of the batches in the pipeline, not the largest."""
        mean, largest = self._by_mean.error, self._by_largest.error
        if self.num_stages == 1 or min(mean.samples, largest.samples) < COMPARED:
            return False
        return (mean.value or 0.0) < BETTER * (largest.value or 0.0)

    @property
    def times(self) -> SizeTimes:
        """Those by which steps are predicted: of steps whose batches all have so many rows."""
        return self._by_mean if self.by_mean else self._by_largest

    def rows_of(self, in_flight: Sequence[int]) -> float:
        """By what `times` counts a step."""
        return sum(in_flight) / self.num_stages if self.by_mean else max(in_flight)

    def stored(self) -> dict[str, Any]:
        """What another run may begin with."""
        parts = {"largest": self._by_largest, "mean": self._by_mean}
        errors = {f"{name}_error": each.error.value for name, each in parts.items()}
        return {name: each.measured for name, each in parts.items()} | errors


class SizeTrials:
    """A little deliberate variation of the rows, while it is not known what near sizes take.

    One batch of a lone stage, in a longer pipeline all batches of a pass, has the size that is to
    be tried. It ends by itself: each size is tried as long as it is unknown, and no more than
    MOST_TRIALS times.
    """

    def __init__(self, num_stages: int):
        self.length = 1 if num_stages == 1 else num_stages + KNOWN
        self.pending = False  # whether sizes are to be tried
        self._steps = 0
        self._rows: int | None = None
        self._tried: dict[int, int] = {}

    def next_rows(self, times: SizeTimes, target: int, most: int) -> int | None:
        """The size of this step's batch; None: the best one."""
        up, down = TRIAL_REACH
        unknown = [
            rows
            for rows in (1 << power for power in range(most.bit_length()))
            if down * target <= rows <= up * target
            and _size(rows) != _size(target)
            and (rows < target or times.at(rows) <= NO_DEARER * times.at(target))
            and not times.is_known(rows)
            and self._tried.get(rows, 0) < MOST_TRIALS
        ]
        self.pending = bool(unknown)
        self._steps += 1
        turn = self._steps % (TRIAL_SHARE * self.length)
        if turn == 0:
            self._rows = min(
                unknown, key=lambda rows: (self._tried.get(rows, 0), -rows), default=None
            )
            if self._rows is not None:
                self._tried[self._rows] = self._tried.get(self._rows, 0) + 1
        return self._rows if turn < self.length else None


# --- ways of decoding -----------------------------------------------------------------------------

# Pipeline lengths, of LEAST_STEPS at least in all, for which speculation and plain decoding are
# measured at a time.
TRIAL, PLAIN_TRIAL, LEAST_STEPS = 4, 2, 6
# How often each way that does not lose clearly is measured before one is chosen; the pipeline
# lengths that its cost remembers, and the share of it that is kept when it is measured anew.
BLOCKS, REMEMBERED, RENEWED = 2, 64, 0.25
# A way that has lost what so many tokens take by the fastest one is not measured any longer; until
# one was measured, that takes so many times what the stages need for a plain token.
MOST_LOST, GUESSED = 3, 2
LEAST_LENGTHS = 2  # for which it is measured in any case
# Costs that differ by more differ clearly; and speculation with less than this share of what the
# stages need for a plain token, which is not measured then, is surely faster.
CLEARLY, SURELY = 1.4, 0.7
# Another way than the best is tried again after so many pipeline lengths for each 100 % by which it
# loses, which takes some 2 % of the time; after no fewer and no more than these; twice as many each
# time that it loses again.
PATIENCE, LEAST_WAIT, MOST_WAIT = 400, 16, 2048


@dataclass(slots=True)
class Cost:
    """Milliseconds and tokens of the last steps of one way, falling by age."""

    ms: float = 0.0
    tokens: float = 0.0
    blocks: int = 0
    losses: int = 0  # times in a row that it was tried again and lost
    rows: float = 0.0  # the target size then

    def add(self, ms: float, tokens: float, rows: float, keep: float) -> None:
        self.ms, self.tokens = keep * self.ms + ms, keep * self.tokens + tokens
        self.rows = rows

    @property
    def per_token(self) -> float:
        return self.ms / self.tokens if self.tokens else math.inf


@dataclass
class Modes:
    """Which way of decoding is the fastest, measured: plainly, or with the draft beside the stages,
    or while they wait, or with one tree a pass.

    None predicts another: speculation decides more tokens in a step, but its steps are longer, a
    draft beside a stage may slow it, and stages that share cores gain nothing by computing at once,
    so that one larger tree a pass may be faster there than a full pipeline. So each is measured for
    some pipeline lengths, in turn, and the fastest is used; now and then another is measured again,
    as texts and machines change, the rarer the more it loses. Plain decoding is left out while
    speculation takes much less for a token than the stages alone need (`least_plain_ms`).
    """

    num_stages: int
    ways: tuple[str, ...]  # of speculation
    costs: dict[str, Cost] = field(default_factory=dict)
    mode: str = ""
    _held: int = 0  # steps since the mode began
    _left: int = 0  # until another is considered
    _block_ms: float = 0.0  # of the steps since the last one was
    _block_tokens: float = 0.0
    _since: dict[str, int] = field(default_factory=dict)  # steps since a way was measured

    def __post_init__(self) -> None:
        for way in (*self.ways, PLAIN):
            self.costs.setdefault(way, Cost())
            self._since[way] = 0
        self.mode = min(self.ways, key=lambda way: self.costs[way].per_token)
        self._left = self._block(self.mode)

    def add(self, ms: float, tokens: float, rows: float = 1, *, counts: bool = True) -> None:
        """A step of the present mode and a target of `rows` lasted `ms` and decided `tokens`; those
        in which a pipeline fills or drains, and those while sizes are tried (not `counts`), are
        left out."""
        self._held += 1
        self._left -= counts
        full = self._held > self.num_stages
        self._block_ms += full * ms
        self._block_tokens += full * tokens
        if counts and full:
            keep = 1 - 1 / (REMEMBERED * self.num_stages)
            self.costs[self.mode].add(ms, tokens, rows, keep)
        for way in self.costs:
            self._since[way] = 0 if way == self.mode else self._since[way] + 1

    def next_mode(self, least_plain_ms: float | None) -> str:
        """The mode of the next step."""
        if self._left > 0 and not self._loses(least_plain_ms):
            return self.mode
        cost = self.costs[self.mode]
        cost.blocks += 1
        if not cost.tokens:  # sizes were tried in all of its steps
            cost.ms, cost.tokens = self._block_ms, self._block_tokens
        self._block_ms = self._block_tokens = 0.0
        chosen = self._choose(least_plain_ms)
        if chosen != self.mode:
            self._held = 0
            cost = self.costs[chosen]
            cost.ms, cost.tokens = RENEWED * cost.ms, RENEWED * cost.tokens
        self.mode, self._left = chosen, self._block(chosen)
        return chosen

    def _loses(self, least_plain_ms: float | None) -> bool:
        """Whether this block has lost more time than it is worth to know the way better, seen at
        the end of a pipeline length, as a tree yields its tokens at once."""
        lengths, more = divmod(self._held - self.num_stages, self.num_stages)
        if more or lengths < LEAST_LENGTHS:
            return False
        fastest = min(cost.per_token for cost in self.costs.values())
        if not self.costs[PLAIN].blocks:
            fastest = min(fastest, GUESSED * (least_plain_ms or math.inf))
        return self._block_ms > fastest * (self._block_tokens + MOST_LOST)

    def _choose(self, least_plain_ms: float | None) -> str:
        among = {way: self.costs[way].per_token for way in self.ways}
        plain = self.costs[PLAIN]
        if plain.blocks or not least_plain_ms or min(among.values()) > SURELY * least_plain_ms:
            among[PLAIN] = plain.per_token
        best = min(among, key=among.__getitem__)
        new = [
            way
            for way, cost in among.items()
            if self.costs[way].blocks < (BLOCKS if cost <= CLEARLY * among[best] else 1)
        ]
        if new:
            return min(new, key=lambda way: self.costs[way].blocks)
        self.costs[best].losses = 0
        for way, per_token in among.items():
            cost = self.costs[way]
            wait = max(PATIENCE * (per_token / among[best] - 1), LEAST_WAIT)
            rows = sorted((cost.rows, self.costs[best].rows))
            comparable = not {PLAIN, ONE_TREE} & {way, best}  # their rows, with one another's
            if comparable and 2 * rows[0] < rows[1]:
                wait = LEAST_WAIT  # it was measured before the times by rows were known
            wait *= 2**cost.losses
            if way != best and self._since[way] >= min(wait, MOST_WAIT) * self.num_stages:
                cost.losses += 1
                return way
        return best

    def _block(self, way: str) -> int:
        """Steps for which a way is measured at a time."""
        lengths = PLAIN_TRIAL if way == PLAIN else TRIAL
        return self.num_stages + max(lengths * self.num_stages, LEAST_STEPS)


class LearntSteps:
    """All that is learnt of a machine's steps: their times with the draft beside the stages and
    without, sizes that are tried, and the fastest way of decoding, each for about so many requests.

    Args:
        num_stages: steps that a batch takes through the pipeline.
        overlap: whether the draft works beside the stages; None: as measured.
        rounds: draft rounds in a step, or "auto".
        stored: of an earlier run (`stored`).
    """

    def __init__(
        self,
        num_stages: int,
        overlap: bool | None = None,
        rounds: int | str = AUTO,
        stored: Mapping[str, Any] | None = None,
    ):
        stored = stored or {}
        self.num_stages = num_stages
        beside: tuple[str, ...] = (BESIDE,)
        if num_stages > 1:
            beside = (ONE_TREE, BESIDE, ONE_BESIDE) if rounds == AUTO else (ONE_TREE, BESIDE)
        # A lone stage mostly shares the draft's cores or GPU, and its verdict rules out what is
        # drafted beside it.
        either = (BETWEEN, *beside) if num_stages == 1 else (*beside, BETWEEN)
        self._ways = {None: either, True: beside, False: (BETWEEN,)}[overlap]
        self._times = {
            way: StepTimes(1 if way == ONE_TREE else num_stages, stored.get(way))
            for way in (BESIDE, ONE_BESIDE, ONE_TREE, BETWEEN)
        }
        self.trials = SizeTrials(num_stages)
        self._modes = {
            int(requests): self._new_modes(int(requests), costs)
            for requests, costs in stored.get("costs", {}).items()
        }
        self._requests = 1
        self.steps = 0

    @property
    def modes(self) -> Modes:
        """For about as many requests as are decoded now."""
        found = self._modes.get(self._requests)
        if found is None:
            found = self._modes[self._requests] = self._new_modes(self._requests, {})
        return found

    def _new_modes(self, requests: int, costs: Mapping[str, Any]) -> Modes:
        # The batches of several requests fill the pipeline.
        ways = tuple(way for way in self._ways if way != ONE_TREE or requests == 1)
        known = {way: Cost(*cost) for way, cost in costs.items() if way in (*ways, PLAIN)}
        return Modes(self.num_stages, ways, known)

    def set_stage_times(self, stages: Points) -> None:
        """Take over what a stage takes: the first guess."""
        for times in self._times.values():
            times.set_stage_times(stages)

    def next_mode(self, requests: int) -> str:
        """How the next step decodes so many requests."""
        self._requests = size_bucket(max(requests, 1))
        mode = self.modes.mode
        chosen = self.modes.next_mode(self.least_plain_ms(requests))
        if chosen != mode and PLAIN not in (mode, chosen):
            self._times[chosen].adopt(self._times[mode])
        return chosen

    def add(self, in_flight: Sequence[int], ms: float, rounds: int) -> None:
        """Add a step without prompts, with batches of so many rows in the pipeline, and so many
        draft rounds beside the stages."""
        self.steps += 1
        mode = self.modes.mode
        way = BESIDE if mode in (BETWEEN, PLAIN) else mode
        if not rounds and mode != ONE_TREE:
            way = BETWEEN
        self._times[way].add(in_flight, ms)

    @property
    def times(self) -> StepTimes:
        """Those in the present mode."""
        mode = self.modes.mode
        return self._times[BETWEEN if mode == PLAIN else mode]

    def least_plain_ms(self, requests: int) -> float | None:
        """What a token of so many requests takes without draft tokens; None: unknown."""
        step = self._times[BETWEEN]
        rows = requests / self.num_stages
        if not step.times.points:
            return None
        return step.times.at(rows if step.by_mean else max(rows, 1)) / rows

    def stored(self) -> dict[str, Any]:
        """What another run may begin with, as JSON can represent it."""
        costs = {
            str(requests): {
                way: [cost.ms, cost.tokens, min(cost.blocks, BLOCKS), cost.losses, cost.rows]
                for way, cost in modes.costs.items()
            }
            for requests, modes in self._modes.items()
        }
        return {way: times.stored() for way, times in self._times.items()} | {"costs": costs}
