"""Many requests in one scheduler: whoever comes and goes, all of them are served."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipespec.core import (
    GUESS,
    KIND,
    LAST_DECIDED,
    MAX_OPENED_BYTES,
    NODE,
    PARENT,
    SEQUENCE,
    Request,
    Sampling,
    Verdict,
)
from pipespec.emulation import TimeCurve
from pipespec.head.feed.adaptive import Adaptive
from pipespec.head.feed.best_first import BestFirst
from pipespec.head.feed.level import Level
from pipespec.head.feed.policy import FeedPolicy
from pipespec.head.feed.root import Root
from pipespec.head.feed.static_tree import StaticTree
from pipespec.head.scheduler import Scheduler
from pipespec.head.source.protocol import Candidates
from pipespec.head.source.synthetic import Accuracy
from pipespec.head.tree import ROOT
from pipespec.head.work import DraftWork, SchedulerConfig
from pipespec.planning.simulation import Machine, simulate
from pipespec.row_times import Measured

NUM_STEPS = 3
MOST = 4  # requests that are open at once
ROWS = 12
POLICIES = [
    Root(),
    StaticTree([1, 2]),
    Level(4, 2),
    Level(2, 2, 2),
    BestFirst(8, 2),
    Adaptive(8, 2),
]


OTHER = "feed=other"


def name(policy: FeedPolicy) -> str:
    return type(policy).__name__


def candidates(work: DraftWork, rng: np.random.Generator) -> list[Candidates | None]:
    """Tokens 1, 2, .. below every node; now and then a prompt is still being read."""
    found: list[Candidates | None] = []
    for part in work.parts:
        tokens = np.tile(np.arange(1, work.children + 1), (len(part.nodes), 1))
        logps = np.log(rng.dirichlet(np.ones(work.children), len(part.nodes)))
        found.append(Candidates(part.nodes, tokens, logps) if rng.random() < 0.9 else None)
    return found


class Stages:
    """What the last stage has to decide: tokens follow a row that has passed the pipeline."""

    def __init__(self) -> None:
        self.entered: dict[tuple[int, int], int] = {}  # step by sequence and node

    def take(self, rows: np.ndarray, step: int) -> None:
        for row in rows.tolist():
            key = row[SEQUENCE], row[NODE]
            assert key not in self.entered, "fed twice"
            parent = row[SEQUENCE], row[PARENT]
            assert parent in self.entered or row[PARENT] == -1, "before its parent"
            self.entered[key] = step

    def has_passed(self, sequence: int, node: int, step: int) -> bool:
        return self.entered.get((sequence, node), step) <= step - NUM_STEPS


@given(
    st.sampled_from(POLICIES),
    st.integers(1, 3),
    st.sampled_from([2**62, 60, 24]),
    st.integers(0, 2),
    st.sampled_from([None, *POLICIES]),
    st.integers(0, 2**32 - 1),
)
def test_whoever_comes_and_goes_all_are_served_and_nothing_is_fed_twice(
    policy: FeedPolicy,
    rounds: int,
    num_slots: int,
    levels: int,
    other: FeedPolicy | None,
    seed: int,
):
    """Also where slots are short: one request alone takes up to 16 of them. Who has the least
    priority is opened first and put back last; of equal ones, who came first. If some name
    another policy, all that are open name the same."""
    rng = np.random.default_rng(seed)
    ways = {} if other is None else {OTHER: other}
    feeds = ["", *ways]
    on = Scheduler(
        SchedulerConfig(policy, NUM_STEPS, rounds, 3, 60, MOST, ROWS, num_slots, ways=ways)
    )
    stages, ends = Stages(), {}
    arriving = [
        Request(
            i,
            tuple(range(1, 1 + int(rng.integers(1, 9)))),
            int(rng.integers(1, 9)),
            priority=int(rng.integers(-levels, levels + 1)),
            feed=feeds[int(rng.integers(len(feeds)))],
        )
        for i in range(int(rng.integers(1, 9)))
    ]
    asked = len(arriving)
    known = set()  # sequences that the stages know
    for _ in range(600):
        while on.room and arriving and rng.random() < 0.5:
            on.add(arriving.pop(0), lambda token: False, 0)
        queue = sorted(each.request.place for each in on.waiting)
        for sequence in on.admit():
            assert sequence.prefilled == 0, "nothing is shared here"
            assert sequence.request.place == queue.pop(0)
            assert {each.request.feed for each in on.sequences.values()} == {on.feed}
        on.begin()
        while work := on.expansion(0.0):
            on.graft(work, candidates(work, rng), 1.0)
        for number, sequence in list(on.sequences.items()):
            tip = sequence.context.nodes[-1]
            if not sequence.prompt_left and stages.has_passed(number, tip, on.step):
                base = len(sequence.context.tokens)
                tokens = tuple(rng.integers(1, 4, size=int(rng.integers(1, 3))).tolist())
                first = tokens[: 1 + bool(stages_know(sequence, tokens[0], stages, on.step))]
                progress = on.apply(Verdict(number, base, first), now=0)
                if progress is not None and progress.reason:
                    assert progress.sequence.request.id not in ends, "it ends once"
                    ends[progress.sequence.request.id] = progress.reason
        if on.requests and rng.random() < 0.05:
            request = on.requests[int(rng.integers(len(on.requests)))].request.id
            assert on.cancel(request) is not None and on.cancel(request) is None
            ends[request] = "cancelled"
        on.heard(0.0, 1.0)
        open_ = sorted(each.request.place for each in on.sequences.values())
        for sequence in on.make_room():
            assert sequence in on.waiting
            assert sequence.request.place == open_.pop()
        oldest = min(
            (
                each
                for each in on.sequences.values()
                if not each.prompt_left and not each.tree.fed[ROOT]
            ),
            key=lambda each: each.waits_since,
            default=None,
        )
        while isinstance(batch := on.next_batch(0.0), DraftWork):
            on.graft(batch, candidates(batch, rng), 1.0)
        on.end(1.0)
        assert len(batch) <= ROWS
        assert on.free_slots >= 0, "slots are never over-committed"
        if oldest is not None and not on.config.policy_of(on.feed).whole:
            assert oldest.tree.fed[ROOT], "the root that has waited longest is always fed"
        owners = batch.rows[:, SEQUENCE].tolist()
        assert owners == sorted(owners, key=owners.index), "a sequence's rows stand together"
        freed = {*batch.released, *batch.preempted}
        assert freed <= known, "nothing is freed that was not opened"
        opened = {opening.sequence for opening in batch.opened}
        assert not opened & known
        known = (known - freed) | opened
        assert set(owners) <= known
        stages.take(batch.rows, batch.step)
        for sequence in on.sequences.values():
            sequence.tree.check()
        requests = [each.request.id for each in on.requests]
        assert sorted([*requests, *ends, *(each.id for each in arriving)]) == list(range(asked))
        if not arriving and on.idle:
            break
    assert len(ends) == asked, "nobody starves"
    assert set(on.next_batch(0.0).released) == known


def stages_know(sequence, token: int, stages: Stages, step: int) -> bool:
    """Whether the token's own row has passed the pipeline too."""
    child = sequence.tree.child(ROOT, token)
    if child is None or not sequence.tree.fed[child]:
        return False
    return stages.has_passed(sequence.number, int(sequence.tree.id[child]), step)


