"""How text is split by tokenizers in GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipespec.engine.formats.gguf_tokenizer import byte_level, load_tokenizer, splitter

TEXT = "DON'T stop: 12345 (okay)\n\n  übung"
THREES, ONES = ["123", "45"], list("12345")
CUT, WHOLE = ["DON", "'T"], ["DON'T"]
# How it begins, and its digits; the rest is the same for all.
PIECES = {
    "llama-bpe": (CUT, THREES),
    "qwen2": (CUT, ONES),
    "tekken": (CUT, ONES),
    "gpt-4o": (WHOLE, THREES),
    "deepseek-v3": (CUT, THREES),
    "smollm": (["DON", "'", "T"], ONES),
}


def pieces(split: str) -> list[str]:
    found = splitter(split).pre_tokenize_str(TEXT)
    return [TEXT[start:stop] for _, (start, stop) in found]


@pytest.mark.parametrize("split", PIECES)
def test_text_is_split_as_the_model_was_trained(split):
    first, digits = PIECES[split]
    rest = [" (", "okay", *([")", "\n\n "] if split == "smollm" else [")\n\n", " "]), " übung"]
    assert pieces(split) == [*first, " stop", ":", " ", *digits, *rest]


def test_special_tokens_keep_their_ids():
    """Also where they are not spelled in GPT-2's alphabet, and some of the user are none."""
    tokens = ["a", "b", "ab", "Ġ", "<｜begin▁of▁text｜>", "<think>", "<｜User｜>"]
    types = [1, 1, 1, 1, 3, 4, 3]
    backend = byte_level(tokens, ["a b"], types, "deepseek-v3")
    assert backend.get_vocab_size() == len(tokens)
    found = backend.encode("<｜begin▁of▁text｜>ab<think><｜User｜> a").ids
    assert found == [4, 2, 5, 6, 3, 0]
    assert backend.decode(found, skip_special_tokens=True) == "ab<think> a"


def test_a_piece_that_is_a_token_needs_no_merges_where_the_model_has_it_so():
    tokens = ["a", "b", "c", "abc"]
    for split, expected in (("llama-bpe", [3]), ("tekken", [3]), ("qwen2", [0, 1, 2])):
        assert byte_level(tokens, [], [], split).encode("abc").ids == expected


def fields(**given: Any) -> Callable[[str], Any]:
    stored = {
        "ggml.model": "gpt2",
        "ggml.tokens": ["a", "b", "<s>"],
        "ggml.token_type": [1, 1, 3],
        "ggml.merges": [],
        "ggml.bos_token_id": 2,
        "chat_template": "{{ messages }}",
    } | {f"ggml.{name}": value for name, value in given.items()}
    return stored.get


@pytest.mark.parametrize(
    ("split", "add", "begins"),
    [
        ("llama-bpe", None, True),
        ("qwen2", None, False),
        ("llama-bpe", False, False),
        ("qwen2", True, True),
    ],
)
def test_a_text_begins_as_the_file_or_its_kind_says(tmp_path, split, add, begins):
    found = load_tokenizer(tmp_path / "it.gguf", fields(pre=split, add_bos_token=add))
    assert found("ab").input_ids == ([2] if begins else []) + [0, 1]
    assert (found.bos_token_id, found.chat_template) == (2, "{{ messages }}")


def test_an_unknown_split_is_refused(tmp_path):
    with pytest.raises(ValueError, match="splits text as 'strange', and read are gpt-2, llama-bpe"):
        load_tokenizer(tmp_path / "it.gguf", fields(pre="strange"))
