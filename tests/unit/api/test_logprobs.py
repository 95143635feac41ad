"""The log-probabilities of the Python interface."""

from __future__ import annotations

from collections.abc import Sequence

from pipespec import Logprob
from pipespec.api.outputs import LogprobsAtPlace, logprobs_by_place
from pipespec.core import TokenLogprobs


class Letters:
    """A tokenizer whose token i is the i-th letter."""

    def decode(self, token_ids: Sequence[int], **_: bool) -> str:
        return "".join(map(self.convert_ids_to_tokens, token_ids))

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(ord("a") + token)

    def encode(self, text: str, **_: bool) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]


TOP = ((4, -0.5), (1, -1.5), (2, -2.0))


def at_place(token: int, reported: TokenLogprobs, most: int) -> LogprobsAtPlace:
    found = logprobs_by_place(Letters(), [token], [reported], most)
    assert found is not None
    return found[0]


def test_the_token_of_a_place_comes_first_and_is_not_repeated_among_the_most_probable() -> None:
    found = at_place(1, TokenLogprobs(-1.5, TOP), 2)
    assert list(found.items()) == [(1, Logprob(-1.5, 2, "b")), (4, Logprob(-0.5, 1, "e"))]


def test_a_token_outside_the_most_probable_has_no_rank() -> None:
    found = at_place(7, TokenLogprobs(-9.0, TOP), 1)
    assert found == {7: Logprob(-9.0, None, "h"), 4: Logprob(-0.5, 1, "e")}


def test_with_no_others_asked_for_only_the_token_of_a_place_is_reported() -> None:
    assert list(at_place(7, TokenLogprobs(-9.0), 0)) == [7]


def test_none_are_returned_where_none_were_asked_for() -> None:
    assert logprobs_by_place(Letters(), [7], [], None) is None
