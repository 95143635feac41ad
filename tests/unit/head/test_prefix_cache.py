"""Requests with a common prefix share KV slots: texts do not change, and no slot leaks."""

import random
from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipespec.core import NO_PARENT_SEQUENCE, Batch, Request, SamplingParams
from pipespec.engine.slice.runner import SliceRunner
from pipespec.head.kept_states import KeptStates
from pipespec.head.policies.best_first import BestFirst
from pipespec.head.policies.policy import SpeculationPolicy
from pipespec.head.policies.root import Root
from pipespec.head.prefix_cache import (
    NO_TEXT,
    PrefixCache,
    PrefixIndex,
    num_common,
    num_tokens,
    text_key,
)
from pipespec.head.proposers.parallel import ParallelDraft
from pipespec.head.proposers.token_map import MISSING, TokenMap
from pipespec.head.scheduler_types import SchedulerConfig
from tests.helpers.proposers import small_policies
from tests.helpers.recurrent_toy import MODULES, recurrent_toy
from tests.helpers.toy_pipeline import VOCABULARY, ToyModel, ToyPipeline, text_of

NUM_STAGES = 3
POLICIES = small_policies()
BEST_FIRST = BestFirst(8, 2)
tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=6)


# The others keep states in the same way; test_running_states.py decodes with them.
SOME = [name if name == "lfm2" else pytest.param(name, marks=pytest.mark.long) for name in MODULES]


def config(policy: SpeculationPolicy = BEST_FIRST, **changes: object) -> SchedulerConfig:
    fields = {"prefill_chunk": 8, "context_limit": 90, "max_num_seqs": 4, "max_rows": 16}
    fields |= {"num_slots": 200, "max_retained": 8}
    return SchedulerConfig(policy, NUM_STAGES, 1, **{**fields, **changes})


def pipeline(**changes: object) -> ToyPipeline:
    return ToyPipeline(config(**changes), draft_slots=200, answers={})


def run(toy: ToyPipeline, requests: Sequence[Request]) -> list[Batch]:
    """Add requests as there is room, until all are answered as the toy does; what was sent."""
    waiting, sent = list(requests), []
    while waiting or not toy.scheduler.admission.idle:
        while waiting and toy.scheduler.admission.room:
            toy.add(waiting.pop(0))
        sent.append(toy.orderly_step())
    for request in requests:
        assert toy.answers[request.id] == text_of(request, NUM_STAGES)
    return sent


def rows_read(toy: ToyPipeline, requests: Sequence[Request]) -> int:
    """How many rows of prompts the stages read for these requests."""
    before = toy.rows_read
    run(toy, requests)
    return toy.rows_read - before


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(VOCABULARY, size=length).tolist())


PREFIX = prompt(0, 40)


salts = st.sampled_from(["", "a", "b"])


@given(st.lists(st.tuples(tokens, salts), max_size=8), tokens, salts)
def test_longest_common_prefix_is_found_first(
    texts: list[tuple[list[int], str]], text: list[int], salt: str
):
    """None has anything in common with a text of another salt."""
    index, wanted = PrefixIndex(), text_key(text, salt)
    for number, each in enumerate(texts):
        index.add(text_key(*each), number)
    expected = [
        len([*takewhile(lambda pair: pair[0] == pair[1], zip(each, text, strict=False))])
        * (own == salt)
        for each, own in texts
    ]
    assert expected == [num_common(text_key(*each), wanted) for each in texts]
    found = {number: common for number, common, _ in index.match_prefix(wanted)}
    assert found == {number: common for number, common in enumerate(expected) if common}
    assert list(found.values()) == sorted(found.values(), reverse=True)
    for number, each in enumerate(texts):
        index.remove(text_key(*each), number)
    assert len(index) == 0


