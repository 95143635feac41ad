"""Structured output by llguidance (extra `pipespec[grammar]`): grammars and their matchers.

A request contains its grammar in llguidance's own format, which is made here from a JSON schema, a
regular expression, a choice or a grammar in Lark or GBNF. The head and the last stage compile it.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from functools import cached_property, lru_cache
from random import Random
from time import thread_time
from typing import Any

import numpy as np

from pipespec.engine.checkpoint.tokenizer import BackendTokenizer
from pipespec.errors import ConfigError
from pipespec.sampling.grammar import BITS_PER_WORD, GrammarFailed, Matcher, unpack_mask
from pipespec.system import heap
from pipespec.system.fair_thread import FairThread
from pipespec.system.validation import Unreadable, parse_json

# Bytes of a grammar as JSON; it is sent with the first rows of its request.
MAX_GRAMMAR = 1 << 17
# Limits of the work for one token, of the states of a lexer (1 to 2 kB each), and so of its memory.
LIMITS: Mapping[str, Any] = {
    "step_lexer_fuel": 50_000,
    "initial_lexer_fuel": 500_000,
    "step_max_items": 8_000,
    "max_lexer_states": 16_384,
    "verbose_errors": False,
}
# Seconds of processor time that the masks of a grammar may take on average, and beyond that in all;
# and how much slower than when it was checked a grammar may be where its text is decided, as an
# answer that has begun should not end for a slower machine.
MASK_S, BURST_S, SLACK = 0.002, 0.05, 5
# And to compile it.
COMPILE_S = 0.5
# When a grammar is checked, at most so many tokens are generated: the cost of nested repetitions
# shows after some dozens.
PROBED = 64
# Compiled grammars that are kept for further answers.
KEPT = 16
# Characters of the library's own message in an error message.
LONGEST_REASON = 200
# Messages of the library, and ours.
TOO_COMPLEX = "it is too complex to follow: its counts multiply to too many states; lower them"
_TOO_SLOW = (
    f"it is too slow to follow: a token may take {MASK_S * 1e3:g} ms of processor time on average; "
    "shorten its texts and alternatives"
)
_KNOWN_REASONS: Mapping[str, str] = {
    "NoExtensionBias": "no text fits it",
    "too many expressions constructed": TOO_COMPLEX,
    "Too many items": TOO_COMPLEX,
    "lookarounds not supported": "look-around and anchors inside a pattern are not supported",
    "oneOf constraints are not supported": "oneOf is not supported; use anyOf",
}
# A quoted line of the grammar in the library's message, and the mark below it.
_QUOTED = re.compile(r"\s*(\d+ \|.*|\^+)\s*")
_ERROR = "error: "


def installed() -> bool:
    return importlib.util.find_spec("llguidance") is not None


def require_installed(what: str) -> None:
    if not installed():
        raise ConfigError(f"{what} needs llguidance; run: pip install 'pipespec[grammar]'.")


def grammar_from_json_schema(schema: Any) -> str:
    """The grammar of the JSON that a schema (parsed, or as text) describes, without optional white
    space. Raises GrammarFailed."""
    from llguidance import LLMatcher

    if isinstance(schema, str):
        try:
            schema = parse_json(schema)
        except Unreadable as error:
            raise GrammarFailed(str(error)) from None
    if not isinstance(schema, dict):
        raise GrammarFailed("it is no JSON object")
    # Where white space is allowed, small models may generate it endlessly.
    try:
        text = json.dumps(schema)
        _check_size(text)
        return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": False})
    except RecursionError:
        raise GrammarFailed("it is nested too deeply") from None
    except ValueError as error:
        raise GrammarFailed(_reason(str(error))) from None


def grammar_from_regex(regex: str) -> str:
    """The grammar of texts that a regular expression (of Rust's crate `regex`, but `\\d` is 0 to 9)
    matches as a whole."""
    from llguidance import LLMatcher, regex_to_lark

    _check_size(regex)
    return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(regex, use_ascii='d')}/")


def grammar_from_choice(choices: Sequence[str]) -> str:
    from llguidance import LLMatcher

    # One terminal, as alternatives of rules are 2,000 at most.
    text = " | ".join(map(json.dumps, choices))
    _check_size(text)
    return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {text}")


def grammar_from_lark(text: str) -> str:
    """A grammar in Lark's or GBNF's notation, converted. Raises GrammarFailed."""
    from llguidance import grammar_from

    _check_size(text)
    try:
        return grammar_from("grammar", text)
    except ValueError as error:
        raise GrammarFailed(_reason(str(error))) from None


def grammar_after(prefix: str, grammar: str) -> str:
    """The grammar of a text that begins with `prefix`, in Lark's notation, which refers to what
    follows as `@answer`."""
    made = json.loads(grammar) if grammar.startswith("{") else {}
    first, *rest = made.get("grammars") or [{"lark_grammar": grammar}]
    parts = [{"lark_grammar": prefix}, {**first, "name": "answer"}, *rest]
    return json.dumps({**made, "grammars": parts})


def validate(grammar: str) -> None:
    """Raise GrammarFailed unless a grammar is valid, independently of any tokenizer."""
    from llguidance import LLMatcher, LLParserLimits

    _check_size(grammar)
    message = LLMatcher.validate_grammar(grammar, limits=LLParserLimits(**LIMITS))
    if message and not message.startswith("WARNING"):
        raise GrammarFailed(_reason(message))


def _check_size(grammar: str) -> None:
    """Raise GrammarFailed for a grammar, or what one is made of, that is too long: the library
    lets no other thread run while it makes a grammar."""
    size = len(json.dumps(grammar))
    if size > MAX_GRAMMAR:
        raise GrammarFailed(f"it takes {size} bytes, but may take {MAX_GRAMMAR}")


class Grammars:
    """Compiles grammars for the tokens of one model, in a thread of its own; `masks` follows texts
    in another. What answers share is compiled once."""

    def __init__(
        self, tokenizer: Callable[[], BackendTokenizer], vocab_size: int, eos: Sequence[int]
    ):
        """`tokenizer` loads the model's; `vocab_size`: for how many token ids it has logits; `eos`:
        those that end a text."""
        self._load, self._vocab_size, self._eos = tokenizer, vocab_size, (*eos,)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._compiled = lru_cache(KEPT)(self._compile)
        self.masks = FairThread()

    def warm(self) -> None:
        """Begin to read the vocabulary, which takes a second if it is large."""
        if installed():
            self._thread.submit(lambda: self._tokens)

    def read_tokens(self) -> None:
        """Read the vocabulary, unless it was read. Raises GrammarFailed."""
        assert self._tokens

    def close(self) -> None:
        """Cancel compilations that have not begun; no further grammar is compiled or followed."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.masks.close()

    def begin(self, grammar: str) -> Future[Matcher]:
        return self._thread.submit(self.compile, grammar)

    def compile(self, grammar: str) -> LlguidanceMatcher:
        """A matcher at the start of a text. Raises GrammarFailed."""
        found = self._compiled(grammar)
        if isinstance(found, GrammarFailed):
            raise found
        return found.copy()

    def _compile(self, grammar: str) -> LlguidanceMatcher | GrammarFailed:
        try:
            _check_size(grammar)
            if not installed():
                raise GrammarFailed("llguidance is not installed (pipespec[grammar])")
            return LlguidanceMatcher(self._tokens, grammar)
        except GrammarFailed as error:
            return error

    def check(self, grammar: str) -> None:
        """Raise GrammarFailed unless a random text can be generated within a grammar in time, up to
        PROBED tokens."""
        self.read_tokens()
        began = thread_time()
        matcher, random = self.compile(grammar), Random(0)
        if thread_time() - began > COMPILE_S:
            self._compiled.cache_clear()  # it may be large
            raise GrammarFailed(TOO_COMPLEX)
        matcher.slack = 1
        for probed in range(PROBED):
            mask = unpack_mask(matcher.allowed(), self._tokens.vocab_size)
            allowed = np.flatnonzero(mask).tolist()
            if not allowed:
                raise GrammarFailed("no text fits it")
            further = [token for token in allowed if token not in self._eos]
            if not further and not probed:
                raise GrammarFailed("no text but the empty one fits it")
            if not further:
                break
            matcher.consume([random.choice(further)])

    @cached_property
    def _tokens(self) -> Any:
        tokenizer = self._load()
        if not self._eos:
            raise GrammarFailed("the model names no token that ends a text")
        try:
            return _read(tokenizer.backend, self._vocab_size, self._eos)
        except ValueError:  # it has ids beyond the model's logits, whose list takes a second
            size = max(tokenizer.get_vocab().values()) + 1
            return _read(tokenizer.backend, max(self._vocab_size, size), self._eos)


@lru_cache(maxsize=1)  # reused by the next epoch
def _read(backend: str, size: int, eos: tuple[int, ...]) -> Any:
    from llguidance import LLTokenizer

    found = LLTokenizer(backend, n_vocab=size, eos_token=[*eos])
    heap.release()  # what reading it has freed
    return found


class LlguidanceMatcher:
    """See `Matcher`. Copies count their processor time together, and fail once it is too much."""

    slack = SLACK

    def __init__(self, tokens: Any, grammar: str):
        from llguidance import LLMatcher, LLParserLimits

        self._matcher = LLMatcher(tokens, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
        self._words = -(-tokens.vocab_size // BITS_PER_WORD)
        self._spent_s = [0.0]  # beyond what the masks so far may take
        self._check()

    def copy(self) -> LlguidanceMatcher:
        """Another matcher, at the same place of another text."""
        made = copy(self)
        made._matcher = self._matcher.deep_copy()
        return made

    def allowed(self) -> np.ndarray:
        bits = np.zeros(self._words, np.int32)
        if self._matcher.stop_reason() == "EndOfSentence":
            return bits
        began = thread_time()
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._check()
        may = MASK_S * self.slack
        self._spent_s[0] = max(self._spent_s[0] + thread_time() - began - may, 0.0)
        if self._spent_s[0] > BURST_S * self.slack:
            raise GrammarFailed(_TOO_SLOW)
        return bits

    def consume(self, tokens: Sequence[int]) -> int:
        began = thread_time()
        taken = self._matcher.try_consume_tokens([*tokens])
        self._spent_s[0] += thread_time() - began
        return taken

    def rollback(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarFailed(_reason(self._matcher.get_error()))


def _reason(text: str) -> str:
    for known, ours in _KNOWN_REASONS.items():
        if known in text:
            return ours
    for mark in ("<state>", "<non-verbose/>"):
        text = text.partition(mark)[0]
    lines = [line for line in text.splitlines() if not _QUOTED.fullmatch(line)]
    errors = [line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR)]
    text = " ".join(errors or lines)
    return " ".join(text.split())[:LONGEST_REASON]
