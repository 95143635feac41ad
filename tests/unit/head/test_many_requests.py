"""Many requests in one scheduler: whoever comes and goes, all of them are served."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipespec.core import KIND, LAST_DECIDED, NODE, PARENT, REQUEST, Request, Verdict
from pipespec.emulation import TimeCurve
from pipespec.head.feed.adaptive import Adaptive
from pipespec.head.feed.best_first import BestFirst
from pipespec.head.feed.level import Level
from pipespec.head.feed.policy import FeedPolicy
from pipespec.head.feed.root import Root
from pipespec.head.feed.static_tree import StaticTree
from pipespec.head.scheduler import DraftWork, Scheduler, SchedulerConfig
from pipespec.head.source.protocol import Candidates
from pipespec.head.source.synthetic import Accuracy
from pipespec.head.tree import ROOT
from pipespec.planning.simulation import Machine, simulate

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
        self.entered: dict[tuple[int, int], int] = {}  # step by request and node

    def take(self, rows: np.ndarray, step: int) -> None:
        for row in rows.tolist():
            key = row[REQUEST], row[NODE]
            assert key not in self.entered, "fed twice"
            parent = row[REQUEST], row[PARENT]
            assert parent in self.entered or row[PARENT] == -1, "before its parent"
            self.entered[key] = step

    def has_passed(self, request: int, node: int, step: int) -> bool:
        return self.entered.get((request, node), step) <= step - NUM_STEPS


@given(st.sampled_from(POLICIES), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_whoever_comes_and_goes_all_are_served_and_nothing_is_fed_twice(
    policy: FeedPolicy, rounds: int, seed: int
):
    rng = np.random.default_rng(seed)
    on = Scheduler(SchedulerConfig(policy, NUM_STEPS, rounds, 3, 60, MOST, ROWS))
    stages, held, ends = Stages(), set(), {}
    waiting = [
        Request(i, tuple(range(1, 1 + int(rng.integers(1, 9)))), int(rng.integers(1, 9)))
        for i in range(int(rng.integers(1, 9)))
    ]
    asked = len(waiting)
    for _ in range(300):
        while on.has_room and waiting and rng.random() < 0.5:
            request = waiting.pop(0)
            on.add(request, lambda token: False, 0)
            held.add(request.id)
        on.begin()
        while work := on.expansion(0.0):
            on.graft(work, candidates(work, rng), 1.0)
        for request, sequence in list(on.sequences.items()):
            tip = sequence.context.nodes[-1]
            if not sequence.prompt_left and stages.has_passed(request, tip, on.step):
                base = len(sequence.context.tokens)
                tokens = tuple(rng.integers(1, 4, size=int(rng.integers(1, 3))).tolist())
                first = tokens[: 1 + bool(stages_know(sequence, tokens[0], stages, on.step))]
                progress = on.apply(Verdict(request, base, first), now=0)
                if progress is not None and progress.reason:
                    ends[request] = progress.reason
        if on.sequences and rng.random() < 0.05:
            request = next(iter(on.sequences))
            on.cancel(request)
            ends[request] = "cancelled"
        on.heard(0.0, 1.0)
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
        if oldest is not None and not policy.whole:
            assert oldest.tree.fed[ROOT], "the root that has waited longest is always fed"
        owners = batch.rows[:, REQUEST].tolist()
        assert owners == sorted(owners, key=owners.index), "a request's rows stand together"
        assert set(owners) <= held
        stages.take(batch.rows, batch.step)
        held -= set(batch.released)
        for sequence in on.sequences.values():
            sequence.tree.check()
        if not waiting and on.idle:
            break
    assert len(ends) == asked
    assert on.next_batch(0.0).released == tuple(held)


def stages_know(sequence, token: int, stages: Stages, step: int) -> bool:
    """Whether the token's own row has passed the pipeline too."""
    child = sequence.tree.child(ROOT, token)
    if child is None or not sequence.tree.fed[child]:
        return False
    return stages.has_passed(sequence.request.id, int(sequence.tree.id[child]), step)


def test_prompts_of_several_requests_share_a_step_and_take_turns():
    on = Scheduler(SchedulerConfig(Root(), NUM_STEPS, 1, 4, 60, MOST, ROWS))
    for i, length in enumerate((9, 2, 2)):
        on.add(Request(i, tuple(range(length)), 5), lambda token: False, 0)
    ends = {}
    for step in range(5):
        on.begin()
        on.heard(0.0, 1.0)
        batch = on.next_batch(0.0)
        assert isinstance(batch.rows, np.ndarray) and len(batch) <= 4
        for row in batch.rows[batch.rows[:, KIND] == LAST_DECIDED].tolist():
            ends[row[REQUEST]] = step
    assert max(ends[1], ends[2]) <= 1, "short prompts do not wait for a long one"
    assert ends[0] == 3


def test_a_request_is_let_in_once_the_stages_are_told_of_one_that_has_ended():
    on = Scheduler(SchedulerConfig(Root(), NUM_STEPS, 1, 4, 60, 1, 0))
    on.add(Request(0, (1, 2), 5), lambda token: False, 0)
    assert not on.has_room
    on.cancel(0)
    assert on.idle and not on.has_room and on.draining
    assert on.next_batch(0.0).released == (0,)
    assert on.has_room


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