def test_request_skips_the_prefix_of_an_earlier_request():
    toy = pipeline()
    assert rows_read(toy, [Request(0, PREFIX, 4)]) == len(PREFIX)
    assert rows_read(toy, [Request(1, PREFIX, 4)]) == 1, "the last token's logits are needed"
    assert rows_read(toy, [Request(2, PREFIX[:30] + prompt(1, 9), 4)]) == 9
    assert toy.scheduler.admission.cache.queries == 2 * len(PREFIX) + 39
    assert toy.scheduler.admission.cache.hits == len(PREFIX) - 1 + 30


def test_next_turn_of_a_conversation_reads_only_new_tokens_and_replaces_the_retained_text():
    toy = pipeline()
    text: tuple[int, ...] = PREFIX[:20]
    for turn in range(3):
        # The answer's last token was decided, not fed.
        assert rows_read(toy, [Request(turn, text, 5)]) == (20 if turn == 0 else 1 + 6)
        text += (*toy.answers[turn], *prompt(turn + 1, 6))
    assert len(toy.scheduler.admission.cache.retained_texts) == 1
    assert toy.scheduler.admission.cache.held == len(text) - 6 - 1


def test_draft_model_shares_prefixes_until_it_needs_the_slots():
    toy = ToyPipeline(config(), draft_slots=100, answers={})
    run(toy, [Request(0, PREFIX, 1)])
    assert toy.draft.runner.model.rows >= len(PREFIX)
    before = toy.draft.runner.model.rows
    run(toy, [Request(1, PREFIX, 1)])
    assert toy.draft.runner.model.rows - before < len(PREFIX) / 2
    assert len(toy.draft.runner.cached) == 2
    run(toy, [Request(i, prompt(i, 45), 1) for i in (2, 3)])
    assert 0 not in toy.draft.runner.cached


def test_requests_of_different_salts_share_nothing_at_the_stages_or_at_the_draft():
    toy = ToyPipeline(config(), draft_slots=200, answers={})
    for i, salt in enumerate(("", "a", "b")):
        drafted = toy.draft.runner.model.rows
        assert rows_read(toy, [Request(2 * i, PREFIX, 4, cache_salt=salt)]) == len(PREFIX)
        assert toy.draft.runner.model.rows - drafted >= len(PREFIX)
        drafted = toy.draft.runner.model.rows
        again = Request(2 * i + 1, PREFIX, 4, cache_salt=salt)
        assert rows_read(toy, [again]) == 1, "of one salt they do share"
        assert toy.draft.runner.model.rows - drafted < len(PREFIX)


def test_text_of_one_salt_does_not_replace_a_prefix_of_another_salt():
    toy = pipeline(num_slots=400)
    run(toy, [Request(0, PREFIX[:30], 4, cache_salt="a"), Request(1, PREFIX, 4, cache_salt="b")])
    assert rows_read(toy, [Request(2, PREFIX[:30], 4, cache_salt="a")]) == 1


def test_max_retained_zero_shares_and_retains_nothing():
    toy = pipeline(max_retained=0)
    sent = run(toy, [Request(i, PREFIX, 4) for i in range(3)])
    assert toy.rows_read == 3 * len(PREFIX)
    sent += [toy.orderly_step() for _ in range(2 * NUM_STAGES)]
    assert not any(
        batch.retained_prefixes or any(o.shared_len for o in batch.started) for batch in sent
    )
    assert all(loop.runner.slots.num_free == 200 for loop in toy.stages)
    assert toy.draft.runner.slots.num_free == 200


def test_prompt_with_logprobs_is_read_whole_and_can_be_shared():
    toy = pipeline()
    told = SamplingParams(prompt_logprobs=0)
    both = [Request(0, PREFIX, 4), Request(1, PREFIX, 4, sampling=told)]
    assert rows_read(toy, both) == 2 * len(PREFIX)
    assert toy.boards[-1].scored == {1: len(PREFIX) - 1}
    assert rows_read(toy, [Request(2, PREFIX, 4)]) == 1


