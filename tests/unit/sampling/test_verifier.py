"""What the last stage accepts, given the logits of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from pipespec.controller.guesses import pack, unpack
from pipespec.core import RELAXED, Guesses, Opening, Sampling, TokenLogprobs
from pipespec.sampling import terms
from pipespec.sampling.decide import Walk, decide
from pipespec.sampling.distribution import Tally, logprobs
from pipespec.sampling.spec import Greedy, Relaxed, Sample, Strict, VerifierSpec
from pipespec.sampling.verifier import Verifier
from tests.helpers.sampling import decided, sample

VOCAB = 6
PROMPT = (1, 2)
TIP = 1
CPU = torch.device("cpu")


def verifier(**asked: object) -> Verifier:
    return opened(Sampling(**asked))


def opened(asked: Sampling, answer: Sequence[int] = (), eos: tuple[int, ...] = ()) -> Verifier:
    """The verifier of a sequence that begins with what was decided before."""
    text = (*PROMPT, *answer)
    mine = Verifier(Opening(1, 1, len(PROMPT), len(text), terms.pack(asked, eos)))
    if mine.reads:
        mine.read(text)
    return mine


def chain(*guesses: int) -> tuple[list[int], list[int], list[int]]:
    """The tip and guesses that follow one another, as nodes, parents and tokens."""
    nodes = [TIP, *range(10, 10 + len(guesses))]
    return nodes, [0, *nodes[:-1]], [PROMPT[-1], *guesses]


def expected_text(asked: Sampling, rows: torch.Tensor) -> list[int]:
    """What one draw after another gives, the text before it looked at anew each time."""
    answer: list[int] = []
    for logits in rows:
        tally = Tally(PROMPT, answer, VOCAB, CPU)
        answer.append(sample(logits, asked, len(PROMPT) + len(answer), tally))
    return answer


@pytest.mark.parametrize(
    "asked",
    [
        Sampling(),
        Sampling(1.0, seed=3),
        Sampling(0.0, repetition_penalty=5.0, logprobs=1),
        Sampling(1.2, 4, 0.9, 0.01, 1.5, 0.5, 1.5, ((3, 1.0),), seed=5, logprobs=0),
    ],
)
def test_a_judge_says_in_any_portions_what_single_draws_say(asked):
    rows = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(1))
    text = expected_text(asked, rows)
    for width in (1, 2, 3, 8):
        mine = opened(asked)
        said: list[int] = []
        while len(said) < len(text):
            part = text[len(said) : len(said) + width]
            nodes, parents, guesses = chain(*part[:-1])
            logits = rows[len(said) : len(said) + len(part)]
            tokens, reports = decided(mine, TIP, nodes, parents, guesses, logits)
            assert len(reports) == (0 if asked.logprobs is None else len(tokens))
            said += tokens
            assert mine.length == len(PROMPT) + len(said)
        assert said == text


def test_sequences_that_are_decided_together_say_what_each_says_alone() -> None:
    """Of any kind, each with guesses of its own, right and wrong."""
    kinds = [
        Sampling(),
        Sampling(1.0, seed=3, logprobs=2),
        Sampling(0.7, 4, 0.9, seed=4),
        Sampling(presence_penalty=2.0, logprobs=0),
        Sampling(1.5, repetition_penalty=1.5, logit_bias=((3, 1.0),), seed=5),
        Sampling(min_tokens=3),
        Sampling(acceptance=RELAXED),
    ]
    rows = torch.randn(len(kinds), 8, VOCAB, generator=torch.Generator().manual_seed(7))
    alone, asked = [], []
    for kind, logits in zip(kinds, rows, strict=True):
        text = expected_text(kind, logits)
        nodes, parents, guesses = chain(*text[: len(asked) % 4], 0, *text[:2])
        size = len(nodes)
        mine = opened(kind, eos=(1,))
        mine.guess(told(0, {nodes[1]: {2: -1.0}}), since=0)
        alone.append(decided(mine, TIP, nodes, parents, guesses, logits[:size]))
        again = opened(kind, eos=(1,))
        again.guess(told(0, {nodes[1]: {2: -1.0}}), since=0)
        asked.append((again, Walk(TIP, nodes, parents, guesses)))
        assert again.length == len(PROMPT) < mine.length
    sizes = [len(walk.nodes) for _, walk in asked]
    decide(asked, torch.cat([part[:size] for part, size in zip(rows, sizes, strict=True)]))
    assert [(walk.tokens, walk.reports) for _, walk in asked] == alone
    assert {len(tokens) for tokens, _ in alone} > {1, 2, 3}


def test_a_prompt_is_scored_in_any_portions():
    prompt = (3, 0, 5, 2, 2)
    rows = torch.randn(len(prompt) + 1, VOCAB, generator=torch.Generator().manual_seed(2))
    expected = logprobs(rows[: len(prompt) - 1], prompt[1:], 2)
    terms_ = terms.pack(Sampling(prompt_logprobs=2), ())
    for width in (1, 2, 3, 5):
        # One token was decided before: it is none of the prompt's.
        mine = Verifier(Opening(1, 1, len(prompt), len(prompt) + 1, terms_))
        found: list[TokenLogprobs] = []
        while mine.unscored:
            at = len(prompt) - mine.unscored
            part = slice(at, min(at + width, len(prompt)))
            told = mine.score(prompt[part], rows[part])
            assert told.base == len(found) + 1
            found += told.logprobs
        assert found == expected
    assert opened(Sampling(logprobs=2)).unscored == 0


def test_a_judge_goes_on_where_an_earlier_one_ended():
    asked = Sampling(1.0, presence_penalty=2.0, seed=2)
    rows = torch.zeros(6, VOCAB)
    text = expected_text(asked, rows)
    successor = opened(asked, text[:4])
    nodes, parents, guesses = chain(text[4])
    assert decided(successor, TIP, nodes, parents, guesses, rows[4:])[0] == text[4:]


def test_a_wrong_guess_ends_the_walk_and_leaves_no_trace():
    asked = {"temperature": 0.0, "frequency_penalty": 2.0}
    nodes, parents, guesses = chain(5, 5, 5)
    logits = torch.tensor([[0, 0, 0, 4.0, 3.0, 0]] * 4)
    mine = verifier(**asked)
    assert decided(mine, TIP, nodes, parents, guesses, logits)[0] == [3]
    assert decided(mine, TIP, [TIP], [0], [3], logits[:1])[0] == [4]  # 4 - 2 < 3
    assert mine.length == len(PROMPT) + 2


def test_a_batch_without_the_tip_decides_nothing():
    assert decided(verifier(temperature=1.0), 99, *chain(3), torch.zeros(2, VOCAB)) == ([], [])


# --- the lossy rules --------------------------------------------------------------------------

# Of probability .47, .43, .06, .03, .00, .00.
LOGITS = torch.tensor([5.0, 4.9, 3.0, 2.2, -9.0, -9.0])


def after_tip(spec: VerifierSpec, guesses: dict[int, float], *, eos: tuple[int, ...] = ()) -> int:
    """The token after the tip, whose guessed children have these log-probabilities."""
    mine = opened(spec.sampling(0), eos=eos)
    mine.guess(told(0, dict.fromkeys([TIP], guesses)), since=0)
    return decided(mine, TIP, [TIP], [0], [PROMPT[-1]], LOGITS[None])[0][0]


def told(step: int, below: dict[int, dict[int, float]]) -> Guesses:
    rows = [(node, *guess) for node, guesses in below.items() for guess in guesses.items()]
    parents, tokens, logps = zip(*rows, strict=True) if rows else ((), (), ())
    return Guesses(step, np.array(parents, int), np.array(tokens, int), np.array(logps, float))


@pytest.mark.parametrize(
    ("guesses", "eos", "expected"),
    [
        ({1: -3.0, 2: -0.1}, (), 1),  # what the target likes most, whatever the draft thinks
        ({4: -0.1}, (), 4),  # however little it likes it
        ({4: -0.1}, (3,), 3),  # the end of the text is always a candidate
        ({1: -0.1}, (3, 99), 1),  # 99: no token of this vocabulary
        ({}, (3,), 0),  # nothing was guessed: the target's own token
    ],
)
def test_relaxed_takes_the_guess_that_the_target_finds_most_probable(guesses, eos, expected):
    assert after_tip(Relaxed(temperature=0.0), guesses, eos=eos) == expected
    if guesses:  # and whatever would have been drawn
        assert {after_tip(Relaxed(seed=s), guesses, eos=eos) for s in range(9)} == {expected}


@pytest.mark.parametrize(
    ("guesses", "eos", "expected"),
    [
        ({0: -3.0, 1: -0.1}, (), 1),  # both within .9: what the draft likes most
        ({0: -3.0, 3: -0.1}, (), 0),  # 3 lies outside
        ({3: -0.1, 4: -0.1}, (), 0),  # none lies within: the target's own token
        ({}, (1,), 0),
        ({0: -3.0}, (1,), 1),  # the end of the text, with the target's probability
        ({0: -0.2}, (1,), 0),
        ({0: -0.2}, (3, 99), 0),  # but not from outside
    ],
)
def test_strict_takes_the_guess_within_the_top_p_that_the_draft_finds_most_probable(
    guesses, eos, expected
):
    spec = Strict(temperature=0.0, top_p=0.85)
    assert after_tip(spec, guesses, eos=eos) == expected
    if guesses.keys() & {0, 1}:
        drawn = {after_tip(Strict(seed=s, top_p=0.85), guesses, eos=eos) for s in range(9)}
        assert drawn == {expected}


def test_strict_draws_where_nothing_was_guessed():
    assert {after_tip(Strict(seed=seed), {}) for seed in range(20)} == {0, 1}


def test_what_the_draft_thinks_of_guesses_is_forgotten_once_they_are_decided():
    mine = verifier(acceptance=RELAXED)
    for step in range(100):
        mine.guess(told(step, {step: {2: -1.0}}), since=step - 3)
    assert decided(mine, 99, [99], [98], [2], LOGITS[None])[0] == [2]
    assert decided(mine, 90, [90], [89], [2], LOGITS[None])[0] == [0]


def test_a_batch_without_guesses_is_told_and_read_too():
    for guesses in (told(7, {}), told(2**40, {3: {5: -0.25, 9: -2.0}, 4: {5: -1.5}})):
        read = unpack(pack(guesses))
        assert read.step == guesses.step
        for name in ("parents", "tokens", "logps"):
            assert getattr(read, name).tolist() == getattr(guesses, name).tolist()


def test_the_lossy_verifiers_say_so_and_the_others_are_not():
    lossy = [spec.sampling(0).lossy for spec in (Greedy(), Sample(), Relaxed(), Strict())]
    assert lossy == [False, False, True, True]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_does_not_end_before_it_has_so_many_tokens(temperature: float) -> None:
    """Also where it is taken up again, and whatever was guessed."""
    ends = 3
    likes_to_end = torch.zeros(4, VOCAB).index_fill_(1, torch.tensor([ends]), 50.0)
    asked = Sampling(temperature, seed=1, min_tokens=2)
    for answer, free in (((), 2), ((5,), 1), ((5, 5), 0)):
        mine = opened(asked, answer, eos=(ends, 99))
        found = []
        for row in likes_to_end:
            tokens, _ = decided(mine, TIP, [TIP], [0], [PROMPT[-1]], row[None])
            found += tokens
        assert [token == ends for token in found] == [i >= free for i in range(4)]


def test_a_lossy_rule_does_not_end_it_either() -> None:
    asked = Sampling(min_tokens=1, acceptance=RELAXED)
    mine = opened(asked, eos=(0,))
    mine.guess(told(0, {TIP: {0: -0.1}}), since=0)
    assert decided(mine, TIP, [TIP], [0], [PROMPT[-1]], LOGITS[None])[0] == [1]
