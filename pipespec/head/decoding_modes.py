"""Which way of decoding is the fastest, and whether that is with draft tokens; docs/policies.md has
the rules. Durations are arguments, and the same steps give the same choices.

`Modes` learns it from whole steps as they ran, `SpeculationTrials` from their costs beside the
times that stages state. Above 350 lines, as both learners decide one thing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipespec.head.policies.policy import AUTO
from pipespec.head.step_times import LearntTimes, SizeTrials
from pipespec.timing.batch_times import Ema, Points, size_bucket

# Draft rounds beside the stages, as many as fit, or one; as many, but one batch of a whole tree at
# a time in the pipeline; only while the stages wait; none.
BESIDE, ONE_BESIDE, ONE_TREE = "beside", "one_beside", "one_tree"
BETWEEN, PLAIN = "between", "plain"


def deep(in_flight: int) -> str:
    """As `BESIDE`, with so many batches in flight, more than there are stages, as links hold some
    of them."""
    return f"{BESIDE}_{in_flight}"


# Pipeline lengths, of LEAST_STEPS at least in all, for which speculation and plain decoding are
# measured at a time.
TRIAL, PLAIN_TRIAL, LEAST_STEPS = 4, 2, 6
# How often each way that does not lose clearly is measured before one is chosen; the pipeline
# lengths that its cost remembers, and the share of it that is kept when it is measured anew.
BLOCKS, REMEMBERED, RENEWED = 2, 64, 0.25
# A way that has lost what so many tokens take by the fastest one, and what a pipeline length takes,
# as after a miss, is not measured any longer; until one was measured, that takes so many times what
# the stages need for a plain token.
MOST_LOST, GUESSED = 3, 1.25
LEAST_LENGTHS = 2  # for which it is measured in any case
# Costs that differ by more differ clearly; and speculation with less than this share of what the
# stages need for a plain token, which is not measured then, is surely faster.
CLEARLY, SURELY = 1.4, 0.7
# Another way than the best is tried again after so many pipeline lengths for each 100 % by which it
# loses, which takes some 2 % of the time; after no fewer and no more than these; twice as many each
# time that it loses again.
PATIENCE, LEAST_WAIT, MOST_WAIT = 400, 16, 2048
# A way that drafts is measured again once what the draft has to read of the text first takes no
# more than this share of the time since it was measured last.
READING_SHARE = 0.02
# Pipeline lengths after which `SpeculationTrials` tries the other way.
RETRIED_AFTER = 64


class StepCost:
    """Averages over steps: milliseconds and tokens."""

    def __init__(self) -> None:
        self._ms, self.tokens = Ema(), Ema()

    def add(self, ms: float, tokens: float) -> None:
        self._ms.add(ms)
        self.tokens.add(tokens)

    @property
    def per_token(self) -> float | None:
        if self._ms.value is None or not self.tokens.value:
            return None
        return self._ms.value / self.tokens.value


class SpeculationTrials:
    """Whether to speculate: as long as a token takes no longer than the stages alone need for one
    without draft tokens.

    Otherwise both are measured, each anew when the head switches to it, as neither predicts the
    other, and the cheaper one is used. After RETRIED_AFTER pipeline lengths the other one is tried
    again, as the text may have changed: speculation for TRIAL pipeline lengths, plain decoding for
    one token.
    """

    def __init__(self, num_stages: int):
        self.num_stages = num_stages
        self.plain, self.speculative = StepCost(), StepCost()
        self.speculating = False  # the last step had draft tokens in the pipeline or proposed some
        self._streak = 0  # how many steps in a row, the last one included, agree in that

    def add(self, ms: float, tokens: float, *, speculating: bool) -> None:
        """A step lasted `ms` and decided `tokens`. Those in which a speculating pipeline fills are
        left out."""
        if speculating != self.speculating or not self._streak:
            self.speculating, self._streak = speculating, 0
            if speculating:
                self.speculative = StepCost()
            else:
                self.plain = StepCost()
        self._streak += 1
        if not speculating:
            self.plain.add(ms, tokens)
        elif self._streak > self.num_stages:
            self.speculative.add(ms, tokens)

    @property
    def token_ms(self) -> float | None:
        """What a token takes in the way of the last step; None: it has not been measured."""
        return (self.speculative if self.speculating else self.plain).per_token

    def speculates(self, least_plain_ms: float | None) -> bool:
        """Whether the next step does; `least_plain_ms`: what the stages alone need for a token."""
        if least_plain_ms is None:
            return True
        lengths, cost = self._streak / self.num_stages, self.speculative.per_token
        plain = self.plain.per_token
        pays = cost is not None and plain is not None and cost <= plain
        if self.speculating or not self._streak:
            if cost is None or cost <= least_plain_ms or lengths < TRIAL:
                return True
            return lengths < RETRIED_AFTER and pays
        return lengths >= 1 and (lengths >= RETRIED_AFTER or pays)


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
    # Batches in flight, in which pipeline lengths are counted, where they are not `num_stages`.
    lengths: Mapping[str, int] = field(default_factory=dict)
    _held: int = 0  # steps since the mode began
    _left: int = 0  # until another is considered
    _block_ms: float = 0.0  # of the steps since the last one was
    _block_tokens: float = 0.0
    _since: dict[str, float] = field(default_factory=dict)  # lengths since a way was measured
    _since_ms: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.add_ways(())
        known = (*self.ways, PLAIN) if self.costs[PLAIN].tokens else self.ways
        self.mode = min(known, key=lambda way: (self.costs[way].per_token, self.length(way)))
        self._left = self._block(self.mode)

    def add_ways(self, ways: tuple[str, ...]) -> None:
        """Measure these too, before others that were measured as often."""
        self.ways = ways + self.ways
        for way in (*self.ways, PLAIN):
            self.costs.setdefault(way, Cost())
            self._since.setdefault(way, 0.0)
            self._since_ms.setdefault(way, 0.0)

    def drop_ways(self, ways: tuple[str, ...]) -> None:
        """Decode in none of these any longer."""
        self.ways = tuple(way for way in self.ways if way not in ways)
        if self.mode in ways:
            self._left = 0

    def length(self, way: str) -> int:
        """Steps from a batch to its verdict."""
        return self.lengths.get(way, self.num_stages)

    def add(self, ms: float, tokens: float, rows: float = 1, *, counts: bool = True) -> None:
        """A step of the present mode and a target of `rows` lasted `ms` and decided `tokens`; those
        in which a pipeline fills or drains, and those while sizes are tried (not `counts`), are
        left out."""
        self._held += 1
        self._left -= counts
        length = self.length(self.mode)
        full = self._held > length
        self._block_ms += full * ms
        self._block_tokens += full * tokens
        if counts and full:
            keep = 1 - 1 / (REMEMBERED * length)
            self.costs[self.mode].add(ms, tokens, rows, keep)
        for way in self.costs:
            self._since[way] = 0.0 if way == self.mode else self._since[way] + 1 / length
            self._since_ms[way] = 0.0 if way == self.mode else self._since_ms[way] + ms

    def next_mode(self, least_plain_ms: float | None, read_ms: float = 0.0) -> str:
        """How the next step decodes; `read_ms`: what the draft would have to read of the texts
        takes."""
        if self._left > 0 and not self._loses(least_plain_ms):
            return self.mode
        cost = self.costs[self.mode]
        cost.blocks += 1
        if not cost.tokens:  # sizes were tried in all of its steps
            cost.ms, cost.tokens, cost.rows = self._block_ms, self._block_tokens, 0
        self._block_ms = self._block_tokens = 0.0
        chosen = self._choose(least_plain_ms, read_ms)
        if chosen != self.mode:
            self._held = 0
            cost = self.costs[chosen]
            cost.ms, cost.tokens = RENEWED * cost.ms, RENEWED * cost.tokens
        self.mode, self._left = chosen, self._block(chosen)
        return chosen

    def _loses(self, least_plain_ms: float | None) -> bool:
        """Whether this block has lost more time than it is worth to know the way better, seen at
        the end of a pipeline length, as a tree yields its tokens at once."""
        length = self.length(self.mode)
        lengths, more = divmod(self._held - length, length)
        if more or lengths < LEAST_LENGTHS:
            return False
        fastest = min(cost.per_token for cost in self.costs.values())
        if not self.costs[PLAIN].blocks:
            fastest = min(fastest, GUESSED * (least_plain_ms or math.inf))
        lost_ms = self._block_ms - fastest * self._block_tokens
        return lost_ms > max(MOST_LOST * fastest, self._block_ms / lengths)

    def _choose(self, least_plain_ms: float | None, read_ms: float) -> str:
        among = {way: self.costs[way].per_token for way in self.ways}
        plain = self.costs[PLAIN]
        if plain.blocks or not least_plain_ms or min(among.values()) > SURELY * least_plain_ms:
            among[PLAIN] = plain.per_token
        best = min(among, key=among.__getitem__)
        again = {
            way: cost
            for way, cost in among.items()
            if way == PLAIN
            or not self.costs[way].blocks
            or read_ms <= READING_SHARE * self._since_ms[way]
        }
        new = [
            way
            for way, cost in again.items()
            if self.costs[way].blocks < (BLOCKS if cost <= CLEARLY * among[best] else 1)
            and not self._seems_too_deep(way, among)
        ]
        if new:  # plain decoding first, as others end the sooner that lose against it
            return min(new, key=lambda way: (self.costs[way].blocks, way != PLAIN))
        self.costs[best].losses = 0
        for way, per_token in again.items():
            cost = self.costs[way]
            if self._seems_too_deep(way, among):
                continue
            wait = max(PATIENCE * (per_token / among[best] - 1), LEAST_WAIT)
            rows = sorted((cost.rows, self.costs[best].rows))
            comparable = not {PLAIN, ONE_TREE} & {way, best}  # their rows, with one another's
            if not cost.rows or (comparable and 2 * rows[0] < rows[1]):
                wait = LEAST_WAIT  # it was measured before the times by rows were known
            wait *= 2**cost.losses
            if way != best and self._since[way] >= min(wait, MOST_WAIT):
                cost.losses += 1
                return way
        return best

    def _seems_too_deep(self, way: str, among: Mapping[str, float]) -> bool:
        """Whether a way that was not measured yet has twice as many batches in flight as one that
        was not either, or that lost against half as many as it has."""
        half = self._half(way)
        quarter = self._half(half)
        if self.costs[way].blocks or half not in among:
            return False
        measured = [self.costs[each].blocks > 0 for each in (half, quarter) if each in among]
        return not all(measured) or among[half] > among.get(quarter, math.inf)

    def _half(self, way: str) -> str:
        """The way with half as many batches in flight, of one with more than there are stages, but
        for plain decoding; else ""."""
        in_flight = self.length(way)
        if way == PLAIN or in_flight <= self.num_stages:
            return ""
        return BESIDE if in_flight == 2 * self.num_stages else deep(in_flight // 2)

    def _block(self, way: str) -> int:
        """Steps for which a way is measured at a time."""
        lengths = PLAIN_TRIAL if way == PLAIN else TRIAL
        return self.length(way) + max(lengths * self.length(way), LEAST_STEPS)


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
        self._stored = stored = stored or {}
        self.num_stages = num_stages
        self._lengths = {ONE_TREE: 1, BESIDE: num_stages}
        self._stages: Points = ()
        beside: tuple[str, ...] = (BESIDE,)
        if num_stages > 1:
            beside = (ONE_TREE, BESIDE, ONE_BESIDE) if rounds == AUTO else (ONE_TREE, BESIDE)
        # A lone stage mostly shares the draft's cores or GPU, and its verdict rules out what is
        # drafted beside it.
        either = (BETWEEN, *beside) if num_stages == 1 else (*beside, BETWEEN)
        self._ways = {None: either, True: beside, False: (BETWEEN,)}[overlap]
        self._times = {
            way: LearntTimes(1 if way == ONE_TREE else num_stages, stored.get(way))
            for way in (BESIDE, ONE_BESIDE, ONE_TREE, BETWEEN)
        }
        self.trials = SizeTrials(num_stages)
        self._modes = {
            int(requests): self._new_modes(int(requests), costs)
            for requests, costs in stored.get("costs", {}).items()
        }
        self._requests = 1
        self._pass_ms = 0.0  # over long links
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
        return Modes(self.num_stages, ways, known, lengths=self._own_lengths(requests))

    def deepen(self, in_flight: int, pass_ms: float = 0.0) -> None:
        """Up to so many batches would keep the pipeline busy; each takes `pass_ms` at least until
        its verdict."""
        if in_flight > self.num_stages:  # mostly in links
            self._pass_ms = pass_ms
        if BESIDE not in self._ways:
            return
        more, ways = self.num_stages, []
        while (more := 2 * more) <= in_flight:
            if (way := deep(more)) not in self._times:
                ways.append(way)
                self._times[way] = LearntTimes(more, self._stored.get(way))
                self._times[way].set_stage_times(self._stages)
                self._lengths[way] = more
        if not ways:
            return
        # Where links are long, the draft takes nothing from stages that wait for them.
        dropped = (ONE_BESIDE, BETWEEN)
        self._ways = (*ways, *(each for each in self._ways if each not in dropped))
        for requests, modes in self._modes.items():
            known = self._stored.get("costs", {}).get(str(requests), {})
            modes.costs |= {way: Cost(*known[way]) for way in ways if way in known}
            modes.lengths = {**modes.lengths, **self._own_lengths(requests)}
            modes.add_ways(tuple(ways))
            modes.drop_ways(dropped)

    def _own_lengths(self, requests: int) -> dict[str, int]:
        """Batches in flight by way, where they are not `num_stages`. Of one request, plain decoding
        has one row in flight."""
        return {**self._lengths, PLAIN: 1 if requests == 1 else max(self._lengths.values())}

    @property
    def in_flight(self) -> int:
        """Batches that are to be in flight, by how this step decodes."""
        return self.modes.length(self.modes.mode)

    def set_stage_times(self, stages: Points, drafting_ms: float = 0.0) -> None:
        """Take over what a stage takes; a step with rounds beside it takes no less than these do,
        which does not add to the time of more rows."""
        self._stages = stages
        beside = tuple((rows, max(ms, drafting_ms)) for rows, ms in stages)
        for way, times in self._times.items():
            times.set_stage_times(stages if way in (ONE_TREE, BETWEEN) else beside)

    def next_mode(self, requests: int, read_ms: float = 0.0) -> str:
        """How the next step decodes so many requests (`Modes.next_mode`)."""
        self._requests = size_bucket(max(requests, 1))
        mode = self.modes.mode
        chosen = self.modes.next_mode(self.least_plain_ms(requests), read_ms)
        if chosen != mode and PLAIN not in (mode, chosen):
            self._times[chosen].adopt(self._times[mode])
        return chosen

    def add(self, in_flight: Sequence[int], ms: float, rounds: int) -> None:
        """Add a step without prompts, with batches of so many rows in the pipeline, and so many
        draft rounds beside the stages."""
        self.steps += 1
        mode = self.modes.mode
        way = BESIDE if mode in (BETWEEN, PLAIN) else mode
        if not rounds and way in (BESIDE, ONE_BESIDE):
            way = BETWEEN
        self._times[way].add(in_flight, ms)

    @property
    def times(self) -> LearntTimes:
        mode = self.modes.mode
        return self._times[BETWEEN if mode == PLAIN else mode]

    def least_plain_ms(self, requests: int) -> float | None:
        """What a token of so many requests takes without draft tokens; None: unknown."""
        step = self._times[BETWEEN]
        rows = requests / self.num_stages
        if not step.times.points:
            return None
        in_stages = step.times.at(rows if step.by_mean else max(rows, 1)) / rows
        return max(in_stages, self._pass_ms / requests)

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