def test_least_recently_used_text_is_freed_first_and_only_as_far_as_needed():
    toy = pipeline(max_num_seqs=1, num_slots=120, context_limit=60)
    run(toy, [Request(0, prompt(1, 40), 4), Request(1, prompt(2, 40), 4)])
    run(toy, [Request(2, prompt(1, 40), 4)])  # the first was used again
    assert toy.rows_read == 40 + 40 + 1
    before = toy.scheduler.admission.cache.held
    sent = run(toy, [Request(3, prompt(3, 40), 4)])
    assert before <= 2 * 43 and toy.scheduler.admission.cache.held <= 120
    assert 1 in {number for batch in sent for number, _ in batch.retained_prefixes}
    assert rows_read(toy, [Request(4, prompt(1, 40), 4)]) == 1


def test_concurrent_requests_read_a_common_prompt_once():
    toy = pipeline(
        max_num_seqs=32, num_slots=2000, context_limit=100, prefill_chunk=20, max_rows=20
    )
    requests = [Request(i, PREFIX + prompt(100 + i, 5), 4) for i in range(32)]
    sent = run(toy, requests)
    assert toy.rows_read <= len(PREFIX) + 32 * 5
    opened = [(batch.step, each.shared_len) for batch in sent for each in batch.started]
    assert opened == [(0, 0), *([(2, len(PREFIX))] * 31)]


def test_request_waiting_for_a_prefix_blocks_no_other_and_starts_when_its_reader_is_cancelled():
    toy = pipeline(num_slots=2000)
    for request in (Request(0, PREFIX, 4), Request(1, PREFIX, 4), Request(2, prompt(9, 40), 4)):
        toy.add(request)
    first = toy.orderly_step()
    assert [opening.request for opening in first.started] == [0, 2]
    toy.cancel(0)
    second = toy.orderly_step()
    assert [(o.request, o.shared_len) for o in second.started] == [(1, 0)], (
        "eight tokens are not worth it"
    )
    while not toy.scheduler.admission.idle:
        toy.orderly_step()
    assert toy.answers[1] == text_of(Request(1, PREFIX, 4), NUM_STAGES)


def test_request_does_not_share_with_a_sequence_that_was_never_sent():
    toy = pipeline(num_slots=2000)
    toy.add(Request(0, PREFIX, 30))
    while not toy.answers[0]:
        toy.orderly_step()
    alike = PREFIX + prompt(5, 4)
    for i in (1, 2):
        toy.add(Request(i, (*alike, i), 4))
    toy.cancel(1)
    batch = toy.orderly_step()
    assert [(each.request, each.parent) for each in batch.started] == [(2, 0)]
    while not toy.scheduler.admission.idle:
        toy.orderly_step()
    assert toy.answers[2] == text_of(Request(2, (*alike, 2), 4), NUM_STAGES)


def test_preempted_request_rereads_little_if_its_slots_were_not_needed():
    toy = pipeline(num_slots=64, max_num_seqs=2, context_limit=60, policy=Root())
    requests = [Request(0, prompt(1, 20), 16), Request(1, prompt(2, 20), 16)]
    run(toy, requests)
    assert toy.scheduler.admission.preemptions > 0
    assert toy.rows_read < 40 + 20, "it was not read whole again"


def recurrent_pipeline(model_type: str, **changes: object) -> ToyPipeline:
    fields = {"kept_states": 8, "state_interval": 0, **changes}
    make_model = recurrent_toy(model_type)
    return ToyPipeline(config(**fields), draft_slots=200, answers={}, make_model=make_model)


