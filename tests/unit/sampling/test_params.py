import math

import pytest

from pipespec.core import RELAXED, SamplingParams
from pipespec.errors import ConfigError
from pipespec.sampling.params import SamplingConfig, check_sampling, check_vocabulary


def test_unset_seed_is_fresh():
    assert SamplingConfig(temperature=1).params(77).seed == 77
    assert SamplingConfig(temperature=1, seed=5).params(77).seed == 5
    assert SamplingConfig(acceptance="strict", top_p=0.9, seed=0).params(77).seed == 0


def test_sampling_settings_reach_the_request():
    spec = SamplingConfig(
        acceptance=RELAXED,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias=["3:-1.5", "4:2"],
        logprobs=2,
        temperature=0.7,
        top_k=9,
        top_p=0.8,
        min_p=0.1,
        seed=6,
    )
    bias = ((3, -1.5), (4, 2.0))
    expected = SamplingParams(0.7, 9, 0.8, 0.1, 1.1, 0.2, 0.3, bias, 6, 2, acceptance=RELAXED)
    assert spec.params(0) == expected
    assert SamplingConfig(logit_bias=["3:-1.5"]).params(1) == SamplingParams(
        logit_bias=((3, -1.5),)
    )


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0.0, 1e-9, 50.0], [-0.1, math.inf, math.nan]),
        ("top_k", [0, 1, 10**6], [-1]),
        ("top_p", [1e-9, 1.0], [0.0, 1.1, math.nan]),
        ("min_p", [0.0, 1.0], [-0.1, 1.1, math.nan]),
        ("repetition_penalty", [0.01, 100.0], [0.0, 5e-324, -1.0, 1e300, math.inf]),
        ("presence_penalty", [-2.0, 2.0], [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2.0, 2.0], [-2.1, 2.1]),
        (
            "logit_bias",
            [((5, -100.0), (6, 100.0))],
            [((5, 101.0),), ((-1, 1.0),), ((1, math.nan),)],
        ),
        ("seed", [-(2**63), 0, 2**63 - 1], [-(2**63) - 1, 2**63]),
        ("logprobs", [None, 0, 20], [-1, 21]),
    ],
)
def test_value_out_of_range_is_named_in_one_sentence(name, good, bad):
    for value in good:
        check_sampling(SamplingParams(**{name: value}))
    for value in bad:
        with pytest.raises(ConfigError, match=rf"^sampling\.{name} is .*, but must be .*\.$"):
            check_sampling(SamplingParams(**{name: value}))


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
def test_unreadable_bias_is_named(bias, part):
    with pytest.raises(ConfigError, match=part):
        SamplingConfig(logit_bias=bias)


def test_bias_beyond_the_vocabulary_is_refused():
    check_vocabulary(SamplingParams(logit_bias=((9, 1.0),)), 10)
    with pytest.raises(ConfigError, match="token 10, but the target's vocabulary ends at 9"):
        check_vocabulary(SamplingParams(logit_bias=((10, 1.0),)), 10)


def test_strict_acceptance_without_a_cutoff_is_refused():
    with pytest.raises(ConfigError, match=r"sampling\.top_p=0\.9"):
        SamplingConfig(acceptance="strict")
