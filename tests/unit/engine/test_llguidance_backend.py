import json
import re
from contextlib import closing
from random import Random
from time import process_time

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipespec.engine import llguidance_backend
from pipespec.engine.checkpoint import tokenizer
from pipespec.engine.llguidance_backend import (
    Grammars,
    grammar_from_choice,
    grammar_from_json_schema,
    grammar_from_lark,
    grammar_from_regex,
)
from pipespec.sampling.grammar import GrammarFailed, Matcher, only_token, unpack_mask
from pipespec.system.folders import resource_dir
from tools.rig.schemas import SCHEMAS

EOS = 0
TOKENIZER = tokenizer.load(resource_dir("demo") / "target")
VOCABULARY = len(TOKENIZER.get_vocab())
GRAMMARS = Grammars(lambda: TOKENIZER, VOCABULARY, (EOS,))


def may_follow(matcher: Matcher) -> list[int]:
    return np.flatnonzero(unpack_mask(matcher.allowed(), VOCABULARY)).tolist()


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
    matcher = GRAMMARS.compile(grammar_from_json_schema(SCHEMAS[name]))
    text = drawn(matcher, seed)
    assert EOS in may_follow(matcher)
    jsonschema.validate(json.loads(TOKENIZER.decode(text)), SCHEMAS[name])


@given(st.integers(0, 2**32))
def test_texts_fit_the_regular_expression(seed):
    wanted = r"[A-C]{2}-(\d{3}|none)"
    text = TOKENIZER.decode(drawn(GRAMMARS.compile(grammar_from_regex(wanted)), seed))
    assert re.fullmatch(wanted, text)


def test_a_choice_and_a_grammar_of_either_notation():
    for made in (
        grammar_from_choice(["yes", 'no, "never"']),
        grammar_from_lark('start: "yes" | "no, \\"never\\""'),
        grammar_from_lark('root ::= "yes" | "no, \\"never\\""'),
    ):
        texts = {TOKENIZER.decode(drawn(GRAMMARS.compile(made), seed)) for seed in range(20)}
        assert texts == {"yes", 'no, "never"'}


def test_what_must_follow_is_the_only_token_allowed():
    matcher = GRAMMARS.compile(grammar_from_json_schema(SCHEMAS["object"]))
    forced = []
    while (token := only_token(matcher.allowed())) is not None:
        forced.append(token)
        matcher.consume([token])
    assert TOKENIZER.decode(forced) == '{"name":'


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), max_size=6), st.integers(0, 99))
def test_what_may_follow_is_a_function_of_the_text_alone(moves, seed):
    made = grammar_from_json_schema(SCHEMAS["nested"])
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
    matcher = GRAMMARS.compile(grammar_from_choice(["yes"]))
    before = may_follow(matcher)
    assert matcher.consume(TOKENIZER.encode("no")) == 0
    assert may_follow(matcher) == before


@pytest.mark.parametrize(
    "choices", [["", "a"], ["日本", "a\nb", 'q"\\'], [f"choice {i}" for i in range(4000)]]
)
def test_texts_of_a_choice_may_be_many_and_any(choices: list[str]):
    made = grammar_from_choice(choices)
    GRAMMARS.check(made)
    for seed in range(5):
        assert TOKENIZER.decode(drawn(GRAMMARS.compile(made), seed)) in choices


def test_padding_of_the_embedding_is_not_allowed():
    padded = Grammars(lambda: TOKENIZER, VOCABULARY + 100, (EOS,))
    allowed = unpack_mask(padded.compile(grammar_from_regex("(.|\n)*")).allowed(), VOCABULARY + 100)
    assert allowed[:VOCABULARY].any() and not allowed[VOCABULARY:].any()