@pytest.mark.parametrize("model_type", SOME)
def test_a_prefix_is_shared_where_running_states_are_kept(model_type):
    """At the end of the prompt of a request that is over, or of one that runs."""
    toy = recurrent_pipeline(model_type)
    first = Request(0, PREFIX, 6)
    run(toy, [first])
    answer = tuple(toy.answers[0])
    assert rows_read(toy, [Request(1, PREFIX + answer + prompt(3, 5), 6)]) == 1 + len(answer) + 5, (
        "from the last token of the prompt on"
    )
    assert rows_read(toy, [Request(2, PREFIX[:30] + prompt(4, 9), 6)]) == 39, (
        "no state is kept in the middle of a prompt"
    )
    assert rows_read(toy, [Request(i, prompt(5, 32), 6) for i in range(3, 6)]) == 32 + 2, (
        "one reads the prompt for the others"
    )


@pytest.mark.slow
@pytest.mark.parametrize("model_type", SOME)
@pytest.mark.parametrize("policy", [Root(), BEST_FIRST])
def test_prompts_with_a_common_beginning_share_it_up_to_the_last_state(model_type, policy):
    toy = recurrent_pipeline(model_type, state_interval=16, policy=policy)
    run(toy, [Request(0, PREFIX, 6)])
    shared = rows_read(toy, [Request(1, PREFIX[:36] + prompt(4, 9), 6)])
    assert shared == 4 + 9, "32 tokens are shared"
    assert rows_read(
        toy, [Request(i, PREFIX[:30] + prompt(5 + i, 9), 6) for i in range(2, 5)]
    ) == 3 * (14 + 9), "16 tokens are shared"
    assert rows_read(
        toy, [Request(i, prompt(9, 40) + prompt(5 + i, 9), 6) for i in range(5, 8)]
    ) == 49 + 2 * (8 + 9), "one reads 32 tokens for the others"


@pytest.mark.parametrize("model_type", SOME)
def test_draft_with_running_states_shares_prefixes_where_it_keeps_one(model_type):
    toy = recurrent_pipeline(model_type, state_interval=16)

    def drafted(request: Request) -> int:
        before = toy.draft.runner.model.rows
        run(toy, [request])
        return toy.draft.runner.model.rows - before

    assert drafted(Request(0, PREFIX, 1)) >= len(PREFIX)
    assert drafted(Request(1, PREFIX, 1)) < 16
    assert drafted(Request(2, PREFIX[:34] + prompt(4, 3), 1)) < 5 + 16


def test_least_recently_used_state_is_replaced_and_its_text_cut():
    toy = recurrent_pipeline("lfm2", kept_states=4, num_slots=2000, state_interval=16)
    cache = toy.scheduler.admission.cache
    first, second, third = prompt(1, 40), prompt(2, 20), prompt(3, 20)
    run(toy, [Request(0, first, 4), Request(1, second, 4), Request(2, third, 4)])
    assert len(cache.states) == 4
    assert rows_read(toy, [Request(3, first[:36], 4)]) == 4, (
        "of a text the longest prefix was given up first"
    )
    for loop in toy.stages:
        assert loop.runner.model.recurrent._book.num_states <= 4 + 4


def test_a_long_text_takes_half_of_the_states_at_most():
    toy = recurrent_pipeline("lfm2", state_interval=8, num_slots=2000)
    short, long = prompt(1, 20), prompt(2, 80)
    run(toy, [Request(0, short, 2)])
    run(toy, [Request(1, long, 2)])
    states = toy.scheduler.admission.cache.states
    assert states.places(1, 80) == {16, 32, 48, 64, 79}, "at first they were 8 apart"
    assert rows_read(toy, [Request(2, short, 2)]) == 1


loads = st.tuples(
    st.sampled_from(POLICIES),
    st.booleans(),
    st.sampled_from([400, 120, 96]),
    st.sampled_from([400, 120, 60]),
    st.sampled_from([0, 1, 8]),
    st.tuples(st.sampled_from([1, 3, 16]), st.sampled_from([0, 3, 16])),
    st.sampled_from([None, ParallelDraft(mask_token=2, tokens=3, end_position=90)]),
    st.integers(0, 2**32 - 1),
)


@pytest.mark.slow
@given(loads)
def test_texts_are_unchanged_and_no_slot_leaks_under_random_load(load):
    check_random_load(*load)


