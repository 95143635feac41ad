"""Grammars whose compilation takes longer than llguidance's own limits allow."""

import re

import pytest

from pipespec.engine.checkpoint import tokenizer
from pipespec.engine.grammar_probe import GrammarProbe
from pipespec.engine.llguidance_backend import (
    grammar_from_json_schema,
    grammar_from_lark,
    grammar_from_regex,
)
from pipespec.sampling.grammar import GrammarFailed
from pipespec.system.folders import resource_dir

pytestmark = pytest.mark.slow

TOKENIZER = tokenizer.load(resource_dir("demo") / "target")
SIZE = len(TOKENIZER.get_vocab())
MULTIPLES = {f"a{i}": {"type": "integer", "multipleOf": 90_000 + i} for i in range(20)}
# Those that are ended, and those that end soon enough to say it themselves.
ENDLESS = {
    "multiples": grammar_from_json_schema({"type": "integer", "multipleOf": 3_999_971}),
    "many multiples": grammar_from_json_schema({"properties": MULTIPLES, "required": [*MULTIPLES]}),
    "multiples in Lark": grammar_from_lark('start: %json {"multipleOf": 3999971}'),
    "periods": grammar_from_lark(
        r"start: T  T: /(.{97})*/ & /(.{101})*/ & /(.{103})*/".replace("  ", "\n")
    ),
}
FITTING = (
    grammar_from_regex("a+"),
    grammar_from_json_schema({"type": "number", "multipleOf": 0.01}),
    grammar_from_lark("start: T\nT: /[a-z]{3,9}/ & ~/the/"),
)


@pytest.fixture(scope="module")
def probe() -> GrammarProbe:
    return GrammarProbe(TOKENIZER, SIZE, (0,))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long) if "Lark" in name else name for name in ENDLESS],
)
def test_grammar_that_compiles_for_long_is_refused_and_others_are_checked_after_it(probe, name):
    with pytest.raises(GrammarFailed, match="too complex to follow"):
        probe.check(ENDLESS[name])
    for grammar in FITTING:
        probe.check(grammar)


def test_reasons_are_those_of_the_grammars(probe):
    for grammar, why in (
        (grammar_from_regex("[^\\s\\S]"), "no text fits it"),
        ("start: /(/", "unclosed"),
    ):
        with pytest.raises(GrammarFailed, match=re.escape(why)):
            probe.check(grammar)
    with pytest.raises(GrammarFailed, match="no token that ends"):
        GrammarProbe(TOKENIZER, SIZE, ()).check(FITTING[0])
