"""The head's book of one request, above all one whose answer began in an earlier epoch.

Token ids are the code points of letters here, so that a text stands for its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pipespec.decoding import Session
from pipespec.text import StopChecker
from pipespec.tree import ROOT
from pipespec.types import DECIDED, KIND, LAST_DECIDED, NODE, PARENT, Request

PROMPT = "tell: "
LONG = 1000
THEN, LATER = 500, 900  # moments of the clock


class Letters:
    """A tokenizer with one token per letter."""

    def decode(self, token_ids: Sequence[int], **_: bool) -> str:
        return "".join(map(chr, token_ids))

    def convert_ids_to_tokens(self, ids: int) -> str:
        return chr(ids)


def opened(
    answer: str = "",
    *,
    max_new_tokens: int = LONG,
    context: int = LONG,
    eos: str = "",
    stop: Sequence[str] = (),
) -> Session:
    prompt = tuple(map(ord, PROMPT))
    request = Request(7, prompt, max_new_tokens, eos=tuple(map(ord, eos)), stop=tuple(stop))
    stops = StopChecker(Letters(), stop, prompt)
    return Session.open(request, stops, context, THEN, tuple(map(ord, answer)))


def guess(session: Session, letter: str, *, fed: bool) -> None:
    """A child of the root."""
    token, logp = np.array([[ord(letter)]]), np.array([[-0.5]])
    session.tree.append(np.array([ROOT]), token, logp)
    session.tree.fed[-1] = fed


# --- what is known ----------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["", "o", "once"])
def test_an_earlier_answer_follows_the_prompt_as_if_it_were_part_of_it(answer: str) -> None:
    session = opened(answer)
    known = PROMPT + answer
    assert "".join(map(chr, session.context.tokens)) == known
    assert session.context.nodes == list(range(len(known)))
    assert session.context.request == 7
    root = len(known) - 1
    assert (session.tree.id[ROOT], session.tree.parent_id[ROOT]) == (root, root - 1)
    assert (chr(session.tree.token[ROOT]), session.tree.position[ROOT]) == (known[-1], root)
    assert session.tree.fed[ROOT], "its row is the last decided one"
    assert len(session.tree) == 1
    rows = session.context.rows(0)
    assert rows[:, KIND].tolist() == [DECIDED] * root + [LAST_DECIDED]
    assert rows[1:, PARENT].tolist() == rows[:-1, NODE].tolist()


@pytest.mark.parametrize("answer", ["", "o", "once"])
def test_all_that_is_known_is_read_before_anything_is_decoded(answer: str) -> None:
    session = opened(answer)
    assert session.known == len(PROMPT) + len(answer)
    for prefilled in range(session.known):
        session.prefilled = prefilled
        assert session.prompt_left
    session.prefilled = session.known
    assert not session.prompt_left
    assert not session.decoding
    session.accept(ord("x"), LATER)
    assert session.decoding
    assert not session.prompt_left
    assert session.known == len(PROMPT) + len(answer)


@pytest.mark.parametrize(
    ("max_new_tokens", "context", "last"),
    [(10, LONG, len(PROMPT) + 9), (LONG, 12, 11), (6, len(PROMPT) + 6, len(PROMPT) + 5)],
)
@pytest.mark.parametrize("answer", ["", "on", "once"])
def test_the_last_position_does_not_depend_on_where_an_epoch_ended(
    answer: str, max_new_tokens: int, context: int, last: int
) -> None:
    session = opened(answer, max_new_tokens=max_new_tokens, context=context)
    assert session.last_position == last
    # Nothing follows the token at the last position, so its logits are of no use.
    root = session.known - 1
    for position in range(root + 1, last + 1):
        deepest = len(session.tree) - 1
        session.tree.append(np.array([deepest]), np.array([[position]]), np.array([[-0.1]]))
    nodes = np.arange(len(session.tree))
    assert session.tree.position[session.useful(nodes)].tolist() == list(range(root, last))


# --- how it ends ------------------------------------------------------------------------------

ENDINGS = pytest.mark.parametrize(
    ("text", "reason", "asked"),
    [
        ("once upon.", "stop", {"eos": ".!"}),
        ("once upon a", "stop", {"stop": ["zebra", "on a"]}),
        ("tell: once", "stop", {"stop": ["once"]}),
        ("once upon", "length", {"max_new_tokens": 9}),
        ("once upon", "length", {"context": len(PROMPT) + 9, "max_new_tokens": 10}),
        ("once.", "stop", {"eos": ".", "max_new_tokens": 5}),
        ("once", "stop", {"stop": ["ce"], "context": len(PROMPT) + 4}),
    ],
)


@ENDINGS
def test_wherever_an_epoch_ended_the_request_ends_at_the_same_token(
    text: str, reason: str, asked: dict
) -> None:
    for border in range(len(text) + 1):
        session = opened(text[:border], **asked)
        heard = [session.ended] if border else []
        heard += [session.accept(ord(letter), LATER) for letter in text[border:]]
        assert heard[-1] == reason, border
        assert set(heard[:-1]) <= {None}, border
        assert session.generated == len(text)
        assert "".join(map(chr, session.context.tokens)) == PROMPT + text
        assert session.tree.position[ROOT] == len(PROMPT + text) - 1


@ENDINGS
def test_it_has_ended_only_if_its_last_token_is_known(text: str, reason: str, asked: dict) -> None:
    assert [opened(text[:border], **asked).ended for border in range(len(text) + 1)] == [
        *[None] * len(text),
        reason,
    ]


def test_a_stop_string_that_the_prompt_ends_with_does_not_count() -> None:
    session = opened("on", stop=["tell", "l: o"])
    assert session.ended is None
    assert session.accept(ord("c"), LATER) is None


# --- what is counted --------------------------------------------------------------------------


def test_replayed_tokens_count_as_decided_when_the_session_began() -> None:
    session = opened("one")
    session.prefilled = session.known
    for at, letter in enumerate("ce"):
        session.accept(ord(letter), LATER + at)
    assert session.token_ns == [THEN, THEN, THEN, LATER, LATER + 1]
    assert session.statistics() == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 5,
        "replayed": 3,
        "hits": 0,
        "started_ns": THEN,
        "token_ns": session.token_ns,
        "counts": session.counts,
        "first_token": session.first_token,
    }


def test_a_request_that_had_ended_has_a_time_for_every_token() -> None:
    session = opened("once", max_new_tokens=4)
    assert session.ended == "length"
    statistics = session.statistics()
    assert statistics["completion_tokens"] == statistics["replayed"] == 4
    assert statistics["token_ns"] == [THEN] * 4
    assert statistics["first_token"] == {}
    assert session.misses_per_step == 0


def test_the_first_token_is_the_first_of_this_session() -> None:
    session = opened("one")
    session.counts["steps"], session.counts["rows"] = 5, 9
    session.accept(ord("x"), LATER)
    session.counts["steps"] = 6
    session.accept(ord("y"), LATER)
    assert session.first_token == {"steps": 5, "rows": 9, "rounds": 0, "overruns": 0}


def test_only_tokens_of_this_session_are_hits_or_misses() -> None:
    session = opened("one")
    assert session.misses_per_step == 0
    guess(session, "c", fed=True)
    assert session.guesses_in_flight
    session.accept(ord("c"), LATER)  # was on its way
    guess(session, "e", fed=False)
    assert not session.guesses_in_flight
    session.accept(ord("e"), LATER)  # was guessed, but not sent
    guess(session, "x", fed=True)
    session.accept(ord(" "), LATER)  # was not guessed
    assert session.hits == 1
    session.counts["steps"] = 8
    assert session.misses_per_step == 2 / 8


def test_misses_before_the_first_step_are_those_of_one_step() -> None:
    session = opened("one")
    session.accept(ord("x"), LATER)
    session.accept(ord("y"), LATER)
    assert session.misses_per_step == 2
