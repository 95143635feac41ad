"""Target and draft must share a vocabulary."""

from __future__ import annotations

import pytest

from pipespec.engine.checkpoint.vocabulary import compare_vocabularies
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
    assert message.endswith(
        "choose a draft with the target's tokenizer, the smallest model of its family, or "
        "proposer=suffix, which needs no draft"
    )


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        (["<|eom_id|>", "<|begin_of_text|>"], "meta-llama/Llama-3.2-1B-Instruct"),
        (["<|object_ref_start|>", "<|fim_pad|>"], "Qwen/Qwen2.5-0.5B-Instruct"),
        (["<|object_ref_start|>", "<think>", "<tool_response>"], "Qwen/Qwen3-0.6B"),
        (["<start_of_turn>", "<start_of_image>"], "google/gemma-3-1b-it"),
        (["<start_of_turn>"], "google/gemma-2-2b-it"),
    ],
)
def test_a_draft_that_fits_is_named(tokens, draft):
    target = _Tokenizer(**{token: i for i, token in enumerate(tokens)})
    with pytest.raises(ModelError, match=f"such as {draft}, or proposer=suffix"):
        compare_vocabularies(target, _Tokenizer(a=0))


@pytest.mark.parametrize(
    "tokens",
    [
        ["<|begin_of_text|>", "<|eot_id|>"],  # Llama 3, before 3.1
        ["<|begin_of_text|>", "<|eom_id|>", "<think>"],  # distilled into Llama
        ["<|im_start|>", "<|fim_prefix|>", "<think>"],  # Phi 4
    ],
)
def test_no_draft_of_a_family_that_is_only_alike_is_named(tokens):
    target = _Tokenizer(**{token: i for i, token in enumerate(tokens)})
    with pytest.raises(ModelError, match="the smallest model of its family"):
        compare_vocabularies(target, _Tokenizer(a=0))
