from dataclasses import replace

import pytest
import torch

from pipespec.core import NOT_FINITE, RELAXED, STRICT, DraftTokens, SamplingParams
from pipespec.sampling.sampling_state import SamplingState
from pipespec.sampling.verifier import AcceptedPath, verify_batch
from tests.helpers.grammar import OneOf
from tests.helpers.sampling import opened as opened_state

VOCAB, EOS, TIP = 6, 5, 1
PROMPT = (1, 2)
GOOD = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
NAN, INF = float("nan"), float("inf")
SETTINGS = {
    "greedy": SamplingParams(),
    "greedy_reported": SamplingParams(logprobs=2),
    "drawn": SamplingParams(temperature=0.8, seed=3),
    "drawn_by_rank": SamplingParams(temperature=0.8, top_k=3, top_p=0.9, seed=3),
    "drawn_by_share": SamplingParams(temperature=0.8, min_p=0.1, seed=3),
    "penalised": SamplingParams(repetition_penalty=1.3, presence_penalty=0.5),
    "biased": SamplingParams(logit_bias=((3, 1.0),), temperature=0.5, seed=1),
    "grammar": SamplingParams(grammar="g"),
    "grammar_drawn": SamplingParams(temperature=1.0, grammar="g", seed=2, logprobs=1),
    "relaxed": SamplingParams(acceptance=RELAXED),
    "strict": SamplingParams(temperature=1.0, acceptance=STRICT),
}
BAD = {
    "a_nan": GOOD.index_fill(0, torch.tensor([3]), NAN),
    "all_nan": torch.full((VOCAB,), NAN),
    "an_infinity": GOOD.index_fill(0, torch.tensor([2]), INF),
    "nothing": torch.full((VOCAB,), -INF),
}


def opened(params: SamplingParams) -> SamplingState:
    # The grammar allows every token that is bad.
    texts = [(token, 0) for token in range(5)]
    return opened_state(params, PROMPT, (), (EOS,), OneOf(texts, EOS))


def new_path() -> AcceptedPath:
    return AcceptedPath(TIP, [TIP], [0], [PROMPT[-1]])


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", SETTINGS)
def test_non_finite_logits_end_their_request_alone(name, bad):
    setting = SETTINGS[name]
    beside, one, other = new_path(), new_path(), new_path()
    rows = torch.stack((GOOD, BAD[bad], GOOD))
    verify_batch(
        [(opened(setting), beside), (opened(setting), one), (opened(setting), other)], rows
    )
    assert (one.failure, one.tokens, one.logprobs) == (NOT_FINITE, [], [])
    alone = new_path()
    verify_batch([(opened(setting), alone)], GOOD[None])
    for each in (beside, other):
        assert each.failure is None and each.tokens == alone.tokens
        assert len(each.tokens) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_non_finite_logits_are_detected_in_every_dtype(dtype):
    for bad in BAD.values():
        one = new_path()
        verify_batch([(opened(SamplingParams()), one)], bad[None].to(dtype))
        assert one.failure == NOT_FINITE


@pytest.mark.parametrize(("off", "failure"), [(0, NOT_FINITE), (1, None)])
def test_non_finite_logits_fail_a_path_that_reaches_them_and_keep_the_tokens_before(off, failure):
    first = int(GOOD.argmax())
    text = AcceptedPath(TIP, [TIP, 10], [0, TIP], [PROMPT[-1], (first + off) % VOCAB])
    verify_batch([(opened(SamplingParams()), text)], torch.stack((GOOD, BAD["a_nan"])))
    assert (text.tokens, text.failure) == ([first], failure)


@pytest.mark.parametrize("name", ["greedy", "greedy_reported", "drawn", "drawn_by_rank"])
def test_barred_tokens_are_not_a_failure(name):
    """-inf, as of padding, or of tokens that a bias or a grammar bars."""
    logits = torch.where(torch.arange(VOCAB) < 2, GOOD, -INF)
    one = new_path()
    verify_batch([(opened(SETTINGS[name]), one)], logits[None])
    assert one.failure is None and one.tokens[0] < 2


def test_lossy_rule_does_not_hide_non_finite_logits():
    for name in ("relaxed", "strict"):
        mine, one = opened(SETTINGS[name]), new_path()
        parents, tokens = torch.tensor([TIP]).numpy(), torch.tensor([2]).numpy()
        mine.add_draft_tokens(
            DraftTokens(0, parents, tokens, torch.tensor([-0.1]).numpy()), since=0
        )
        verify_batch([(mine, one)], BAD["an_infinity"][None])
        assert one.failure == NOT_FINITE


@pytest.mark.parametrize("name", ["greedy", "drawn"])
def test_prompt_with_non_finite_logits_fails_the_request(name):
    mine = opened(replace(SETTINGS[name], prompt_logprobs=1))
    scored = mine.score_prompt(PROMPT, torch.stack((BAD["a_nan"], GOOD)))
    assert scored.logprobs == () and mine.prompt_failed
    one = new_path()
    verify_batch([(mine, one)], GOOD[None])
    assert (one.failure, one.tokens) == (NOT_FINITE, [])


def test_prompt_token_with_probability_zero_is_reported():
    mine = opened(SamplingParams(prompt_logprobs=1))
    (scored,) = mine.score_prompt(
        (1, 0), torch.stack((GOOD.index_fill(0, torch.tensor([0]), -INF), GOOD))
    ).logprobs
    assert scored.logprob == -INF and not mine.prompt_failed