NESTED = json.loads('{"items":' * 300 + "{}" + "}" * 300)
EITHER = [{"properties": {f"p{i}": {"anyOf": [{}, {"$ref": "#"}]}}} for i in range(300)]
# What makes a grammar, of what, and the reason why it cannot be followed.
UNFIT = {
    "unsupported": (grammar_from_json_schema, {"type": "string", "not": {}}, "not"),
    "no schema": (grammar_from_json_schema, [1], "no JSON object"),
    "nothing to refer to": (grammar_from_json_schema, {"$ref": "#/x"}, "/x"),
    "no instance": (grammar_from_json_schema, False, "no JSON object"),
    "nested": (grammar_from_json_schema, NESTED, "recursion"),
    "product": (grammar_from_json_schema, {"allOf": EITHER}, "large"),
    "no regular expression": (grammar_from_regex, "(", "unclosed"),
    "explodes": (grammar_from_regex, "(a{1,3000}){1,3000}", "counts multiply"),
    "explodes later": (grammar_from_lark, 'start: "a"{100000}', "counts multiply"),
    "nothing": (grammar_from_regex, "[^\\s\\S]", "no text fits it"),
    "refers to itself": (grammar_from_lark, "start: start", "no text fits it"),
    "an empty pattern": (grammar_from_regex, "", "no text but the empty one fits it"),
    "an empty choice": (grammar_from_choice, [""], "no text but the empty one fits it"),
    "an anchor inside": (grammar_from_regex, r"a\b", "anchors inside a pattern"),
    "one of": (grammar_from_json_schema, {"oneOf": [{}, {"type": "null"}]}, "use anyOf"),
    "a long text": (grammar_from_regex, "abcdefghij" * 10000, "too slow"),
    "a long constant": (grammar_from_json_schema, {"const": "abc" * 20000}, "too slow"),
    "ambiguous": (grammar_from_lark, 'start: e\ne: e e | e e e | "a" | "b"', "too slow"),
    "no rule": (grammar_from_lark, "start: foo", "foo"),
    "nonsense": (grammar_from_lark, "nonsense", "GBNF"),
    "too long": (grammar_from_choice, [str(i) for i in range(40000)], "bytes"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_cannot_be_followed_is_refused_with_the_reason_within_a_second(name):
    make, given_, why = UNFIT[name]
    began = process_time()
    with pytest.raises(GrammarFailed, match=re.escape(why)):
        GRAMMARS.check(make(given_))
    assert process_time() - began < 1


def test_answers_with_one_grammar_share_its_compilation_but_no_state(monkeypatch):
    make, compiled = llguidance_backend.LlguidanceMatcher, []
    counted = lambda *given: compiled.append(given) or make(*given)  # noqa: E731
    monkeypatch.setattr(llguidance_backend, "LlguidanceMatcher", counted)
    grammars = Grammars(lambda: TOKENIZER, VOCABULARY, (EOS,))
    with closing(grammars):
        made = grammar_from_json_schema(SCHEMAS["nested"])
        first, second = (grammars.begin(made).result() for _ in range(2))
        before = may_follow(second)
        first.consume(drawn(first, 0)[:4])
        assert may_follow(second) == before
        assert len(compiled) == 1


def test_a_model_that_cannot_end_a_text_holds_none_to_a_grammar():
    with pytest.raises(GrammarFailed, match="no token that ends"):
        Grammars(lambda: TOKENIZER, VOCABULARY, ()).compile(grammar_from_regex("a"))


def test_what_some_text_fits_is_not_refused():
    # Where the text may end, the check once took the end for a dead end.
    made = [grammar_from_regex(each) for each in ("(ab{1,5}){1,5}", "a?")]
    made += [grammar_from_choice(["yes", *more]) for more in ([], [""])]
    for grammar in (grammar_from_json_schema({}), *made):
        GRAMMARS.check(grammar)


def test_a_reason_does_not_quote_the_grammar_that_was_made():
    with pytest.raises(GrammarFailed) as refused:
        GRAMMARS.check(grammar_from_regex("("))
    assert str(refused.value) == "unclosed group"
