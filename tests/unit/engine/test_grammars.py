"""Grammars by llguidance, for the demo model's tokens."""

from __future__ import annotations

import json
import re
from random import Random
from time import process_time

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipespec.engine import grammar, tokenizer
from pipespec.engine.grammar import Grammars
from pipespec.sampling.grammar import GrammarFailed, Matcher, as_bools, only
from pipespec.system.resources import resource_dir
from tools.rig.schemas import SCHEMAS

EOS = 0
TOKENIZER = tokenizer.load(resource_dir("demo") / "target")
VOCABULARY = len(TOKENIZER.get_vocab())
GRAMMARS = Grammars(lambda: TOKENIZER, VOCABULARY, (EOS,))


def may_follow(matcher: Matcher) -> list[int]:
    return np.flatnonzero(as_bools(matcher.allowed(), VOCABULARY)).tolist()


def drawn(matcher: Matcher, seed: int, most: int = 400) -> list[int]:
    """A text whose tokens are drawn from all that may follow; the end as soon as it may."""
    random, text = Random(seed), []
    while len(text) < most and EOS not in (tokens := may_follow(matcher)):
        text.append(random.choice(tokens))
        assert matcher.consume([text[-1]]) == 1
    return text


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("seed", range(3))
def test_what_a_schema_allows_is_an_instance_of_it(name, seed):
    matcher = GRAMMARS.compile(grammar.of_json_schema(SCHEMAS[name]))
    text = drawn(matcher, seed)
    assert EOS in may_follow(matcher)
    jsonschema.validate(json.loads(TOKENIZER.decode(text)), SCHEMAS[name])


@given(st.integers(0, 2**32))
def test_texts_fit_the_regular_expression(seed):
    wanted = r"[A-C]{2}-(\d{3}|none)"
    text = TOKENIZER.decode(drawn(GRAMMARS.compile(grammar.of_regex(wanted)), seed))
    assert re.fullmatch(wanted, text)


def test_a_choice_and_a_grammar_of_either_notation():
    for made in (
        grammar.of_choice(["yes", 'no, "never"']),
        grammar.of_grammar('start: "yes" | "no, \\"never\\""'),
        grammar.of_grammar('root ::= "yes" | "no, \\"never\\""'),
    ):
        texts = {TOKENIZER.decode(drawn(GRAMMARS.compile(made), seed)) for seed in range(20)}
        assert texts == {"yes", 'no, "never"'}


def test_what_must_follow_is_the_only_token_allowed():
    matcher = GRAMMARS.compile(grammar.of_json_schema(SCHEMAS["object"]))
    forced = []
    while (token := only(matcher.allowed())) is not None:
        forced.append(token)
        matcher.consume([token])
    assert TOKENIZER.decode(forced) == '{"name":'


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), max_size=6), st.integers(0, 99))
def test_what_may_follow_is_a_function_of_the_text_alone(moves, seed):
    made = grammar.of_json_schema(SCHEMAS["nested"])
    random, matcher, text = Random(seed), GRAMMARS.compile(made), []
    for ahead, back in moves:
        for _ in range(ahead):
            if tokens := [token for token in may_follow(matcher) if token != EOS]:
                text.append(random.choice(tokens))
                assert matcher.consume(text[-1:]) == 1
        back = min(back, len(text))
        matcher.rollback(back)
        text = text[: len(text) - back]
    fresh = GRAMMARS.compile(made)
    assert fresh.consume(text) == len(text)
    np.testing.assert_array_equal(fresh.allowed(), matcher.allowed())


def test_a_token_that_is_not_allowed_is_not_taken():
    matcher = GRAMMARS.compile(grammar.of_choice(["yes"]))
    before = may_follow(matcher)
    assert matcher.consume(TOKENIZER.encode("no")) == 0
    assert may_follow(matcher) == before


def test_padding_of_the_embedding_is_not_allowed():
    padded = Grammars(lambda: TOKENIZER, VOCABULARY + 100, (EOS,))
    allowed = as_bools(padded.compile(grammar.of_regex("(.|\n)*")).allowed(), VOCABULARY + 100)
    assert allowed[:VOCABULARY].any() and not allowed[VOCABULARY:].any()


UNFIT = {
    "unsupported": (lambda: grammar.of_json_schema({"type": "string", "not": {}}), "not"),
    "no schema": (lambda: grammar.of_json_schema([1]), "no JSON object"),
    "nothing to refer to": (lambda: grammar.of_json_schema({"$ref": "#/x"}), "/x"),
    "no instance": (lambda: grammar.of_json_schema(False), "no JSON object"),
    "nested": (
        lambda: grammar.of_json_schema(json.loads('{"items":' * 300 + "{}" + "}" * 300)),
        "recursion",
    ),
    "product": (
        lambda: grammar.of_json_schema(
            {
                "allOf": [
                    {"properties": {f"p{i}": {"anyOf": [{}, {"$ref": "#"}]}}} for i in range(300)
                ]
            }
        ),
        "large",
    ),
    "no regular expression": (lambda: grammar.of_regex("("), "unclosed"),
    "explodes": (lambda: grammar.of_regex("(a{1,3000}){1,3000}"), "no text fits"),
    "no rule": (lambda: grammar.of_grammar("start: foo"), "foo"),
    "nonsense": (lambda: grammar.of_grammar("nonsense"), "GBNF"),
    "too long": (lambda: grammar.of_choice([str(i) for i in range(40000)]), "bytes"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_cannot_be_followed_is_refused_with_the_reason_within_a_second(name):
    make, why = UNFIT[name]
    began = process_time()
    with pytest.raises(GrammarFailed, match=re.escape(why)):
        GRAMMARS.check(make())
    assert process_time() - began < 1


def test_a_model_that_cannot_end_a_text_holds_none_to_a_grammar():
    with pytest.raises(GrammarFailed, match="no token that ends"):
        Grammars(lambda: TOKENIZER, VOCABULARY, ()).compile(grammar.of_regex("a"))
