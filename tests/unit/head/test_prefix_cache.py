"""Requests that begin alike share KV: the texts stay the same, and every slot has its owners."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipespec.core import Batch, Request, Sampling
from pipespec.head.feed.best_first import BestFirst
from pipespec.head.feed.level import Level
from pipespec.head.feed.policy import FeedPolicy
from pipespec.head.feed.root import Root
from pipespec.head.feed.static_tree import StaticTree
from pipespec.head.prefix_cache import Texts, as_key, num_common
from pipespec.head.source.parallel import Parallel
from pipespec.head.work import SchedulerConfig
from tests.helpers.toy_pipeline import VOCABULARY, ToyPipeline, text_of

NUM_STAGES = 3
POLICIES = [Root(), StaticTree([1, 2]), Level(4, 2), BestFirst(8, 2)]
tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=6)


def config(policy: FeedPolicy = POLICIES[-1], **changes: object) -> SchedulerConfig:
    fields = {"prefill_chunk": 8, "context_limit": 90, "max_num_seqs": 4, "max_rows": 16}
    fields |= {"num_slots": 200, "max_retained": 8}
    return SchedulerConfig(policy, NUM_STAGES, 1, **{**fields, **changes})


def pipeline(**changes: object) -> ToyPipeline:
    return ToyPipeline(config(**changes), free=False, draft_slots=200, answers={})


def run(toy: ToyPipeline, requests: Sequence[Request]) -> list[Batch]:
    """Add requests as there is room, until all are answered as the toy does; what was sent."""
    waiting, sent = list(requests), []
    while waiting or not toy.scheduler.idle:
        while waiting and toy.scheduler.room:
            toy.add(waiting.pop(0))
        sent.append(toy.lockstep())
    for request in requests:
        assert toy.answers[request.id] == text_of(request, NUM_STAGES)
    return sent


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(VOCABULARY, size=length).tolist())


PREFIX = prompt(0, 40)


# --- what is found ----------------------------------------------------------------------------


@given(st.lists(tokens, max_size=8), tokens)
def test_whoever_begins_most_alike_is_found_first(texts: list[list[int]], text: list[int]):
    index = Texts()
    for number, each in enumerate(texts):
        index.add(as_key(each), number)
    expected = [num_common(as_key(each), as_key(text)) for each in texts]
    found = {number: common for number, common, _ in index.alike(as_key(text))}
    assert found == {number: common for number, common in enumerate(expected) if common}
    assert list(found.values()) == sorted(found.values(), reverse=True)
    for number, each in enumerate(texts):
        index.remove(as_key(each), number)
    assert len(index) == 0


@given(tokens, tokens)
def test_common_tokens_are_counted(one: list[int], other: list[int]):
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    assert num_common(as_key(one), as_key(other)) == same


# --- requests one after another ---------------------------------------------------------------


def test_a_request_reads_what_an_earlier_one_has_not():
    toy = pipeline()
    run(toy, [Request(0, PREFIX, 4)])
    assert toy.rows_read == len(PREFIX)
    run(toy, [Request(1, PREFIX, 4)])
    assert toy.rows_read == len(PREFIX) + 1, "the last token's logits are needed"
    run(toy, [Request(2, PREFIX[:30] + prompt(1, 9), 4)])
    assert toy.rows_read == len(PREFIX) + 1 + 9
    assert toy.scheduler.cache.queries == 2 * len(PREFIX) + 39
    assert toy.scheduler.cache.hits == len(PREFIX) - 1 + 30


def test_a_conversation_that_goes_on_reads_what_is_new_and_replaces_what_it_continues():
    toy = pipeline()
    text: tuple[int, ...] = PREFIX[:20]
    for turn in range(3):
        before = toy.rows_read
        run(toy, [Request(turn, text, 5)])
        # The answer's last token was decided, not fed.
        assert toy.rows_read - before == (20 if turn == 0 else 1 + 6)
        text += (*toy.answers[turn], *prompt(turn + 1, 6))
    assert len(toy.scheduler.cache.texts) == 1
    assert toy.scheduler.cache.held == len(text) - 6 - 1


def test_the_draft_reads_what_it_has_not_either_until_it_needs_the_slots():
    toy = ToyPipeline(config(), free=False, draft_slots=100, answers={})
    run(toy, [Request(0, PREFIX, 1)])
    assert toy.draft.runner.model.rows >= len(PREFIX)
    before = toy.draft.runner.model.rows
    run(toy, [Request(1, PREFIX, 1)])
    assert toy.draft.runner.model.rows - before < len(PREFIX) / 2
    assert len(toy.draft.runner.retained) == 2
    run(toy, [Request(i, prompt(i, 45), 1) for i in (2, 3)])
    assert 0 not in toy.draft.runner.retained


def test_nothing_is_shared_or_kept_where_that_is_not_wanted():
    toy = pipeline(max_retained=0)
    sent = run(toy, [Request(i, PREFIX, 4) for i in range(3)])
    assert toy.rows_read == 3 * len(PREFIX)
    sent += [toy.lockstep() for _ in range(2 * NUM_STAGES)]
    assert not any(batch.kept or any(o.shared for o in batch.opened) for batch in sent)
    assert all(loop.runner.slots.num_free == 200 for loop in toy.stages)
    assert toy.draft.runner.slots.num_free == 200


def test_a_prompt_that_is_told_of_is_read_whole_and_can_be_shared():
    toy = pipeline()
    told = Sampling(prompt_logprobs=0)
    run(toy, [Request(0, PREFIX, 4), Request(1, PREFIX, 4, sampling=told)])
    assert toy.rows_read == 2 * len(PREFIX)
    assert toy.boards[-1].scored == {1: len(PREFIX) - 1}
    run(toy, [Request(2, PREFIX, 4)])
    assert toy.rows_read == 2 * len(PREFIX) + 1


def test_text_that_nobody_used_for_longest_goes_first_and_only_as_much_as_must():
    toy = pipeline(max_num_seqs=1, num_slots=120, context_limit=60)
    run(toy, [Request(0, prompt(1, 40), 4), Request(1, prompt(2, 40), 4)])
    run(toy, [Request(2, prompt(1, 40), 4)])  # the first was used again
    assert toy.rows_read == 40 + 40 + 1
    before = toy.scheduler.cache.held
    sent = run(toy, [Request(3, prompt(3, 40), 4)])
    assert before <= 2 * 43 and toy.scheduler.cache.held <= 120
    assert 1 in {number for batch in sent for number, _ in batch.kept}
    before = toy.rows_read
    run(toy, [Request(4, prompt(1, 40), 4)])
    assert toy.rows_read == before + 1


def test_as_many_texts_are_kept_as_is_said():
    toy = pipeline(max_retained=2, num_slots=2000)
    run(toy, [Request(i, prompt(i, 20), 2) for i in range(5)])
    assert len(toy.scheduler.cache.texts) == 2
    run(toy, [Request(9, prompt(4, 20), 2)])
    assert toy.rows_read == 5 * 20 + 1


# --- requests at the same time ----------------------------------------------------------------


def test_many_that_come_together_read_what_they_share_once():
    toy = pipeline(
        max_num_seqs=32, num_slots=2000, context_limit=100, prefill_chunk=20, max_rows=20
    )
    requests = [Request(i, PREFIX + prompt(100 + i, 5), 4) for i in range(32)]
    sent = run(toy, requests)
    assert toy.rows_read <= len(PREFIX) + 32 * 5
    opened = [(batch.step, each.shared) for batch in sent for each in batch.opened]
    assert opened == [(0, 0), *([(2, len(PREFIX))] * 31)]


def test_who_waits_for_a_text_holds_up_nobody_and_goes_on_when_its_reader_leaves():
    toy = pipeline(num_slots=2000)
    for request in (Request(0, PREFIX, 4), Request(1, PREFIX, 4), Request(2, prompt(9, 40), 4)):
        toy.add(request)
    first = toy.lockstep()
    assert [opening.request for opening in first.opened] == [0, 2]
    toy.cancel(0)
    second = toy.lockstep()
    assert [(o.request, o.shared) for o in second.opened] == [(1, 0)], (
        "eight tokens are not worth it"
    )
    while not toy.scheduler.idle:
        toy.lockstep()
    assert toy.answers[1] == text_of(Request(1, PREFIX, 4), NUM_STAGES)


def test_nobody_shares_with_one_that_the_stages_may_never_hear_of():
    toy = pipeline(num_slots=2000)
    toy.add(Request(0, PREFIX, 30))
    while not toy.answers[0]:
        toy.lockstep()
    alike = PREFIX + prompt(5, 4)
    for i in (1, 2):
        toy.add(Request(i, (*alike, i), 4))
    toy.cancelled.append(1)
    batch = toy.lockstep()
    assert [(each.request, each.parent) for each in batch.opened] == [(2, 0)]
    while not toy.scheduler.idle:
        toy.lockstep()
    assert toy.answers[2] == text_of(Request(2, (*alike, 2), 4), NUM_STAGES)


def test_what_was_put_back_comes_back_cheaply_if_its_slots_were_not_needed_meanwhile():
    toy = pipeline(num_slots=64, max_num_seqs=2, context_limit=60, policy=Root())
    requests = [Request(0, prompt(1, 20), 16), Request(1, prompt(2, 20), 16)]
    run(toy, requests)
    assert toy.scheduler.preemptions > 0
    assert toy.rows_read < 40 + 20, "it was not read whole again"


# --- whatever happens -------------------------------------------------------------------------


@given(
    st.sampled_from(POLICIES),
    st.booleans(),
    st.sampled_from([400, 120, 96]),
    st.sampled_from([400, 120, 60]),
    st.sampled_from([0, 1, 8]),
    st.sampled_from([None, Parallel(mask_token=2, tokens=3, end=90)]),
    st.integers(0, 2**32 - 1),
)
def test_whatever_happens_every_slot_has_its_owners_and_texts_are_the_same(
    policy: FeedPolicy,
    free: bool,
    num_slots: int,
    draft_slots: int,
    max_retained: int,
    parallel: Parallel | None,
    seed: int,
):
    """Arrivals with common beginnings, cancellations, short slots, lost epochs; in lockstep, and
    running free in any order of stages and verdicts; with plain and with parallel drafts."""
    rng = random.Random(seed)
    told = config(policy, num_slots=num_slots, max_retained=max_retained)
    families = [prompt(seed % 97 + i, 50) for i in range(2)]
    requests = []
    for i in range(rng.randint(2, 9)):
        shared = rng.choice(families)[: rng.randint(1, 50)]
        if requests and rng.random() < 0.3:  # a conversation goes on
            former = rng.choice(requests)
            shared = (former.prompt + tuple(text_of(former, NUM_STAGES)))[:60]
        own = tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice((0, 1, 8))))
        scored = Sampling(prompt_logprobs=0 if rng.random() < 0.1 else None)
        requests.append(Request(i, shared + own, rng.randint(1, 8), sampling=scored))
    waiting, open_, answers = list(requests), [], {}
    gone: set[int] = set()
    how = {"free": free, "draft_slots": draft_slots, "parallel": parallel}
    toy = ToyPipeline(told, **how, answers=answers)
    while waiting or not toy.scheduler.idle:
        while waiting and toy.scheduler.room and rng.random() < 0.4:
            open_.append(waiting.pop(0))
            toy.add(open_[-1])
        if toy.scheduler.requests and rng.random() < 0.05:
            request = rng.choice(toy.scheduler.requests).request
            toy.cancelled.append(request.id)
            gone.add(request.id)
        if rng.random() < 0.01:  # an epoch is lost
            toy = ToyPipeline(told, **how, answers=answers)
            left = [r for r in open_ if r.id not in gone]
            open_ = [r for r in left if len(answers[r.id]) < r.max_new_tokens]
            for request in open_:
                toy.add(request)
        if free:
            step_free(toy, rng)
        else:
            toy.lockstep()
    for request in requests:
        if request.id not in gone:
            assert answers[request.id] == text_of(request, NUM_STAGES)
    drain(toy, free, rng)
    draft = toy.draft.runner
    assert draft_slots - draft.slots.num_free <= sum(draft.retained.values())
    assert not draft.lineages
    cache = toy.scheduler.cache
    for loop in toy.stages:
        assert num_slots - loop.runner.slots.num_free == cache.held
        assert loop.runner.retained == {n: len(key) // 4 for n, key in cache._keys.items()}
        assert not loop.runner.lineages
    assert cache.pinned == 0 and len(cache.texts) <= max_retained
    cache.free(num_slots)
    drain(toy, free, rng)
    assert all(loop.runner.slots.num_free == num_slots for loop in toy.stages)


def step_free(toy: ToyPipeline, rng: random.Random) -> None:
    """The head's step, with whatever the stages and the verdicts do meanwhile."""
    toy.begin()
    while len(toy.inbox[0]) > 1 or rng.random() < 0.7:
        rank = rng.randint(1, NUM_STAGES)
        if toy.inbox[rank - 1] and (rank == NUM_STAGES or len(toy.inbox[rank]) < 2):
            toy.work(rank, seen=rng.randint(0, len(toy.drawn)))
    while toy.heard < min(len(toy.verdicts), toy.scheduler.step + 1) and rng.random() < 0.7:
        toy.hear()
    toy.send()


