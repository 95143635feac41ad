"""The scheduler, driven by hand: what enters the pipeline for which verdicts."""

from collections import Counter
from random import Random

import numpy as np
import pytest

from pipespec.core import DRAFT, KIND, NODE, PARENT, POSITION, STEP_TOKENS, TOKEN, Request, Verdict
from pipespec.head.decoding_modes import BESIDE, BETWEEN
from pipespec.head.policies.best_first import BestFirst
from pipespec.head.policies.level import Level
from pipespec.head.policies.policy import SpeculationPolicy
from pipespec.head.policies.root import Root
from pipespec.head.proposer import Proposal
from pipespec.head.scheduler import Scheduler
from pipespec.head.scheduler_types import ProposalBatch, SchedulerConfig
from tests.helpers.proposers import small_policies

NUM_STEPS = 3
POLICIES = [*small_policies(), Level(4, 2, levels=2)]


def scheduler(policy: SpeculationPolicy, rounds: int = 1) -> Scheduler:
    config = SchedulerConfig(policy, NUM_STEPS, rounds, prefill_chunk=4, context_limit=500)
    return Scheduler(config)


def opened(on: Scheduler, length: int = 1, tokens: int = 50):
    sequence = on.admission.add(Request(7, tuple(range(length)), tokens), lambda token: False, 0)
    assert list(on.admit()) == [sequence]
    return sequence


def candidates(work: ProposalBatch) -> list[Proposal]:
    """Every node's guesses are the tokens 1, 2, ..., each half as likely as the one before."""
    found = []
    for each in work.requests:
        tokens = np.tile(np.arange(1, work.children + 1), (len(each.nodes), 1))
        found.append(Proposal(each.nodes, tokens, np.log(0.5) * tokens))
    return found


def step(on: Scheduler, *tokens: int):
    """One step in which the verdict on the open request holds these tokens."""
    on.begin_step()
    while work := on.next_expansion(0.0):
        on.add_proposals(work, candidates(work), 1.0)
    progress = None
    if tokens:
        base = len(on.admission.sequences[0].context.tokens)
        progress = on.apply(Verdict(0, base, tokens), now=on.step)
    on.end_verdicts(0.0, 1.0)
    while work := on.next_refill(plan := on.plan_batch(0.0)):
        on.add_proposals(work, candidates(work), 1.0)
    batch = on.next_batch(plan)
    on.end_step(1.0)
    return batch, progress


def test_hit_feeds_nothing_again_and_miss_feeds_the_token_at_once():
    on = scheduler(Level(8, 2))
    sequence = opened(on)
    for _ in range(NUM_STEPS):
        step(on)
    batch, progress = step(on, 1)
    assert progress is not None and progress.accepted.tokens == (1,) and progress.reason is None
    assert sequence.hits == 1
    batch, _ = step(on, 9)  # nobody guesses 9
    assert sequence.hits == 1
    assert batch.rows[:, TOKEN].tolist() == [9]
    assert batch.rows[0, PARENT] == sequence.context.nodes[-2]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_counts_equal_the_rows_fed_and_tokens_decided(policy: SpeculationPolicy):
    """Against a list of when each node was fed, kept beside it."""
    on = scheduler(policy, rounds=2)
    sequence = opened(on, length=10, tokens=60)
    fed_at: dict[int, int] = {}  # of each node, how deep it stood
    fed, hits, sizes = Counter[int](), Counter[int](), Counter[float]()
    chance = Random(4)
    while True:
        tokens = [chance.choice([1, 1, 1, 2, 9]) for _ in range(chance.randrange(3))]
        tokens = tokens if sequence.prefilled == 10 else []
        batch, progress = step(on, *tokens)
        accepted = len(progress.accepted.tokens) if progress else 0
        for node in sequence.context.nodes[len(sequence.context.nodes) - accepted :]:
            hits[fed_at.get(node, 0)] += 1
        root = len(sequence.context.tokens) - 1
        guesses = batch.rows[batch.rows[:, KIND] == DRAFT]
        for node, position in zip(guesses[:, NODE], guesses[:, POSITION], strict=True):
            fed_at[int(node)] = int(position) - root
            fed[int(position) - root] += 1
        done = len(batch) - len(guesses) + accepted
        if len(batch) or done:
            sizes[next(most for most in STEP_TOKENS if done <= most)] += 1
        if progress and progress.reason:
            break
    counts = on.counts()

    def labelled(name: str) -> dict[float, int]:
        found = (key.partition("/") for key in counts)
        return {
            float(label): counts[f"{k}/{label}"] for k, _, label in found if k == name and label
        }

    assert labelled("fed") == fed
    assert labelled("step_tokens") == sizes
    assert (counts["root_rows"], counts["draft_rows"]) == (fed[0], sum(fed.values()) - fed[0])
    assert (counts["prompt_rows"], counts["tokens"]) == (10, 60)
    assert labelled("hits") == hits
    assert counts["hits/0"] == 60 - sequence.hits


