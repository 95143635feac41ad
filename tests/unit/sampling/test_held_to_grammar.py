"""Texts that are held to a grammar, at the last stage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipespec.core import RELAXED, Opening, Sampling
from pipespec.sampling import terms
from pipespec.sampling.decide import Walk, decide
from pipespec.sampling.grammar import GrammarFailed, as_bools, has, only
from pipespec.sampling.verifier import Verifier
from tests.helpers.grammar import OneOf, compiled

VOCAB, EOS, TIP = 6, 5, 1
PROMPT = (1, 2)
TEXTS = ((0, 1, 2), (0, 1, 3), (4, 4))
ROWS = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(1))


def opened(
    asked: Sampling, answer: Sequence[int] = (), texts: Sequence[Sequence[int]] = TEXTS, **how: int
) -> Verifier:
    text = (*PROMPT, *answer)
    opening = Opening(1, 1, len(PROMPT), len(text), terms.pack(asked, (EOS,)))
    mine = Verifier(opening, lambda _: compiled(OneOf(texts, EOS, **how)))
    assert mine.reads
    mine.read(text)
    return mine


def said(mine: Verifier, guesses: Sequence[int], rows: torch.Tensor) -> Walk:
    """The walk through the tip and guesses that follow one another."""
    nodes = [TIP, *range(10, 10 + len(guesses))]
    walk = Walk(TIP, nodes, [0, *nodes[:-1]], [PROMPT[-1], *guesses])
    decide([(mine, walk)], rows[: len(nodes)])
    return walk


def expected(asked: Sampling, rows: torch.Tensor) -> list[int]:
    """The text of one token after another."""
    mine, text = opened(asked), []
    while EOS not in text:
        text += said(mine, (), rows[len(text) :]).tokens
    return text


KINDS = [
    Sampling(grammar="g"),
    Sampling(1.0, seed=3, grammar="g", logprobs=1),
    Sampling(0.9, 2, 0.8, 0.01, 1.5, 0.5, 0.5, ((3, 1.0),), seed=5, grammar="g"),
]


@pytest.mark.parametrize("asked", KINDS)
def test_a_text_fits_its_grammar_and_is_the_same_in_any_portions(asked):
    text = expected(asked, ROWS)
    assert tuple(text[:-1]) in TEXTS
    for width in (1, 2, 4):
        mine, told = opened(asked), []
        while EOS not in told:
            guesses = text[len(told) : len(told) + width]
            told += said(mine, guesses, ROWS[len(told) :]).tokens
        assert told == text


@pytest.mark.parametrize("asked", KINDS)
def test_it_goes_on_where_an_earlier_one_ended(asked):
    text = expected(asked, ROWS)
    for known in range(len(text) - 1):
        mine = opened(asked, text[:known])
        assert said(mine, (), ROWS[known:]).tokens == [text[known]]


def test_log_probabilities_are_of_the_logits_as_they_are():
    walk = said(opened(Sampling(grammar="g", logprobs=VOCAB)), (), ROWS)
    told = ROWS[0].double().log_softmax(0)
    assert dict(walk.reports[0].top) == pytest.approx(dict(enumerate(told.tolist())))


def test_guesses_beyond_the_end_decide_nothing():
    walk = said(opened(Sampling(grammar="g"), texts=[(0,)]), (0, EOS, 3), ROWS)
    assert walk.tokens == [0, EOS]


def test_a_text_that_must_end_ends_before_its_least_length():
    mine = opened(Sampling(grammar="g", min_tokens=5), texts=[(0,), (0, 1)])
    assert said(mine, (0, 1), ROWS).tokens == [0, 1, EOS]


def test_a_lossy_rule_takes_a_guess_that_fits_alone():
    mine = opened(Sampling(grammar="g", acceptance=RELAXED), texts=[(2,), (3,)])
    assert said(mine, (0,), ROWS).tokens[0] in (2, 3)


def test_what_a_grammar_does_not_tell_fails_the_sequence_alone():
    broken, whole = opened(Sampling(grammar="g"), fails_after=2), opened(Sampling(grammar="g"))
    walks = []
    for _ in range(2):
        nodes = [TIP, 10, 11]
        walks.append(Walk(TIP, nodes, [0, TIP, 10], [2, 0, 1]))
    logits = torch.zeros(6, VOCAB)
    decide([(broken, walks[0]), (whole, walks[1])], logits)
    assert walks[0].tokens == [0, 1] and walks[0].failed and "said to" in str(broken.failure)
    assert len(walks[1].tokens) == 3 and not walks[1].failed


def test_a_grammar_that_was_not_compiled_fails_the_sequence():
    opening = Opening(1, 1, 2, 2, terms.pack(Sampling(grammar="g"), (EOS,)))
    mine = Verifier(opening, lambda _: compiled(GrammarFailed("no")))
    mine.read(PROMPT)
    assert said(mine, (), ROWS).failed and mine.failure == "no"


@given(st.sets(st.integers(0, 95)), st.integers(1, 120))
def test_bits_and_bools_are_the_same(tokens, size):
    bits = np.zeros(3, np.uint32)
    for token in tokens:
        bits[token // 32] |= np.uint32(1 << token % 32)
    bits = bits.view(np.int32)
    assert set(np.flatnonzero(as_bools(bits, size))) == {token for token in tokens if token < size}
    assert only(bits) == (next(iter(tokens)) if len(tokens) == 1 else None)
    many = np.stack((bits, np.zeros_like(bits)))
    bools = as_bools(many, size)
    assert bools.shape == (2, size) and not bools[1].any()
    asked = np.tile(np.arange(-1, 130), (2, 1))
    assert set((np.flatnonzero(has(many, asked)[0]) - 1).tolist()) == tokens
    assert not has(many, asked)[1].any()
