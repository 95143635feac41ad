"""Grammars and their matchers, by llguidance (extra `pipespec[grammar]`).

A grammar travels as llguidance's own text, made here of a JSON schema, a regular expression, a
choice or a grammar in Lark or GBNF. It is compiled where texts are held to it.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache
from random import Random
from typing import Any

import numpy as np

from pipespec.engine.tokenizer import BackendTokenizer, Tokenizer
from pipespec.errors import ConfigError
from pipespec.sampling.grammar import WORD, GrammarFailed, Matcher, as_bools
from pipespec.system.reading import Unreadable, parse_json

# Bytes of a grammar as JSON: it travels with the first rows of its request.
MAX_GRAMMAR = 1 << 17
# What a grammar may cost at one token. Grammars made to be dear took .26 s with these, once.
LIMITS: Mapping[str, Any] = {
    "step_lexer_fuel": 50_000,
    "initial_lexer_fuel": 500_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
# Of a grammar that is to be checked, so many tokens are followed.
PROBED = 8
# Of what the library says a sentence holds so many characters.
LONGEST_REASON = 200


def installed() -> bool:
    """Whether this machine can follow grammars."""
    return importlib.util.find_spec("llguidance") is not None


def require_installed(asked: str) -> None:
    """Raise ConfigError, naming what was `asked`, unless this machine can follow grammars."""
    if not installed():
        raise ConfigError(f"{asked} needs llguidance; run: pip install 'pipespec[grammar]'.")


# --- from what is asked to a grammar ----------------------------------------------------------


def of_json_schema(schema: Any) -> str:
    """Of the JSON that a schema (JSON, or its text) describes, without needless white space.

    Raises GrammarFailed.
    """
    from llguidance import LLMatcher

    if isinstance(schema, str):
        try:
            schema = parse_json(schema)
        except Unreadable as error:
            raise GrammarFailed(str(error)) from None
    if not isinstance(schema, dict):
        raise GrammarFailed("it is no JSON object")
    # Small models write white space for ever where they may.
    try:
        grammar: str = LLMatcher.grammar_from_json_schema(
            json.dumps(schema), overrides={"whitespace_flexible": False}
        )
    except RecursionError:
        raise GrammarFailed("it is nested too deeply") from None
    except ValueError as error:
        raise GrammarFailed(_reason(str(error))) from None
    return grammar


def of_regex(regex: str) -> str:
    """Of the texts that a regular expression (of Rust's crate `regex`, but `\\d` is 0 to 9) matches
    as a whole."""
    from llguidance import LLMatcher, regex_to_lark

    grammar: str = LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(regex, use_ascii='d')}/")
    return grammar


def of_choice(choices: Sequence[str]) -> str:
    """Of these texts alone."""
    from llguidance import grammar_from

    return grammar_from("choice", json.dumps([*choices]))


def of_grammar(text: str) -> str:
    """Of a grammar in Lark's or GBNF's notation. Raises GrammarFailed."""
    from llguidance import grammar_from

    try:
        return grammar_from("grammar", text)
    except ValueError as error:
        raise GrammarFailed(_reason(str(error))) from None


def validate(grammar: str) -> None:
    """Raise GrammarFailed unless a grammar can be followed, whatever the tokens."""
    from llguidance import LLMatcher, LLParserLimits

    _check_size(grammar)
    told = LLMatcher.validate_grammar(grammar, limits=LLParserLimits(**LIMITS))
    if told and not told.startswith("WARNING"):
        raise GrammarFailed(_reason(told))


def _check_size(grammar: str) -> None:
    size = len(json.dumps(grammar))
    if size > MAX_GRAMMAR:
        raise GrammarFailed(f"it takes {size} bytes, but may take {MAX_GRAMMAR}")


# --- matchers ---------------------------------------------------------------------------------


class Grammars:
    """Compiles grammars for the tokens of one model, in a thread of its own."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], vocab_size: int, eos: Sequence[int]):
        """
        Args:
            tokenizer: loads the model's.
            vocab_size: how many token ids the model has logits for.
            eos: those that end a text.
        """
        self._load = tokenizer
        self._vocab_size = vocab_size
        self._eos = (*eos,)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    def warm(self) -> None:
        """Begin to read the vocabulary, which takes a second if it is large."""
        if installed():
            self._thread.submit(lambda: self._tokens)

    def close(self) -> None:
        """Drop what was not begun; no grammar is compiled any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def begin(self, grammar: str) -> Future[Matcher]:
        """Compile a grammar meanwhile. The future raises GrammarFailed if it cannot be followed."""
        return self._thread.submit(self.compile, grammar)

    def compile(self, grammar: str) -> Matcher:
        """A matcher before its first token. Raises GrammarFailed."""
        _check_size(grammar)
        if not installed():
            raise GrammarFailed("llguidance is not installed (pipespec[grammar])")
        return _Matcher(self._tokens, grammar)

    def check(self, grammar: str) -> None:
        """Raise GrammarFailed unless some text's beginning can be held to a grammar."""
        matcher, random = self.compile(grammar), Random(0)
        for _ in range(PROBED):
            allowed = np.flatnonzero(as_bools(matcher.allowed(), self._tokens.vocab_size))
            if not len(allowed):
                raise GrammarFailed("no text fits it")
            if not matcher.consume([int(random.choice(allowed))]):  # it ends here
                break

    @cached_property
    def _tokens(self) -> Any:
        """llguidance's own view of the tokenizer."""
        tokenizer = self._load()
        if not isinstance(tokenizer, BackendTokenizer):
            raise GrammarFailed("the model's tokenizer has no backend of the package tokenizers")
        if not self._eos:
            raise GrammarFailed("the model names no token that ends a text")
        size = max(self._vocab_size, max(tokenizer.get_vocab().values()) + 1)
        return _read(tokenizer.backend, size, self._eos)


@lru_cache(maxsize=1)  # an epoch after the other asks
def _read(backend: str, size: int, eos: tuple[int, ...]) -> Any:
    from llguidance import LLTokenizer

    return LLTokenizer(backend, n_vocab=size, eos_token=[*eos])


class _Matcher:
    """llguidance's."""

    def __init__(self, tokens: Any, grammar: str):
        from llguidance import LLMatcher, LLParserLimits

        self._matcher = LLMatcher(tokens, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
        self._words = -(-tokens.vocab_size // WORD)
        self._check()

    def allowed(self) -> np.ndarray:
        bits = np.zeros(self._words, np.int32)
        if self._matcher.stop_reason() == "EndOfSentence":
            return bits
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._check()
        return bits

    def consume(self, tokens: Sequence[int]) -> int:
        taken: int = self._matcher.try_consume_tokens([*tokens])
        return taken

    def rollback(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarFailed(_reason(self._matcher.get_error()))


def _reason(text: str) -> str:
    """What the library says, as a clause."""
    for mark in ("<state>", "<non-verbose/>"):
        text = text.partition(mark)[0]
    return " ".join(text.split())[:LONGEST_REASON]
