"""How the parameters of the Python interface become those of a request, and what is refused."""

from typing import Any

import pytest

from pipespec import SamplingParams, StructuredOutputsParams
from pipespec.core import SamplingParams as RequestParams
from pipespec.errors import ConfigError
from pipespec.sampling.params import MAX_SEED, MIN_SEED

REGEX = StructuredOutputsParams(regex="a")


def test_the_defaults_are_greedy_decoding() -> None:
    assert SamplingParams().answers([5]) == [[RequestParams()]]


def test_every_value_reaches_the_request() -> None:
    given: dict[str, Any] = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "logprobs": 3,
        "prompt_logprobs": 0,
        "min_tokens": 4,
        "acceptance": "relaxed",
    }
    ((made,),) = SamplingParams(**given, seed=9, logit_bias={7: -1.5, 8: 2}).answers([5])
    assert made == RequestParams(**given, seed=9, logit_bias=((7, -1.5), (8, 2)))


def seeds(params: SamplingParams, *fresh: int) -> list[list[int]]:
    return [[one.seed for one in of_prompt] for of_prompt in params.answers(fresh)]


def test_several_answers_have_seeds_in_a_row() -> None:
    params = SamplingParams(n=3, temperature=1, seed=MAX_SEED)
    assert seeds(params, 5) == [[MAX_SEED, MIN_SEED, MIN_SEED + 1]]
    assert seeds(SamplingParams(n=2, temperature=1), 5) == [[5, 6]]


def test_each_prompt_has_a_fresh_seed_unless_one_is_given() -> None:
    assert seeds(SamplingParams(temperature=1), 5, 70) == [[5], [70]]
    assert seeds(SamplingParams(temperature=1, n=2, seed=3), 5, 70) == [[3, 4]] * 2


def test_a_single_stop_text_may_be_given_alone() -> None:
    assert SamplingParams(stop="\n").stop == ("\n",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"top_p": 0}, "top_p is 0.0, but must be more than 0"),
        ({"max_tokens": 0}, "max_tokens is 0, but must be a whole number"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens is 4, but must be .* 3"),
        ({"n": 0, "temperature": 1}, "n is 0, but must be a whole number"),
        ({"n": 2}, "n is 2, but with temperature 0 all answers are equal; set temperature"),
        ({"stop": ["a", ""]}, "stop holds an empty text"),
        ({"stop_token_ids": [-1]}, "stop_token_ids is -1, but must be"),
        ({"stop_token_ids": [7] * 1025}, "stop_token_ids holds 1025 tokens, but may hold 1024"),
        ({"stop": 7}, "stop is 7, but must be"),
        ({"logit_bias": {3: 101}}, "logit_bias is 3:101, but must be"),
        ({"logit_bias": {"king": 1}}, "logit_bias holds 'king': 1, but must hold token ids"),
        ({"structured_outputs": {"regex": "a"}}, "must be a StructuredOutputsParams"),
        ({"priority": 2**40}, "priority is 1099511627776, but must be"),
        ({"ignore_eos": True, "structured_outputs": REGEX}, "a structured output ends by itself"),
    ],
)
def test_what_is_out_of_range_is_refused_in_one_sentence(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        SamplingParams(**given)
    assert str(refused.value).count("\n") == 0
    assert str(refused.value).endswith(".")


@pytest.mark.parametrize(
    ("form", "matches"),
    [
        ({"json": {"enum": ["yes"]}}, "yes"),
        ({"json": '{"enum": ["yes"]}'}, "yes"),
        ({"regex": "[ab]+"}, "[ab]+"),
        ({"choice": ["left", "right"]}, "right"),
        ({"grammar": 'start: "left"'}, "left"),
    ],
)
def test_a_form_becomes_the_grammar_of_the_request(form: dict[str, Any], matches: str) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**form))
    ((made,),) = params.answers([0])
    assert matches in made.grammar


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({}, "has nothing, but takes one of json, regex, choice and grammar"),
        ({"regex": "a", "choice": ["a"]}, "has regex and choice, but takes one"),
        ({"json": "{"}, "json cannot be followed"),
        ({"json": {"type": "nothing"}}, "json cannot be followed"),
        ({"regex": "("}, "regex cannot be followed"),
        ({"choice": []}, "choice is empty"),
    ],
)
def test_a_form_that_cannot_be_followed_is_refused(form: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SamplingParams(structured_outputs=StructuredOutputsParams(**form)).answers([0])
