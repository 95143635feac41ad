"""Many requests in one scheduler, which come and go at any step."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipespec.core import (
    DRAFT,
    KIND,
    LAST_COMMITTED,
    MAX_STARTED_BYTES,
    NODE,
    PARENT,
    SEQUENCE,
    Request,
    SamplingParams,
    Verdict,
)
from pipespec.extras.emulation.machine import TimeCurve
from pipespec.extras.emulation.synthetic_proposer import Accuracy
from pipespec.extras.plan.pipeline_times import Machine
from pipespec.extras.plan.simulation import simulate
from pipespec.head.policies.best_first import BestFirst
from pipespec.head.policies.level import Level
from pipespec.head.policies.policy import SpeculationPolicy
from pipespec.head.policies.root import Root
from pipespec.head.proposer import Proposal
from pipespec.head.scheduler import Scheduler
from pipespec.head.scheduler_types import ProposalBatch, SchedulerConfig
from pipespec.head.tree import ROOT
from pipespec.timing.batch_times import BatchTimes
from tests.helpers.proposers import small_policies
from tests.helpers.trees import check_tree

NUM_STEPS = 3
MOST = 4  # requests that are open at once
ROWS = 12
POLICIES = [*small_policies(), Level(2, 2), Level(2, 2, levels=2)]


OTHER = "policy=other"


def name(policy: SpeculationPolicy) -> str:
    return type(policy).__name__


def candidates(work: ProposalBatch, rng: np.random.Generator) -> list[Proposal | None]:
    """Tokens 1, 2, .. below every node; now and then a prompt is still being read."""
    found: list[Proposal | None] = []
    for each in work.requests:
        tokens = np.tile(np.arange(1, work.children + 1), (len(each.nodes), 1))
        logps = np.log(rng.dirichlet(np.ones(work.children), len(each.nodes)))
        found.append(Proposal(each.nodes, tokens, logps) if rng.random() < 0.9 else None)
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


@pytest.mark.slow
@given(
    st.sampled_from(POLICIES),
    st.integers(1, 3),
    st.sampled_from([2**62, 60, 24]),
    st.integers(0, 2),
    st.integers(1, 3),
    st.sampled_from([None, *POLICIES]),
    st.integers(0, 2**32 - 1),
)
def test_every_request_ends_and_no_row_is_fed_twice_while_requests_come_and_go(
    policy: SpeculationPolicy,
    rounds: int,
    num_slots: int,
    levels: int,
    tenants: int,
    other: SpeculationPolicy | None,
    seed: int,
):
    """Also where slots are short: one request alone takes up to 16 of them. Of one tenant, who has
    the least priority is opened first and put back last; of equal ones, who came first. If some
    name another policy, all that are open name the same. Of several tenants, a crowd's roots may
    wait for each other."""
    rng = np.random.default_rng(seed)
    ways = {} if other is None else {OTHER: other}
    feeds = ["", *ways]
    on = Scheduler(
        SchedulerConfig(
            policy, NUM_STEPS, rounds, 3, 60, MOST, ROWS, num_slots, request_policies=ways
        )
    )
    if tenants > 1:
        on.update_stage_times(BatchTimes(((1, 1.0), (2, 2.0), (ROWS, 12.0))))
    stages, ends = Stages(), {}
    arriving = [
        Request(
            i,
            tuple(range(1, 1 + int(rng.integers(1, 9)))),
            int(rng.integers(1, 9)),
            priority=int(rng.integers(-levels, levels + 1)),
            policy=feeds[int(rng.integers(len(feeds)))],
            tenant="abc"[int(rng.integers(1, tenants)) if i % 4 and tenants > 1 else 0],
        )
        for i in range(int(rng.integers(1, 9)))
    ]
    asked = len(arriving)
    known = set()  # sequences that the stages know
    for _ in range(600):
        while on.admission.room and arriving and rng.random() < 0.5:
            on.admission.add(arriving.pop(0), lambda token: False, 0)
        queue = sorted(each.request.queue_key for each in on.admission.waiting)
        for sequence in on.admit():
            assert sequence.prefilled == 0, "nothing is shared here"
            assert tenants > 1 or sequence.request.queue_key == queue.pop(0)
            assert {each.request.policy for each in on.admission.sequences.values()} == {
                on.admission.policy_name
            }
        on.begin_step()
        while work := on.next_expansion(0.0):
            on.add_proposals(work, candidates(work, rng), 1.0)
        for number, sequence in list(on.admission.sequences.items()):
            tip = sequence.context.nodes[-1]
            if not sequence.prompt_left and stages.has_passed(number, tip, on.step):
                base = len(sequence.context.tokens)
                tokens = tuple(rng.integers(1, 4, size=int(rng.integers(1, 3))).tolist())
                first = tokens[: 1 + bool(stages_know(sequence, tokens[0], stages, on.step))]
                progress = on.apply(Verdict(number, base, first), now=0)
                if progress is not None and progress.reason:
                    assert progress.sequence.request.id not in ends, "it ends once"
                    ends[progress.sequence.request.id] = progress.reason
        if on.admission.requests and rng.random() < 0.05:
            request = on.admission.requests[
                int(rng.integers(len(on.admission.requests)))
            ].request.id
            assert on.admission.cancel(request) is not None and on.admission.cancel(request) is None
            ends[request] = "cancelled"
        on.end_verdicts(0.0, 1.0)
        open_ = sorted(each.request.queue_key for each in on.admission.sequences.values())
        for sequence in on.admission.preempt():
            assert sequence in on.admission.waiting
            assert tenants > 1 or sequence.request.queue_key == open_.pop()
        oldest = min(
            (
                each
                for each in on.admission.sequences.values()
                if not each.prompt_left and not each.tree.fed[ROOT]
            ),
            key=lambda each: each.root_waits_since,
            default=None,
        )
        while work := on.next_refill(plan := on.plan_batch(0.0)):
            on.add_proposals(work, candidates(work, rng), 1.0)
        batch = on.next_batch(plan)
        on.end_step(1.0)
        assert len(batch) <= ROWS
        assert on.admission.free_slots >= 0, "slots are never over-committed"
        whole = on.config.policy_of(on.admission.policy_name).whole
        if oldest is not None and not whole and (tenants == 1 or num_slots == 2**62):
            assert oldest.tree.fed[ROOT], "the root that has waited longest is always fed"
        owners = batch.rows[:, SEQUENCE].tolist()
        assert owners == sorted(owners, key=owners.index), "a sequence's rows stand together"
        freed = {*batch.finished, *batch.preempted}
        assert freed <= known, "nothing is freed that was not opened"
        opened = {opening.sequence for opening in batch.started}
        assert not opened & known
        known = (known - freed) | opened
        assert set(owners) <= known
        stages.take(batch.rows, batch.step)
        for sequence in on.admission.sequences.values():
            check_tree(sequence.tree)
        requests = [each.request.id for each in on.admission.requests]
        assert sorted([*requests, *ends, *(each.id for each in arriving)]) == list(range(asked))
        if not arriving and on.admission.idle:
            break
    assert len(ends) == asked, "nobody starves"
    assert set(on.next_batch(on.plan_batch(0.0)).finished) == known


def stages_know(sequence, token: int, stages: Stages, step: int) -> bool:
    """Whether the token's own row has passed the pipeline too."""
    child = sequence.tree.child(ROOT, token)
    if child is None or not sequence.tree.fed[child]:
        return False
    return stages.has_passed(sequence.number, int(sequence.tree.id[child]), step)


