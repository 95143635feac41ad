"""The head's record of one request, above all one whose answer began in an earlier epoch.

Token ids are the code points of letters here, so that a text stands for its tokens.
"""

import numpy as np
import pytest

from pipespec.core import COMMITTED, KIND, LAST_COMMITTED, NODE, PARENT, Request
from pipespec.head.sequence import Sequence
from pipespec.head.tree import ROOT
from pipespec.text import FinalText

PROMPT = "tell: "
LONG = 1000
NUMBER = 5
THEN, LATER = 500, 900  # moments of the clock


class Letters:
    """A tokenizer with one token per letter."""

    def decode(self, token_ids: list[int], **_: bool) -> str:
        return "".join(map(chr, token_ids))

    def convert_ids_to_tokens(self, ids: int) -> str:
        return chr(ids)


def opened(
    answer: str = "",
    *,
    max_new_tokens: int = LONG,
    context: int = LONG,
    eos: str = "",
    stop: tuple[str, ...] = (),
) -> Sequence:
    prompt = tuple(map(ord, PROMPT))
    request = Request(7, prompt, max_new_tokens, eos=tuple(map(ord, eos)), stop=tuple(stop))
    stops = FinalText(Letters(), prompt, stop).completes
    sequence = Sequence.create(request, stops, context, THEN, tuple(map(ord, answer)))
    sequence.enter_pipeline(NUMBER)
    return sequence


def guess(sequence: Sequence, letter: str, *, fed: bool) -> None:
    """A child of the root."""
    token, logp = np.array([[ord(letter)]]), np.array([[-0.5]])
    sequence.tree.add_children(np.array([ROOT]), token, logp)
    if fed:
        sequence.tree.mark_fed(np.array([len(sequence.tree) - 1]))


@pytest.mark.parametrize("answer", ["", "o", "once"])
def test_answer_of_an_earlier_epoch_is_part_of_the_committed_text(answer: str) -> None:
    sequence = opened(answer)
    known = PROMPT + answer
    assert "".join(map(chr, sequence.context.tokens)) == known
    assert sequence.context.nodes == list(range(len(known)))
    assert sequence.context.sequence == sequence.start.sequence == NUMBER
    assert (sequence.start.prompt_len, sequence.start.committed_len) == (len(PROMPT), len(known))
    root = len(known) - 1
    assert (sequence.tree.id[ROOT], sequence.tree.parent_id[ROOT]) == (root, root - 1)
    assert (chr(sequence.tree.token[ROOT]), sequence.tree.position[ROOT]) == (known[-1], root)
    assert sequence.tree.fed[ROOT], "its row is the last decided one"
    assert len(sequence.tree) == 1
    rows = sequence.context.rows(0)
    assert rows[:, KIND].tolist() == [COMMITTED] * root + [LAST_COMMITTED]
    assert rows[1:, PARENT].tolist() == rows[:-1, NODE].tolist()


@pytest.mark.parametrize(
    ("max_new_tokens", "context", "last"),
    [(10, LONG, len(PROMPT) + 9), (LONG, 12, 11), (6, len(PROMPT) + 6, len(PROMPT) + 5)],
)
@pytest.mark.parametrize("answer", ["", "on", "once"])
def test_the_last_position_does_not_depend_on_where_an_epoch_ended(
    answer: str, max_new_tokens: int, context: int, last: int
) -> None:
    sequence = opened(answer, max_new_tokens=max_new_tokens, context=context)
    assert sequence.last_position == last
    # Nothing follows the token at the last position, so its logits are of no use.
    root = sequence.committed_len - 1
    for position in range(root + 1, last + 1):
        deepest = len(sequence.tree) - 1
        sequence.tree.add_children(np.array([deepest]), np.array([[position]]), np.array([[-0.1]]))
    nodes = np.arange(len(sequence.tree))
    assert sequence.tree.position[sequence.drop_past_end(nodes)].tolist() == list(range(root, last))


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
def test_request_ends_at_the_same_token_after_a_lost_epoch(
    text: str, reason: str, asked: dict
) -> None:
    for border in range(len(text) + 1):
        sequence = opened(text[:border], **asked)
        heard = [sequence.ended] if border else []
        heard += [sequence.accept([ord(letter)], LATER)[1] for letter in text[border:]]
        assert heard[-1] == reason, border
        assert set(heard[:-1]) <= {None}, border
        assert len(sequence.token_ns) == len(text)
        assert "".join(map(chr, sequence.context.tokens)) == PROMPT + text
        assert sequence.tree.position[ROOT] == len(PROMPT + text) - 1


def test_a_stop_string_that_the_prompt_ends_with_does_not_count() -> None:
    sequence = opened("on", stop=["tell", "l: o"])
    assert sequence.ended is None
    assert sequence.accept([ord("c")], LATER)[1] is None


def test_replayed_tokens_get_the_time_at_which_the_sequence_was_added() -> None:
    sequence = opened("one")
    sequence.prefilled = sequence.committed_len
    for at, letter in enumerate("ce"):
        sequence.accept([ord(letter)], LATER + at)
    assert sequence.token_ns == [THEN, THEN, THEN, LATER, LATER + 1]
    assert sequence.statistics() == {
        "cached_tokens": 0,
        "replayed": 3,
        "hits": 0,
        "started_ns": THEN,
        "token_ns": sequence.token_ns,
        "counts": sequence.counts,
        "first_token": sequence.first_token,
    }


def test_first_token_counts_are_those_of_this_epoch() -> None:
    sequence = opened("one")
    sequence.counts["steps"], sequence.counts["rows"] = 5, 9
    sequence.accept([ord("x")], LATER)
    sequence.counts["steps"] = 6
    sequence.accept([ord("y")], LATER)
    assert sequence.first_token == {"steps": 5, "rows": 9, "rounds": 0, "overruns": 0}


def test_a_hit_is_a_token_that_was_on_its_way() -> None:
    sequence = opened("one")
    guess(sequence, "c", fed=True)
    sequence.accept([ord("c")], LATER)  # was on its way
    guess(sequence, "e", fed=False)
    sequence.accept([ord("e")], LATER)  # was guessed, but not sent
    guess(sequence, "x", fed=True)
    sequence.accept([ord(" ")], LATER)  # was not guessed
    assert sequence.hits == 1