@pytest.mark.parametrize("mode", [BESIDE, BETWEEN])
def test_draft_reads_a_prompt_once_its_first_rows_are_on_their_way(mode: str):
    on = scheduler(BestFirst(8, 2))
    on.stats.mode = mode
    opened(on, length=10)
    on.begin_step()
    assert on.next_expansion(0.0) is None, "the stages would wait"
    on.next_batch(on.plan_batch(0.0))
    on.end_step(1.0)
    on.begin_step()
    assert on.next_expansion(0.0) is not None


def test_verdict_is_cut_at_the_end_of_the_text_and_the_request_is_freed():
    on = scheduler(Root())
    opened(on, tokens=3)
    step(on)
    batch, progress = step(on, 4, 5, 6, 7)
    assert progress.accepted.tokens == (4, 5, 6)
    assert progress.reason == "length"
    assert batch.finished == (0,) and not len(batch)
    assert on.admission.idle
    assert on.apply(Verdict(0, 4, (7,)), now=0) is None, "late word of a closed request"
    for _ in range(NUM_STEPS):
        batch, _ = step(on)
        assert batch.finished == ()


def test_has_work_is_true_exactly_if_a_batch_would_have_rows_or_changes():
    on = scheduler(Root())
    assert not on.has_work(0.0)
    opened(on, length=2, tokens=2)
    assert on.has_work(0.0), "a prompt"
    step(on)
    assert not on.has_work(0.0), "its only row is on its way"
    on.begin_step()
    on.apply(Verdict(0, 2, (9,)), now=0)
    assert on.has_work(0.0), "a root that was not fed"
    on.admission.cancel(7)
    assert on.has_work(0.0), "the stages must be told"


@pytest.mark.parametrize("requests", [1, 20])
def test_a_round_that_reads_much_text_says_nothing_about_others(requests: int):
    """The tokens that were decided since the last round are few in every request, not in all."""
    config = SchedulerConfig(
        *(BestFirst(64, 2), NUM_STEPS, 1),
        prefill_chunk=500,
        context_limit=500,
        max_num_seqs=requests,
        num_slots=10_000,
    )
    on = Scheduler(config)
    for i in range(requests):
        on.admission.add(Request(i, tuple(range(20)), 50), lambda token: False, 0)
    assert len(list(on.admit())) == requests
    for i in range(2 * NUM_STEPS):
        on.begin_step()
        while work := on.next_expansion(0.0):
            later = 4.0 if i > NUM_STEPS else 2.0  # behind verdicts
            on.add_proposals(work, candidates(work), later if on.totals.rounds else 500.0)
        for each in list(on.admission.sequences.values()) if i >= NUM_STEPS else ():
            on.apply(Verdict(each.number, len(each.context.tokens), (9, 9, 9)), now=i)
        on.end_verdicts(0.0, 1.0)
        plan = on.plan_batch(0.0)
        on.next_batch(plan)
        on.end_step(1.0)
    assert 2 < plan.state.draft_ms < 4