def test_when_kv_slots_run_short_draft_tokens_are_shed_before_the_youngest_request_is_preempted():
    """Two requests with 10 tokens each to come, and room for 20."""
    on = Scheduler(SchedulerConfig(BestFirst(4, 2), NUM_STEPS, 2, 4, 30, 2, 4, 20))
    rng = np.random.default_rng(0)
    for i in range(2):
        on.admission.add(Request(i, (1, 2), 12), lambda token: False, 0)
    stages = Stages()
    texts: dict[int, list[int]] = {0: [], 1: []}
    fed_guesses: list[tuple[int, int]] = []  # free slots before, guesses fed
    while not on.admission.idle:
        list(on.admit())
        on.begin_step()
        while work := on.next_expansion(0.0):
            on.add_proposals(work, candidates(work, rng), 1.0)
        for number, sequence in list(on.admission.sequences.items()):
            if stages.has_passed(number, sequence.context.nodes[-1], on.step):
                base = len(sequence.context.tokens)
                progress = on.apply(Verdict(number, base, (3,)), now=0)
                texts[sequence.request.id].append(base)
                assert progress is not None
        on.end_verdicts(0.0, 1.0)
        (put_back,) = on.admission.preempt() or [None]
        assert put_back is None or put_back.request.id == 1, "the youngest"
        free = on.admission.free_slots - sum(
            each.prompt_left + 1 for each in on.admission.sequences.values()
        )
        batch = on.next_batch(on.plan_batch(0.0))
        roots = {each.context.nodes[-1] for each in on.admission.sequences.values()}
        guesses = (batch.rows[:, KIND] == DRAFT) & ~np.isin(batch.rows[:, NODE], list(roots))
        fed_guesses.append((free, int(np.count_nonzero(guesses))))
        stages.take(batch.rows, batch.step)
        on.end_step(1.0)
    assert on.admission.preemptions >= 1
    assert all(count <= max(free, 0) for free, count in fed_guesses)
    assert any(free <= 0 for free, _ in fed_guesses)
    # Every position was decided once, before it was put back or after.
    assert texts == {0: list(range(2, 14)), 1: list(range(2, 14))}


