"""The log-probabilities of the Python interface."""

from collections.abc import Sequence

import pytest

from pipespec import Logprob
from pipespec.api.outputs import logprobs_by_place
from pipespec.core import TokenLogprobs


class Letters:
    """A tokenizer whose token i is the i-th letter."""

    def decode(self, token_ids: Sequence[int], **_: bool) -> str:
        return "".join(map(self.convert_ids_to_tokens, token_ids))

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(ord("a") + token)


TOP = ((4, -0.5), (1, -1.5), (2, -2.0))


@pytest.mark.parametrize(
    ("token", "own", "top", "most", "found"),
    [
        # The token comes first, and not again among the most probable.
        (1, -1.5, TOP, 2, {1: Logprob(-1.5, 2, "b"), 4: Logprob(-0.5, 1, "e")}),
        (7, -9.0, TOP, 1, {7: Logprob(-9.0, None, "h"), 4: Logprob(-0.5, 1, "e")}),
        (7, -9.0, (), 0, {7: Logprob(-9.0, None, "h")}),
        (7, -9.0, (), None, None),
    ],
)
def test_the_token_and_the_most_probable_are_reported(token, own, top, most, found):
    (place,) = logprobs_by_place(Letters(), [token], [TokenLogprobs(own, top)], most) or [None]
    assert place == found and [*(place or ())] == [*(found or ())]
