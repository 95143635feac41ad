"""Target and draft must share a vocabulary."""

from __future__ import annotations

import pytest

from pipespec.engine.vocabulary import compare_vocabularies
from pipespec.errors import ModelError


class _Tokenizer:
    def __init__(self, **vocabulary: int):
        self.vocabulary = vocabulary

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary


def test_equal_vocabularies_pass():
    one, other = _Tokenizer(a=0, b=1), _Tokenizer(b=1, a=0)
    compare_vocabularies(one, other)  # raises where they differ
    assert one.get_vocab() == other.get_vocab()


def test_different_vocabularies_are_counted_and_shown():
    with pytest.raises(ModelError) as caught:
        compare_vocabularies(_Tokenizer(a=0, b=1, c=2, e=3), _Tokenizer(a=0, b=2, d=1, e=4))
    message = str(caught.value)
    assert "differ in 4 tokens" in message
    assert "'b' (id 1 in the target, id 2 in the draft)" in message
    assert "'c' (id 2 in the target, missing in the draft)" in message
    assert "'d' (missing in the target, id 1 in the draft)" in message
    assert "'e'" not in message, "three are enough"