def test_only_a_more_urgent_request_preempts_a_running_one_for_its_kv_slots():
    on = Scheduler(SchedulerConfig(Root(), NUM_STEPS, 1, 4, 30, 3, 4, 20))
    add = partial(on.admission.add, stops=lambda token: False, now=0)
    add(Request(0, tuple(range(9)), 4, priority=5))
    assert [each.request.id for each in on.admit()] == [0]
    for number, priority, preempted in ((1, 7, []), (2, 5, []), (3, -7, [0])):
        add(Request(number, tuple(range(9)), 4, priority=priority))
        assert not list(on.admit()), "there are no slots for it"
        assert [each.request.id for each in on.admission.preempt()] == preempted
    assert [each.request.id for each in on.admission.waiting] == [3, 0, 2, 1]
    assert [each.request.id for each in on.admit()] == [3]


def test_prompts_of_several_requests_share_a_step_and_take_turns():
    on = Scheduler(SchedulerConfig(Root(), NUM_STEPS, 1, 4, 60, MOST, ROWS))
    for i, length in enumerate((9, 2, 2)):
        on.admission.add(Request(i, tuple(range(length)), 5), lambda token: False, 0)
    list(on.admit())
    ends = {}
    for step in range(5):
        on.begin_step()
        on.end_verdicts(0.0, 1.0)
        batch = on.next_batch(on.plan_batch(0.0))
        assert isinstance(batch.rows, np.ndarray) and len(batch) <= 4
        for row in batch.rows[batch.rows[:, KIND] == LAST_COMMITTED].tolist():
            ends[row[SEQUENCE]] = step
    assert max(ends[1], ends[2]) <= 1, "short prompts do not wait for a long one"
    assert ends[0] == 3


