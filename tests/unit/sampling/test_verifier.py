"""What the last stage accepts, given the logits of a batch."""

from __future__ import annotations

import pytest
import torch

from pipespec.core import Request, Sampling
from pipespec.sampling.distribution import Tally
from pipespec.sampling.spec import Greedy, Relaxed, Sample, Strict
from pipespec.sampling.verifier import Verifier
from tests.helpers.sampling import sample

VOCAB = 6
PROMPT = (1, 2)
TIP = 1
CPU = torch.device("cpu")


def verifier(**asked: object) -> Verifier:
    return Verifier(Request(1, PROMPT, 9, sampling=Sampling(**asked)))


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
        mine = Verifier(Request(1, PROMPT, 9, sampling=asked))
        said: list[int] = []
        while len(said) < len(text):
            part = text[len(said) : len(said) + width]
            nodes, parents, guesses = chain(*part[:-1])
            logits = rows[len(said) : len(said) + len(part)]
            tokens, reports = mine.decide(TIP, nodes, parents, guesses, logits)
            assert len(reports) == (0 if asked.logprobs is None else len(tokens))
            said += tokens
            assert mine.length == len(PROMPT) + len(said)
        assert said == text


def test_a_judge_goes_on_where_an_earlier_one_ended():
    asked = Sampling(1.0, presence_penalty=2.0, seed=2)
    rows = torch.zeros(6, VOCAB)
    text = expected_text(asked, rows)
    successor = Verifier(Request(1, PROMPT, 9, sampling=asked), text[:4])
    nodes, parents, guesses = chain(text[4])
    assert successor.decide(TIP, nodes, parents, guesses, rows[4:])[0] == text[4:]


def test_a_wrong_guess_ends_the_walk_and_leaves_no_trace():
    asked = {"temperature": 0.0, "frequency_penalty": 2.0}
    nodes, parents, guesses = chain(5, 5, 5)
    logits = torch.tensor([[0, 0, 0, 4.0, 3.0, 0]] * 4)
    mine = verifier(**asked)
    assert mine.decide(TIP, nodes, parents, guesses, logits)[0] == [3]
    assert mine.decide(TIP, [TIP], [0], [3], logits[:1])[0] == [4]  # 4 - 2 < 3
    assert mine.length == len(PROMPT) + 2


def test_a_batch_without_the_tip_decides_nothing():
    assert verifier(temperature=1.0).decide(99, *chain(3), torch.zeros(2, VOCAB)) == ([], [])


# --- the lossy rules --------------------------------------------------------------------------

LOGITS = torch.tensor([5.0, 4.9, 3.0, 0.0, -9.0, -9.0])


def after_tip(guesses: list[int], **asked: object) -> list[int]:
    """The tokens decided when the tip's children are `guesses`, all with the same logits."""
    rows = LOGITS.expand(1 + len(guesses), VOCAB)
    nodes = [TIP, *range(10, 10 + len(guesses))]
    parents = [0, *[TIP] * len(guesses)]
    return verifier(**asked).decide(TIP, nodes, parents, [PROMPT[-1], *guesses], rows)[0]


def test_strict_accepts_the_most_probable_token_whether_drawn_or_not():
    asked = Strict().sampling(0)
    drawn_other = [s for s in range(50) if after_tip([], temperature=1.0, seed=s) != [0]]
    assert len(drawn_other) > 5
    for seed in drawn_other:
        lossy = {"temperature": 1.0, "seed": seed, "accept_top": asked.accept_top}
        assert after_tip([0], **lossy)[0] == 0
        # A guess that is not the most probable one is accepted only if it was drawn.
        assert after_tip([2], **lossy)[0] == after_tip([], temperature=1.0, seed=seed)[0]


@pytest.mark.parametrize(
    ("guesses", "accept_top", "accept_ratio", "expected"),
    [
        ([1], 2, 0.5, 1),  # probability 0.90 of the highest
        ([1], 1, 0.5, 0),
        ([1], 2, 0.95, 0),
        ([2, 1], 3, 0.0, 1),  # the most probable of the guesses
        ([2], 3, 0.1, 2),  # 0.135 of the highest
        ([3], 3, 0.0, 0),
        ([], 6, 0.0, 0),
    ],
)
def test_relaxed_accepts_a_probable_guess(guesses, accept_top, accept_ratio, expected):
    got = after_tip(guesses, accept_top=accept_top, accept_ratio=accept_ratio)
    assert got[0] == expected
    assert (len(got) > 1) == (expected in guesses)


def test_what_cannot_be_drawn_is_not_accepted_either():
    assert after_tip([3], temperature=1.0, top_k=3, accept_top=6, seed=1)[0] != 3


def test_the_lossy_verifiers_say_so_and_the_others_are_not():
    lossy = [spec.sampling(0).lossy for spec in (Greedy(), Sample(), Relaxed(), Strict())]
    assert lossy == [False, False, True, True]
