"""From logits to a token: the distribution, the keyed draw, and the limits."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice

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

from pipespec.core import Sampling
from pipespec.errors import ConfigError
from pipespec.sampling import sampler
from pipespec.sampling.sampler import Tally, adjust, check_sampling, distribution, draw, uniforms
from pipespec.sampling.verify import Sample

VOCAB = 97
PROMPT, ANSWER = (3, 5, 5, 60, 61), (7, 5, 7, 7)
CPU = torch.device("cpu")


def some_logits(seed: int, size: int = VOCAB) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(size, generator=generator)


def ours(logits: torch.Tensor, asked: Sampling) -> torch.Tensor:
    return distribution(adjust(logits, asked, Tally(PROMPT, ANSWER, len(logits), CPU)), asked)


def theirs(logits: torch.Tensor, *processors: object) -> torch.Tensor:
    ids = torch.tensor([PROMPT + ANSWER])
    return LogitsProcessorList(processors)(ids, logits.double()[None])[0].log_softmax(0)


# --- the distribution -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "processors"),
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
def test_the_distribution_is_that_of_transformers(asked, processors):
    for seed in range(20):
        logits = some_logits(seed)
        mine = ours(logits, Sampling(**{"temperature": 1.0, **asked}))
        expected = theirs(logits, *processors)
        assert torch.equal(mine.isfinite(), expected.isfinite())
        assert torch.allclose(mine.exp(), expected.exp(), atol=1e-12)


@pytest.mark.parametrize("scale", [0.1, 3.0])  # the nucleus is nearly everything, or little
def test_top_p_over_a_large_vocabulary_is_that_of_transformers(scale):
    logits = scale * some_logits(0, 5 * sampler.SORTED_FIRST)
    for top_p in (0.1, 0.9, 0.999):
        mine = ours(logits, Sampling(1.0, top_p=top_p))
        expected = theirs(logits, TopPLogitsWarper(top_p))
        assert torch.equal(mine.isfinite(), expected.isfinite())


def test_presence_and_frequency_penalties_look_at_the_answer_alone():
    """The definition of the OpenAI API, which vLLM follows."""
    logits = some_logits(1)
    asked = Sampling(presence_penalty=0.7, frequency_penalty=-0.25)
    expected = logits.double()
    for token in range(VOCAB):
        count = ANSWER.count(token)
        expected[token] -= -0.25 * count + 0.7 * (count > 0)
    mine = adjust(logits, asked, Tally(PROMPT, ANSWER, VOCAB, CPU))
    assert torch.allclose(mine, expected, atol=1e-12)
    assert mine[3] == logits[3] and mine[7] != logits[7]


def test_penalties_follow_the_repetition_penalty_and_the_bias():
    """vLLM: bias, then repetition, then frequency and presence."""
    logits = torch.tensor([-1.0, 2.0, 0.5])
    asked = Sampling(
        logit_bias=((0, 3.0), (1, -3.0)),
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
    )
    mine = adjust(logits, asked, Tally([1], [0, 0], 3, CPU))
    assert mine.tolist() == [2.0 / 2 - 2 * 0.25 - 0.5, -1.0 * 2, 0.5]


def test_a_tally_that_grows_is_that_of_the_whole_text():
    grown = Tally(PROMPT, (), VOCAB, CPU)
    for token in ANSWER:
        grown.append(token)
    whole = Tally(PROMPT, ANSWER, VOCAB, CPU)
    assert torch.equal(grown.seen, whole.seen) and torch.equal(grown.counts, whole.counts)


def test_the_logits_given_are_left_alone():
    logits = some_logits(0).double()
    before = logits.clone()
    ours(logits, Sampling(1.0, 5, 0.5, 0.1, 1.5, 1.0, 1.0, ((1, 2.0),)))
    assert torch.equal(logits, before)


def test_equals_at_the_edge_of_top_k_stay_and_of_top_p_go_by_token_id():
    tied = torch.tensor([1.0, 1.0, 1.0, 1.0])
    assert distribution(tied.double(), Sampling(1.0, top_k=2)).isfinite().all()
    kept = distribution(tied.double(), Sampling(1.0, top_p=0.5)).isfinite()
    assert kept.tolist() == [True, True, False, False]


@given(
    st.floats(1e-300, 1e6), st.integers(0, 9), st.floats(1e-9, 1), st.floats(0, 1), st.integers()
)
def test_every_setting_in_range_leaves_a_distribution(temperature, top_k, top_p, min_p, seed):
    logits = some_logits(seed % 1000, 8)
    result = distribution(logits.double(), Sampling(temperature, top_k, top_p, min_p))
    assert float(result.exp().sum()) == pytest.approx(1)
    assert result.argmax() == logits.argmax()


# --- the draw ---------------------------------------------------------------------------------


def splitmix(state: int):
    """Vigna's splitmix64.c, one number at a time."""
    mask = 2**64 - 1
    while True:
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        yield z ^ (z >> 31)


def test_the_stream_of_a_position_is_splitmix64():
    first = list(islice(splitmix(1234567), 3))
    assert first == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    for seed, position in ((0, 0), (42, 7), (2**63 - 1, 131071)):
        key = next(splitmix(seed))  # hashed once, then again with the position
        state = next(splitmix((key + position * 0x9E3779B97F4A7C15) % 2**64))
        expected = [((z >> 12) + 0.5) / 2**52 for z in islice(splitmix(state), 40)]
        assert uniforms(seed, position, torch.arange(40)).tolist() == expected