def drain(toy: ToyPipeline, free: bool, rng: random.Random) -> None:
    """All that is on its way arrives."""
    for _ in range(3 * NUM_STAGES):
        if free:
            step_free(toy, rng)
        else:
            toy.lockstep()
    for rank in range(1, NUM_STAGES + 1):
        while free and toy.inbox[rank - 1]:
            toy.work(rank, seen=len(toy.drawn))


@pytest.mark.parametrize("free", [False, True])
def test_a_stage_that_hears_late_shares_when_it_knows_what_the_head_knew(free: bool):
    """The parent's answer is decided and fed, but no stage but the last has heard of it."""
    toy = ToyPipeline(config(Root(), num_slots=400), free=free, draft_slots=400, answers={})
    toy.add(Request(0, PREFIX[:9], 20))
    rng = random.Random(0)
    while len(toy.answers[0]) < 19:
        if not free:
            toy.lockstep()
            continue
        toy.begin()
        for rank in range(NUM_STAGES, 0, -1):
            toy.work(rank, seen=0)
        toy.hear()
        toy.send()
    text = PREFIX[:9] + tuple(toy.answers[0][:18])
    toy.add(Request(1, (*text, 1, 2), 3))
    for _ in range(30):
        if free:
            step_free(toy, rng)
        else:
            toy.lockstep()
    drain(toy, free, rng)
    assert toy.scheduler.cache.hits >= len(text) - 1
    assert toy.answers[1] == text_of(Request(1, (*text, 1, 2), 3), NUM_STAGES)
