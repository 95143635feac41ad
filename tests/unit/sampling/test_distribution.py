import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import SequenceBiasLogitsProcessor

from pipespec.core import SamplingParams
from pipespec.sampling.distribution import TokenCounts, adjust, candidates, distribution, logprobs
from pipespec.sampling.draw import SORTED_FIRST, draw
from pipespec.sampling.params import MAX_REPETITION, MIN_REPETITION, check_sampling
from tests.helpers.sampling import VOCAB, some_logits

PROMPT, ANSWER = (3, 5, 5, 60, 61), (7, 5, 7, 7)
CPU = torch.device("cpu")


def ours(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    return distribution(
        adjust(logits, params, TokenCounts(PROMPT, ANSWER, len(logits), CPU)), params
    )


def theirs(logits: torch.Tensor, *processors: object) -> torch.Tensor:
    ids = torch.tensor([PROMPT + ANSWER])
    return LogitsProcessorList(processors)(ids, logits.double()[None])[0].log_softmax(0)


@pytest.mark.parametrize(
    ("params", "processors"),
    [
        ({"temperature": 0.3}, [TemperatureLogitsWarper(0.3)]),
        ({"temperature": 4.0}, [TemperatureLogitsWarper(4.0)]),
        ({"top_k": 1}, [TopKLogitsWarper(1)]),
        ({"top_k": 7}, [TopKLogitsWarper(7)]),
        ({"top_k": 5000}, [TopKLogitsWarper(5000)]),
        ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
        ({"top_p": 0.001}, [TopPLogitsWarper(0.001)]),
        ({"top_p": 0.9999}, [TopPLogitsWarper(0.9999)]),
        ({"min_p": 0.05}, [MinPLogitsWarper(0.05)]),
        ({"min_p": 1.0}, [MinPLogitsWarper(1.0)]),
        ({"repetition_penalty": 1.7}, [RepetitionPenaltyLogitsProcessor(1.7)]),
        ({"repetition_penalty": 0.6}, [RepetitionPenaltyLogitsProcessor(0.6)]),
        (
            {"logit_bias": ((4, 2.5), (60, -7.0))},
            [SequenceBiasLogitsProcessor([[[4], 2.5], [[60], -7.0]])],
        ),
        # What `generate` applies, in its order.
        (
            {
                "logit_bias": ((5, 2.5),),
                "repetition_penalty": 1.3,
                "temperature": 1.4,
                "top_k": 30,
                "top_p": 0.9,
            },
            [
                SequenceBiasLogitsProcessor([[[5], 2.5]]),
                RepetitionPenaltyLogitsProcessor(1.3),
                TemperatureLogitsWarper(1.4),
                TopKLogitsWarper(30),
                TopPLogitsWarper(0.9),
            ],
        ),
        (
            {"temperature": 1.4, "top_k": 30, "min_p": 0.02},
            [TemperatureLogitsWarper(1.4), TopKLogitsWarper(30), MinPLogitsWarper(0.02)],
        ),
        # Where min-p and top-p meet, vLLM's order.
        (
            {"temperature": 1.4, "top_k": 30, "min_p": 0.05, "top_p": 0.9},
            [
                TemperatureLogitsWarper(1.4),
                MinPLogitsWarper(0.05),
                TopKLogitsWarper(30),
                TopPLogitsWarper(0.9),
            ],
        ),
    ],
    # The same in every process that collects them, which a processor's `str` is not.
    ids=lambda value: str(value) if isinstance(value, dict) else str(len(value)),
)
def test_distribution_equals_that_of_transformers(params, processors):
    for seed in range(20):
        logits = some_logits(seed)
        mine = ours(logits, SamplingParams(**{"temperature": 1.0, **params}))
        expected = theirs(logits, *processors)
        assert torch.equal(mine.isfinite(), expected.isfinite())
        assert torch.allclose(mine.exp(), expected.exp(), atol=1e-12)


@pytest.mark.parametrize("scale", [0.1, 3.0])  # the nucleus is nearly everything, or little
def test_top_p_over_a_large_vocabulary_equals_that_of_transformers(scale):
    logits = scale * some_logits(0, 5 * SORTED_FIRST)
    for top_p in (0.1, 0.9, 0.999):
        mine = ours(logits, SamplingParams(1.0, top_p=top_p))
        expected = theirs(logits, TopPLogitsWarper(top_p))
        assert torch.equal(mine.isfinite(), expected.isfinite())


def test_top_p_of_what_a_large_top_k_leaves_equals_that_of_transformers():
    logits = 0.5 * some_logits(0, 5 * SORTED_FIRST)
    params = SamplingParams(1.0, top_k=3 * SORTED_FIRST, top_p=0.7)
    expected = theirs(logits, TopKLogitsWarper(params.top_k), TopPLogitsWarper(params.top_p))
    found = candidates(logits.double()[None], [params], SORTED_FIRST)
    kept = found.ids[0][found.weights[0].isfinite()]
    assert bool(found.complete)
    assert sorted(kept.tolist()) == expected.isfinite().nonzero()[:, 0].tolist()


def test_presence_and_frequency_penalties_ignore_the_prompt():
    """The definition of the OpenAI API, which vLLM follows."""
    logits = some_logits(1)
    params = SamplingParams(presence_penalty=0.7, frequency_penalty=-0.25)
    expected = logits.double()
    for token in range(VOCAB):
        count = ANSWER.count(token)
        expected[token] -= -0.25 * count + 0.7 * (count > 0)
    mine = adjust(logits, params, TokenCounts(PROMPT, ANSWER, VOCAB, CPU))
    assert torch.allclose(mine, expected, atol=1e-12)
    assert mine[3] == logits[3] and mine[7] != logits[7]


def test_penalties_apply_after_bias_and_repetition_penalty():
    """vLLM: bias, then repetition, then frequency and presence."""
    logits = torch.tensor([-1.0, 2.0, 0.5])
    params = SamplingParams(
        logit_bias=((0, 3.0), (1, -3.0)),
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
    )
    mine = adjust(logits, params, TokenCounts([1], [0, 0], 3, CPU))
    assert mine.tolist() == [2.0 / 2 - 2 * 0.25 - 0.5, -1.0 * 2, 0.5]


def test_appended_token_counts_equal_those_of_the_whole_text():
    grown = TokenCounts(PROMPT, (), VOCAB, CPU)
    for token in ANSWER:
        grown.append(token)
    whole = TokenCounts(PROMPT, ANSWER, VOCAB, CPU)
    assert torch.equal(grown.seen, whole.seen) and torch.equal(grown.counts, whole.counts)


def test_adjusting_leaves_the_given_logits_unchanged():
    logits = some_logits(0).double()
    before = logits.clone()
    ours(logits, SamplingParams(1.0, 5, 0.5, 0.1, 1.5, 1.0, 1.0, ((1, 2.0),)))
    assert torch.equal(logits, before)


def test_ties_at_the_edge_of_top_k_stay_and_of_top_p_go_by_token_id():
    tied = torch.tensor([1.0, 1.0, 1.0, 1.0])
    assert distribution(tied.double(), SamplingParams(1.0, top_k=2)).isfinite().all()
    kept = distribution(tied.double(), SamplingParams(1.0, top_p=0.5)).isfinite()
    assert kept.tolist() == [True, True, False, False]


@given(
    st.floats(1e-300, 1e6), st.integers(0, 9), st.floats(1e-9, 1), st.floats(0, 1), st.integers()
)
def test_every_allowed_setting_leaves_a_distribution(temperature, top_k, top_p, min_p, seed):
    logits = some_logits(seed % 1000, 8)
    result = distribution(logits.double(), SamplingParams(temperature, top_k, top_p, min_p))
    assert float(result.exp().sum()) == pytest.approx(1)
    assert result.argmax() == logits.argmax()


def test_logprobs_are_those_of_unadjusted_logits():
    logits = some_logits(5)
    expected = logits.double().log_softmax(0)
    (found,) = logprobs(logits[None], [13], 3)
    assert found.logprob == pytest.approx(float(expected[13]))
    best = expected.topk(3)
    assert [token for token, _ in found.top] == best.indices.tolist()
    assert [value for _, value in found.top] == pytest.approx(best.values.tolist())
    other = some_logits(6)
    rows = torch.stack((other, logits))
    assert logprobs(rows, [2, 13], 3) == [*logprobs(other[None], [2], 3), found]
    assert logprobs(logits[None], [13], 0)[0].top == ()
    impossible = torch.tensor([[0.0, -math.inf]])
    assert logprobs(impossible, [0], 2)[0].top == ((0, 0.0),)


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1.0, 1e308])
@pytest.mark.parametrize("repetition_penalty", [MIN_REPETITION, 1.0, MAX_REPETITION])
@pytest.mark.parametrize("cut", [{"top_p": 5e-324}, {"min_p": 1.0}, {"top_k": 1}, {}])
def test_allowed_settings_leave_a_token_to_draw(temperature, repetition_penalty, cut):
    """A rank that could not draw would end the epoch, and meet the request again in the next."""
    params = SamplingParams(temperature, repetition_penalty=repetition_penalty, seed=1, **cut)
    check_sampling(params)
    logits = some_logits(3)
    scores = adjust(logits, params, TokenCounts((1, 2), (3, 3), len(logits), CPU))
    (token,) = draw(scores[None], [params], [5])
    assert token is not None and 0 <= token < len(logits)