@pytest.mark.slow
@given(loads)
def test_a_draft_with_other_tokens_keeps_its_slots_under_random_load(load):
    """It reads one of the target's tokens as two of its own."""
    ids = np.array([4, 0, MISSING, 3, 1])
    tokens = TokenMap(ids, {b"a": 5, b"b": 6}, {2: b"ab"})
    *load, _, seed = load
    check_random_load(*load, None, seed, tokens=tokens)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", SOME)
@settings(max_examples=3)
@given(load=loads)
def test_layers_with_a_running_state_compute_each_row_as_alone_under_random_load(model_type, load):
    """Every row of every stage and of the draft is compared with its own text, computed alone."""
    check_random_load(*load, model_type=model_type)


def check_random_load(
    policy: SpeculationPolicy,
    orderly: bool,
    num_slots: int,
    draft_slots: int,
    max_retained: int,
    states: tuple[int, int],
    parallel: ParallelDraft | None,
    seed: int,
    *,
    model_type: str | None = None,
    tokens: TokenMap | None = None,
):
    """Arrivals with common beginnings, cancellations, short slots, lost epochs; in step, and in any
    order of stages and verdicts; with plain and parallel drafts, and those of other `tokens`."""
    rng = random.Random(seed)
    kept, interval = states
    told = config(
        policy,
        num_slots=num_slots,
        max_retained=max_retained,
        kept_states=None if model_type is None else kept,
        state_interval=interval,
    )
    families = [prompt(seed % 97 + i, 50) for i in range(2)]
    requests = []
    for i in range(rng.randint(2, 9)):
        shared = rng.choice(families)[: rng.randint(1, 50)]
        if requests and rng.random() < 0.3:  # a conversation goes on
            former = rng.choice(requests)
            shared = (former.prompt + tuple(text_of(former, NUM_STAGES)))[:60]
        own = tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice((0, 1, 8))))
        scored = SamplingParams(prompt_logprobs=0 if rng.random() < 0.1 else None)
        salt = rng.choice(("", "", "a"))
        asked = Request(i, shared + own, rng.randint(1, 8), sampling=scored, cache_salt=salt)
        requests.append(asked)
    waiting, open_, answers = list(requests), [], {}
    gone: set[int] = set()
    how = {"draft_slots": draft_slots, "parallel": parallel, "tokens": tokens}
    how["make_model"] = ToyModel if model_type is None else recurrent_toy(model_type)
    toy = ToyPipeline(told, **how, answers=answers)
    while waiting or not toy.scheduler.admission.idle:
        while waiting and toy.scheduler.admission.room and rng.random() < 0.4:
            open_.append(waiting.pop(0))
            toy.add(open_[-1])
        if toy.scheduler.admission.requests and rng.random() < 0.05:
            request = rng.choice(toy.scheduler.admission.requests).request
            toy.cancelled.append(request.id)
            gone.add(request.id)
        if rng.random() < 0.01:  # an epoch is lost
            toy = ToyPipeline(told, **how, answers=answers)
            left = [r for r in open_ if r.id not in gone]
            open_ = [r for r in left if len(answers[r.id]) < r.max_new_tokens]
            for request in open_:
                toy.add(request)
        if orderly:
            toy.orderly_step()
        else:
            step_in_any_order(toy, rng)
    for request in requests:
        if request.id not in gone:
            assert answers[request.id] == text_of(request, NUM_STAGES)
    drain(toy)
    draft = toy.draft.runner
    check_states(draft, toy.draft.texts.states, told)
    assert draft_slots - draft.slots.num_free <= sum(draft.cached.values())
    assert not draft.lineages
    cache = toy.scheduler.admission.cache
    for loop in toy.stages:
        assert num_slots - loop.runner.slots.num_free == cache.held
        assert loop.runner.cached == {n: num_tokens(key) for n, key in cache._keys.items()}
        assert not loop.runner.lineages
        check_states(loop.runner, cache.states, told)
    assert cache.pinned == 0 and len(cache.retained_texts) <= max_retained
    cache.free(num_slots)
    drain(toy)
    assert all(loop.runner.slots.num_free == num_slots for loop in toy.stages)
    assert cache.states is None or not len(cache.states)