def test_a_number_depends_on_seed_position_and_token_alone():
    ids = torch.tensor([90, 3, 41])
    whole = uniforms(5, 9, torch.arange(100))
    state = torch.random.get_rng_state()
    assert torch.equal(uniforms(5, 9, ids), whole[ids])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not torch.isin(uniforms(5, 10, torch.arange(100)), whole).any()
    assert not torch.isin(uniforms(6, 9, torch.arange(100)), whole).any()
    assert whole.min() > 0 and whole.max() < 1


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Pearson's statistic, as standard deviations from its mean (degrees of freedom)."""
    expected = probabilities * counts.sum()
    freedom = len(counts) - 1
    return float(((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_draws_follow_the_distribution_and_do_not_depend_on_each_other(along):
    logprobs = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03]).double().log()
    num = 12_000
    drawn = torch.tensor(
        [draw(logprobs, *((i, 3) if along == "seeds" else (3, i))) for i in range(num)]
    )
    assert abs(chi_square(drawn.bincount(minlength=5), logprobs.exp())) < 5
    pairs = drawn[:-1] * 5 + drawn[1:]
    joint = (logprobs[:, None] + logprobs[None]).exp().flatten()
    assert abs(chi_square(pairs.bincount(minlength=25), joint)) < 5


def test_what_cannot_be_drawn_never_is():
    logits = some_logits(2)
    asked = Sampling(1.0, top_k=4)
    allowed = set(logits.topk(4).indices.tolist())
    drawn = {sampler.sample(logits, replace(asked, seed=s), 0) for s in range(300)}
    assert drawn == allowed


def test_a_few_last_bits_of_the_logits_do_not_change_a_draw():
    """Logits depend in their last bits on the shape of the batch they were computed in."""
    wide = some_logits(3, 20_000)
    noise = 1e-5 * torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    asked = Sampling(1.5, top_p=0.95)
    same = [
        sampler.sample(wide, replace(asked, seed=s), s)
        == sampler.sample(wide + noise, replace(asked, seed=s), s)
        for s in range(100)
    ]
    assert all(same)


def test_temperature_zero_is_the_arg_max_of_the_adjusted_logits():
    logits = some_logits(4)
    best = int(logits.argmax())
    assert sampler.sample(logits, Sampling(top_k=3, seed=9), 0) == best
    banned = Sampling(logit_bias=((best, -100.0),))
    assert sampler.sample(logits, banned, 0) == int(logits.topk(2).indices[1])


# --- log-probabilities ------------------------------------------------------------------------


def test_log_probabilities_are_those_of_the_target_itself():
    logits = some_logits(5)
    expected = logits.double().log_softmax(0)
    found = sampler.logprobs(logits, 13, 3)
    assert found.logprob == pytest.approx(float(expected[13]))
    best = expected.topk(3)
    assert [token for token, _ in found.top] == best.indices.tolist()
    assert [value for _, value in found.top] == pytest.approx(best.values.tolist())
    assert sampler.logprobs(logits, 13, 0).top == ()
    impossible = torch.tensor([0.0, -math.inf])
    assert sampler.logprobs(impossible, 0, 2).top == ((0, 0.0),)


# --- limits -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0.0, 1e-9, 50.0], [-0.1, math.inf, math.nan]),
        ("top_k", [0, 1, 10**6], [-1]),
        ("top_p", [1e-9, 1.0], [0.0, 1.1, math.nan]),
        ("min_p", [0.0, 1.0], [-0.1, 1.1, math.nan]),
        ("repetition_penalty", [0.1, 10.0], [0.0, -1.0, math.inf]),
        ("presence_penalty", [-2.0, 2.0], [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2.0, 2.0], [-2.1, 2.1]),
        (
            "logit_bias",
            [((5, -100.0), (6, 100.0))],
            [((5, 101.0),), ((-1, 1.0),), ((1, math.nan),)],
        ),
        ("seed", [0, 2**63 - 1], [-1, 2**63]),
        ("logprobs", [None, 0, 20], [-1, 21]),
        ("accept_top", [0, 9], [-1]),
        ("accept_ratio", [0.0, 1.0], [-0.1, 1.1]),
    ],
)
def test_a_value_out_of_range_is_named_in_one_sentence(name, good, bad):
    for value in good:
        check_sampling(Sampling(**{name: value}))
    for value in bad:
        with pytest.raises(ConfigError, match=rf"^verify\.{name} is .*, but must be .*\.$"):
            check_sampling(Sampling(**{name: value}))


@pytest.mark.parametrize(
    ("bias", "part"),
    [
        (["12"], "'12'"),
        (["a:1"], "'a:1'"),
        (["1:2:3"], "'1:2:3'"),
        (["1:x"], "as in"),
        (["7:1", "7:2"], "the token 7 twice"),
        (["7:101"], "7:101"),
    ],
)
def test_a_bias_that_cannot_be_read_is_named(bias, part):
    with pytest.raises(ConfigError, match=part):
        Sample(logit_bias=bias)


def test_a_bias_beyond_the_vocabulary_is_refused():
    sampler.check_vocabulary(Sampling(logit_bias=((9, 1.0),)), 10)
    with pytest.raises(ConfigError, match="token 10, but the target's vocabulary ends at 9"):
        sampler.check_vocabulary(Sampling(logit_bias=((10, 1.0),)), 10)