def test_when_slots_run_short_guesses_are_shed_and_then_the_youngest_is_put_back():
    """Two requests with 10 tokens each to come, and room for 20."""
    on = Scheduler(SchedulerConfig(BestFirst(4, 2), NUM_STEPS, 2, 4, 30, 2, 4, 20))
    rng = np.random.default_rng(0)
    for i in range(2):
        on.add(Request(i, (1, 2), 12), lambda token: False, 0)
    stages = Stages()
    texts: dict[int, list[int]] = {0: [], 1: []}
    fed_guesses: list[tuple[int, int]] = []  # free slots before, guesses fed
    while not on.idle:
        list(on.admit())
        on.begin()
        while work := on.expansion(0.0):
            on.graft(work, candidates(work, rng), 1.0)
        for number, sequence in list(on.sequences.items()):
            if stages.has_passed(number, sequence.context.nodes[-1], on.step):
                base = len(sequence.context.tokens)
                progress = on.apply(Verdict(number, base, (3,)), now=0)
                texts[sequence.request.id].append(base)
                assert progress is not None
        on.heard(0.0, 1.0)
        (put_back,) = on.make_room() or [None]
        assert put_back is None or put_back.request.id == 1, "the youngest"
        free = on.free_slots - sum(each.prompt_left + 1 for each in on.sequences.values())
        batch = on.next_batch(0.0)
        roots = {each.context.nodes[-1] for each in on.sequences.values()}
        guesses = (batch.rows[:, KIND] == GUESS) & ~np.isin(batch.rows[:, NODE], list(roots))
        fed_guesses.append((free, int(np.count_nonzero(guesses))))
        stages.take(batch.rows, batch.step)
        on.end(1.0)
    assert on.preemptions >= 1
    assert all(count <= max(free, 0) for free, count in fed_guesses)
    assert any(free <= 0 for free, _ in fed_guesses)
    # Every position was decided once, before it was put back or after.
    assert texts == {0: list(range(2, 14)), 1: list(range(2, 14))}