def check_states(runner: SliceRunner, states: KeptStates | None, told: SchedulerConfig) -> None:
    """A slice keeps the states that the head knows, and no more than there may be."""
    if states is None:
        return
    book = runner.model.recurrent._book
    assert book.num_states <= told.max_num_seqs + states.budget + 1  # one is of padding
    for state in states._used:
        kept = book.kept_state(state.number)
        assert state.owners
        for owner in state.owners:
            slots = runner.pages.slots[runner._page_of[owner]]
            assert book.length(kept, slots[: state.tokens]) == state.tokens


def step_in_any_order(toy: ToyPipeline, rng: random.Random) -> None:
    """The head's step, with whatever the stages and the verdicts do meanwhile."""

    def receive() -> None:
        while toy.num_runnable(1) > 1 or rng.random() < 0.7:
            rank = rng.randint(1, NUM_STAGES)
            if toy.num_runnable(rank) and (rank == NUM_STAGES or toy.num_runnable(rank + 1) < 2):
                toy.run_stage(rank, visible=rng.randint(0, len(toy.drawn)))
        while toy.num_received < len(toy.drawn) and rng.random() < 0.7:
            toy.receive_next()

    toy.step(receive)


def drain(toy: ToyPipeline) -> None:
    """All that is on its way arrives."""
    for _ in range(3 * NUM_STAGES):
        toy.orderly_step()
    for rank in range(1, NUM_STAGES + 1):
        while toy.num_runnable(rank):
            toy.run_stage(rank, visible=len(toy.drawn))


def test_stage_with_late_verdicts_waits_for_them_before_it_shares():
    """The parent's answer is decided and fed, but no stage but the last has heard of it."""
    toy = ToyPipeline(config(Root(), num_slots=400), draft_slots=400, answers={})
    toy.add(Request(0, PREFIX[:9], 20))
    rng = random.Random(0)

    def receive_unseen() -> None:
        for rank in range(NUM_STAGES, 0, -1):
            if toy.num_runnable(rank):
                toy.run_stage(rank)
        if toy.num_received < len(toy.drawn):
            toy.receive_next()

    while len(toy.answers[0]) < 19:
        toy.step(receive_unseen)
    text = PREFIX[:9] + tuple(toy.answers[0][:18])
    toy.add(Request(1, (*text, 1, 2), 3))
    for _ in range(30):
        step_in_any_order(toy, rng)
    drain(toy)
    assert toy.scheduler.admission.cache.hits >= len(text) - 1
    assert toy.answers[1] == text_of(Request(1, (*text, 1, 2), 3), NUM_STAGES)


def test_slots_that_a_failed_sequence_filled_are_neither_retained_nor_shared():
    """Also if it has left before, and its own text is a part of one that is retained."""
    cache = PrefixCache(8)
    other, text = text_key(range(100, 140)), text_key(range(40))
    cache.start(0, other, NO_PARENT_SEQUENCE, 0)
    cache.start(1, text, NO_PARENT_SEQUENCE, 0)
    for number in (2, 3):  # a running and a retained one
        cache.start(number, text_key([*range(40), number]), 1, 32)
    cache.finish(0, other, other)
    cache.finish(3, text_key([*range(40), 3]), text_key([*range(40), 3, 3]))
    cache.finish(1, text, text)
    assert cache.drop(1) == [2]
    assert [*cache.retained_texts.match_prefix(text)] == []
    assert [*cache.retained_texts.match_prefix(other)] == [(0, 40, other)]
    cache.finish(2, text_key([*range(40), 2]), NO_TEXT)
    assert (cache.held, cache.pinned) == (40, 0)
