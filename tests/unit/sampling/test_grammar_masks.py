"""Structured output at the last stage."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import closing
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipespec.core import RELAXED, SamplingParams
from pipespec.sampling.grammar import GrammarFailed, allows, only_token, unpack_mask
from pipespec.sampling.sampling_state import SamplingState
from pipespec.sampling.verifier import AcceptedPath, verify_batch
from pipespec.system.fair_thread import FairThread
from tests.helpers.grammar import OneOf
from tests.helpers.sampling import opened as opened_state

VOCAB, EOS, TIP = 6, 5, 1
PROMPT = (1, 2)
TEXTS = ((0, 1, 2), (0, 1, 3), (4, 4))
ROWS = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(1))


def opened(
    params: SamplingParams,
    answer: Sequence[int] = (),
    texts: Sequence[Sequence[int]] = TEXTS,
    **how: int,
) -> SamplingState:
    return opened_state(params, PROMPT, answer, (EOS,), OneOf(texts, EOS, **how))


def verified(mine: SamplingState, draft_tokens: Sequence[int], rows: torch.Tensor) -> AcceptedPath:
    """The accepted path through the tip and a chain of draft tokens."""
    nodes = [TIP, *range(10, 10 + len(draft_tokens))]
    path = AcceptedPath(TIP, nodes, [0, *nodes[:-1]], [PROMPT[-1], *draft_tokens])
    verify_batch([(mine, path)], rows[: len(nodes)])
    return path


def expected(params: SamplingParams, rows: torch.Tensor) -> list[int]:
    """The text that single-token batches give."""
    mine, text = opened(params), []
    while EOS not in text:
        text += verified(mine, (), rows[len(text) :]).tokens
    return text


KINDS = [
    SamplingParams(grammar="g"),
    SamplingParams(1.0, seed=3, grammar="g", logprobs=1),
    SamplingParams(0.9, 2, 0.8, 0.01, 1.5, 0.5, 0.5, ((3, 1.0),), seed=5, grammar="g"),
]


@pytest.mark.parametrize("params", KINDS)
def test_text_matches_its_grammar_however_batches_divide_it(params):
    text = expected(params, ROWS)
    assert tuple(text[:-1]) in TEXTS
    for width in (1, 2, 4):
        mine, found = opened(params), []
        while EOS not in found:
            draft_tokens = text[len(found) : len(found) + width]
            found += verified(mine, draft_tokens, ROWS[len(found) :]).tokens
        assert found == text


@pytest.mark.parametrize("params", KINDS)
def test_grammar_continues_after_a_resumed_answer(params):
    text = expected(params, ROWS)
    for known in range(len(text) - 1):
        mine = opened(params, text[:known])
        assert verified(mine, (), ROWS[known:]).tokens == [text[known]]


def test_grammar_does_not_change_reported_log_probabilities():
    path = verified(opened(SamplingParams(grammar="g", logprobs=VOCAB)), (), ROWS)
    logprobs = ROWS[0].double().log_softmax(0)
    assert dict(path.logprobs[0].top) == pytest.approx(dict(enumerate(logprobs.tolist())))


def test_draft_tokens_after_the_end_of_text_are_ignored():
    path = verified(opened(SamplingParams(grammar="g"), texts=[(0,)]), (0, EOS, 3), ROWS)
    assert path.tokens == [0, EOS]


def test_text_that_the_grammar_ends_may_be_shorter_than_min_tokens():
    mine = opened(SamplingParams(grammar="g", min_tokens=5), texts=[(0,), (0, 1)])
    assert verified(mine, (0, 1), ROWS).tokens == [0, 1, EOS]


def test_lossy_rule_takes_only_draft_tokens_that_the_grammar_allows():
    mine = opened(SamplingParams(grammar="g", acceptance=RELAXED), texts=[(2,), (3,)])
    assert verified(mine, (0,), ROWS).tokens[0] in (2, 3)


def test_failing_matcher_fails_its_sequence_alone():
    broken, whole = (
        opened(SamplingParams(grammar="g"), fails_after=2),
        opened(SamplingParams(grammar="g")),
    )
    paths = []
    for _ in range(2):
        nodes = [TIP, 10, 11]
        paths.append(AcceptedPath(TIP, nodes, [0, TIP, 10], [2, 0, 1]))
    logits = torch.zeros(6, VOCAB)
    verify_batch([(broken, paths[0]), (whole, paths[1])], logits)
    assert paths[0].tokens == [0, 1] and paths[0].failure and "made to fail" in str(broken.failure)
    assert len(paths[1].tokens) == 3 and not paths[1].failure


def test_grammar_that_does_not_compile_fails_its_sequence():
    mine = opened_state(SamplingParams(grammar="g"), PROMPT, (), (EOS,), GrammarFailed("no"))
    assert verified(mine, (), ROWS).failure and mine.failure == "no"


@given(st.sets(st.integers(0, 95)), st.integers(1, 120))
def test_token_masks_as_bits_and_as_bools_agree(tokens, size):
    bits = np.zeros(3, np.uint32)
    for token in tokens:
        bits[token // 32] |= np.uint32(1 << token % 32)
    bits = bits.view(np.int32)
    assert set(np.flatnonzero(unpack_mask(bits, size))) == {
        token for token in tokens if token < size
    }
    assert only_token(bits) == (next(iter(tokens)) if len(tokens) == 1 else None)
    many = np.stack((bits, np.zeros_like(bits)))
    bools = unpack_mask(many, size)
    assert bools.shape == (2, size) and not bools[1].any()
    params = np.tile(np.arange(-1, 130), (2, 1))
    assert set((np.flatnonzero(allows(many, params)[0]) - 1).tolist()) == tokens
    assert not allows(many, params)[1].any()


def test_grammar_with_many_slow_masks_delays_no_other_by_more_than_one():
    masks, begin, order = FairThread(), threading.Event(), []

    def slow(name: str) -> None:
        order.append(name)
        until = time.thread_time() + 0.002
        while time.thread_time() < until:
            pass

    with closing(masks):
        masks.submit("slow", begin.wait)
        calls = [masks.submit("slow", partial(slow, "slow")) for _ in range(10)]
        calls += [masks.submit("other", partial(slow, "other")) for _ in range(2)]
        begin.set()
        wait(calls)
    assert order.index("other") <= 1 and order[-7:] == ["slow"] * 7


def test_loop_waits_for_masks_no_longer_than_a_share_of_its_step():
    masks, later = FairThread(), Future()
    began = time.monotonic()
    masks.grant_share(50.0)
    assert not masks.wait_for(later) and not masks.wait_for(later)
    assert time.monotonic() - began < 5
    later.set_result(None)
    assert masks.wait_for(later)