def test_nobody_is_put_back_because_a_more_urgent_request_waits():
    on = Scheduler(SchedulerConfig(Root(), NUM_STEPS, 1, 4, 30, 3, 4, 20))
    add = partial(on.add, stops=lambda token: False, now=0)
    add(Request(0, tuple(range(9)), 4, priority=5))
    assert [each.request.id for each in on.admit()] == [0]
    add(Request(1, tuple(range(9)), 4, priority=7))
    add(Request(2, tuple(range(9)), 4, priority=-7))
    assert not list(on.admit()), "there are no slots for it"
    assert not on.make_room()
    assert [each.request.id for each in on.waiting] == [2, 1]
    on.cancel(0)
    assert [each.request.id for each in on.admit()] == [2]


def test_prompts_of_several_requests_share_a_step_and_take_turns():
    on = Scheduler(SchedulerConfig(Root(), NUM_STEPS, 1, 4, 60, MOST, ROWS))
    for i, length in enumerate((9, 2, 2)):
        on.add(Request(i, tuple(range(length)), 5), lambda token: False, 0)
    list(on.admit())
    ends = {}
    for step in range(5):
        on.begin()
        on.heard(0.0, 1.0)
        batch = on.next_batch(0.0)
        assert isinstance(batch.rows, np.ndarray) and len(batch) <= 4
        for row in batch.rows[batch.rows[:, KIND] == LAST_DECIDED].tolist():
            ends[row[SEQUENCE]] = step
    assert max(ends[1], ends[2]) <= 1, "short prompts do not wait for a long one"
    assert ends[0] == 3


def test_a_long_prompt_does_not_hold_up_a_running_answer():
    """A stage takes 10 ms, and half a millisecond for every row."""

    def gaps(prompt: int) -> tuple[list[float], int]:
        """The times of the steps in which the answer runs, and how many of them the prompt
        takes that comes in the midst of it."""
        on = Scheduler(SchedulerConfig(Root(), NUM_STEPS, 1, 256, 9000, 2, 256))
        on.add(Request(0, (1, 2), 4000), lambda token: False, 0)
        stages, times, in_flight = Stages(), [], [0] * NUM_STEPS
        read = 0
        for step in range(900):
            if step == 100 and prompt:
                on.add(Request(1, tuple(range(prompt)), 9), lambda token: False, 0)
            list(on.admit())
            on.begin()
            answer = on.sequences[0]
            if stages.has_passed(0, answer.context.nodes[-1], step):
                on.apply(Verdict(0, len(answer.context.tokens), (1,)), now=0)
            ms = 10 + 0.5 * max(in_flight)
            on.heard(0.0, ms)
            batch = on.next_batch(ms)
            in_flight = [*in_flight[1:], len(batch)]
            stages.take(batch.rows, step)
            on.end(ms)
            times.append(ms)
            read += bool((batch.rows[:, SEQUENCE] == 1).any())
        return times, read

    times, read = gaps(1000)
    assert max(times) <= 2 * float(np.median(gaps(0)[0]))
    assert read <= 160, "and the prompt is read as fast as that allows"


@pytest.mark.parametrize("policy", [Root(), BestFirst(16, 8)], ids=name)
def test_beside_a_long_prompt_no_step_gets_longer_and_an_answer_keeps_guessing(
    policy: FeedPolicy,
):
    """Eight RTX 3090 (`conf/pace/rtx3090_8.yaml`): 65 rows take twice as long as 64, and chunks
    have 128. The stages know that from their start."""
    curve = TimeCurve(((1, 37.8), (64, 37.8), (65, 75.6), (128, 75.6)))
    on = Scheduler(SchedulerConfig(policy, NUM_STEPS, 1, 128, 9000, 2, 128))
    on.learn(Measured(tuple((rows, curve.ms(rows)) for rows in (1, 4, 16, 64, 128))))
    on.add(Request(0, (1, 2), 4000), lambda token: False, 0)
    rng, stages, in_flight = np.random.default_rng(0), Stages(), [0] * NUM_STEPS
    read, beside = [], []  # rows of the prompt in each step, and of the answer
    for step in range(100):
        if step == 50:
            on.add(Request(1, tuple(range(2000)), 9), lambda token: False, 0)
        list(on.admit())
        on.begin()
        while work := on.expansion(0.0):
            on.graft(work, candidates(work, rng), 1.0)
        answer = on.sequences[0]
        if stages.has_passed(0, answer.context.nodes[-1], step):
            on.apply(Verdict(0, len(answer.context.tokens), (1,)), now=0)
        ms = max(map(curve.ms, in_flight))
        assert ms <= 37.8
        on.heard(0.0, ms)
        while isinstance(batch := on.next_batch(ms), DraftWork):
            on.graft(batch, candidates(batch, rng), 1.0)
        in_flight = [*in_flight[1:], len(batch)]
        stages.take(batch.rows, step)
        on.end(ms)
        if rows := int(np.count_nonzero(batch.rows[:, KIND] != GUESS)) if step >= 50 else 0:
            read.append(rows)
            beside.append(len(batch) - rows)
    guesses = 64 // 4 if policy.max_rows > 1 else 0
    assert sum(read) == 2000 and min(read[:-1]) >= 64 - 1 - guesses, "in nearly full batches"
    assert max(beside[:-1]) <= 1 + guesses
    assert sum(beside) >= len(beside) * guesses / 2