@pytest.mark.parametrize("policy", [Root(), BestFirst(16, 8)], ids=name)
def test_long_prompt_lengthens_no_step_and_leaves_rows_for_draft_tokens(policy: SpeculationPolicy):
    """Eight RTX 3090 (`conf/emulate/rtx3090_8.yaml`): 65 rows take twice as long as 64, and chunks
    have 128. The stages know that from their start."""
    curve = TimeCurve(((1, 37.8), (64, 37.8), (65, 75.6), (128, 75.6)))
    on = Scheduler(SchedulerConfig(policy, NUM_STEPS, 1, 128, 9000, 2, 128))
    on.update_stage_times(BatchTimes(tuple((rows, curve.ms(rows)) for rows in (1, 4, 16, 64, 128))))
    on.admission.add(Request(0, (1, 2), 4000), lambda token: False, 0)
    rng, stages, in_flight = np.random.default_rng(0), Stages(), [0] * NUM_STEPS
    read, beside = [], []  # rows of the prompt in each step, and of the answer
    for step in range(100):
        if step == 50:
            on.admission.add(Request(1, tuple(range(2000)), 9), lambda token: False, 0)
        list(on.admit())
        on.begin_step()
        while work := on.next_expansion(0.0):
            on.add_proposals(work, candidates(work, rng), 1.0)
        answer = on.admission.sequences[0]
        if stages.has_passed(0, answer.context.nodes[-1], step):
            on.apply(Verdict(0, len(answer.context.tokens), (1,)), now=0)
        ms = max(map(curve.ms, in_flight))
        assert ms <= 37.8
        on.end_verdicts(0.0, ms)
        while work := on.next_refill(plan := on.plan_batch(ms)):
            on.add_proposals(work, candidates(work, rng), 1.0)
        batch = on.next_batch(plan)
        in_flight = [*in_flight[1:], len(batch)]
        stages.take(batch.rows, step)
        on.end_step(ms)
        if rows := int(np.count_nonzero(batch.rows[:, KIND] != DRAFT)) if step >= 50 else 0:
            read.append(rows)
            beside.append(len(batch) - rows)
    guesses = 64 // 4 if policy.max_rows > 1 else 0
    assert sum(read) == 2000 and min(read[:-1]) >= 64 - 1 - guesses, "in nearly full batches"
    assert max(beside[:-1]) <= 1 + guesses
    assert sum(beside) >= len(beside) * guesses / 2


def test_a_step_starts_as_many_requests_as_their_parameters_fit_into_a_batch():
    on = Scheduler(SchedulerConfig(Root(), NUM_STEPS, 1, 64, 60, 64, 0))
    bias = tuple((100_000 + i, 0.123456789) for i in range(1000))
    for i in range(20):
        on.admission.add(
            Request(i, (1, 2), 5, sampling=SamplingParams(logit_bias=bias)), lambda token: False, 0
        )
    fit = MAX_STARTED_BYTES // on.admission.waiting[0].start.num_bytes
    sizes = []
    for _ in range(4):
        list(on.admit())
        batch = on.next_batch(on.plan_batch(0.0))
        sizes.append(len(batch.started))
        assert sum(opening.num_bytes for opening in batch.started) <= MAX_STARTED_BYTES
    assert 10 < fit < 20 and sizes == [fit, 20 - fit, 0, 0]


POOR = Accuracy({1: 0.3, 32: 0.7}, 0.5)


def simulated(policy: SpeculationPolicy, machine: Machine, requests: int) -> float:
    """Throughput with a poor draft."""
    found = simulate(
        policy, machine, POOR, rounds=1, num_tokens=200, num_requests=requests, max_rows=64
    )
    return found.tokens / found.ms


@pytest.mark.slow
def test_hardly_any_draft_token_is_fed_where_every_row_takes_as_long_as_the_first():
    machine = Machine((TimeCurve(((1, 37.8), (2, 75.6))),) * 8)
    measured, stated = BestFirst(64, 8), BestFirst(64, 8, row_cost=0.0001)
    assert simulated(measured, machine, 4) > 5 * simulated(stated, machine, 4)