def test_no_more_are_asked_for_than_can_be_open():
    on = Scheduler(SchedulerConfig(Root(), NUM_STEPS, 1, 4, 60, 1, 0))
    on.add(Request(0, (1, 2), 5), lambda token: False, 0)
    assert on.room == 0
    list(on.admit())
    on.next_batch(0.0)
    on.cancel(0)
    assert on.idle and on.room == 1 and on.draining
    assert on.next_batch(0.0).released == (0,)


def test_as_many_are_opened_in_a_step_as_their_terms_fit_into_a_batch():
    on = Scheduler(SchedulerConfig(Root(), NUM_STEPS, 1, 64, 60, 64, 0))
    bias = tuple((100_000 + i, 0.123456789) for i in range(1000))
    for i in range(20):
        on.add(Request(i, (1, 2), 5, sampling=Sampling(logit_bias=bias)), lambda token: False, 0)
    fit = MAX_OPENED_BYTES // on.waiting[0].opening.num_bytes
    sizes = []
    for _ in range(4):
        list(on.admit())
        batch = on.next_batch(0.0)
        sizes.append(len(batch.opened))
        assert sum(opening.num_bytes for opening in batch.opened) <= MAX_OPENED_BYTES
    assert 10 < fit < 20 and sizes == [fit, 20 - fit, 0, 0]


@pytest.mark.parametrize(
    "policy", [pytest.param(Level(64, 16), marks=pytest.mark.long), BestFirst(64, 16)], ids=name
)
def test_guesses_taper_with_load_and_never_lose(policy: FeedPolicy):
    """Eight stages, SpecPipe's 1B draft: throughput as a multiple of batched plain decoding."""
    machine = Machine((TimeCurve(((1, 37.8),)),) * 8)
    accuracy = Accuracy({1: 0.74, 32: 0.99}, spread=0.8)

    def throughput(policy: FeedPolicy, requests: int, tokens: int) -> float:
        found = simulate(
            policy,
            machine,
            accuracy,
            rounds=2,
            num_tokens=tokens,
            num_requests=requests,
            max_rows=64,
        )
        return found.tokens / found.ms

    gains = [throughput(policy, n, 400) / throughput(Root(), n, 200 + 4 * n) for n in (1, 8, 64)]
    assert gains[0] > gains[1] > gains[2] > (3.0 if isinstance(policy, BestFirst) else 2.4)


POOR = Accuracy({1: 0.3, 32: 0.7}, 0.5)


def simulated(policy: FeedPolicy, machine: Machine, requests: int) -> float:
    """Throughput with a poor draft."""
    found = simulate(
        policy, machine, POOR, rounds=1, num_tokens=200, num_requests=requests, max_rows=64
    )
    return found.tokens / found.ms


@pytest.mark.parametrize("requests", [1, 4])
def test_where_rows_take_time_a_measured_cost_keeps_guesses_from_losing(requests: int):
    """64 rows take three times as long as one."""
    machine = Machine((TimeCurve(((1, 20.0), (64, 60.0))),) * 8, draft_ms=10.0)
    measured, stated = BestFirst(64, 8), BestFirst(64, 8, row_cost=0.0001)
    plain = simulated(Root(), machine, requests)
    assert simulated(measured, machine, requests) > plain > simulated(stated, machine, requests)


def test_where_every_row_takes_as_long_as_the_first_hardly_any_is_fed():
    machine = Machine((TimeCurve(((1, 37.8), (2, 75.6))),) * 8)
    measured, stated = BestFirst(64, 8), BestFirst(64, 8, row_cost=0.0001)
    assert simulated(measured, machine, 4) > 5 * simulated(stated, machine, 4)
