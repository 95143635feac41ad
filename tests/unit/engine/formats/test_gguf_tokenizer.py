"""How text is split by tokenizers in GGUF files."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from pipespec.engine.formats.gguf_tokenizer import SPLITS, WHOLE, load_tokenizer, set_split

TEXT = "DON'T stop: 12345 (okay)\n\n  übung"
PIECES = {
    "llama-bpe": [
        "DON",
        "'T",
        " stop",
        ":",
        " ",
        "123",
        "45",
        " (",
        "okay",
        ")\n\n",
        " ",
        " übung",
    ],
    "qwen2": ["DON", "'T", " stop", ":", " ", *"12345", " (", "okay", ")\n\n", " ", " übung"],
    "tekken": ["DON", "'T", " stop", ":", " ", *"12345", " (", "okay", ")\n\n", " ", " übung"],
    "gpt-4o": ["DON'T", " stop", ":", " ", "123", "45", " (", "okay", ")\n\n", " ", " übung"],
    "deepseek-v3": [
        "DON",
        "'T",
        " stop",
        ":",
        " ",
        "123",
        "45",
        " (",
        "okay",
        ")\n\n",
        " ",
        " übung",
    ],
}


def pieces(split: str) -> list[str]:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    set_split(tokenizer, split)
    found = tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    return [TEXT[start:stop] for _, (start, stop) in found]


@pytest.mark.parametrize("split", PIECES)
def test_text_is_split_as_the_model_was_trained(split):
    assert pieces(split) == PIECES[split]


def test_only_tokenizers_that_look_up_whole_pieces_do():
    for split in SPLITS:
        tokenizer = Tokenizer(BPE())
        set_split(tokenizer, split)
        assert tokenizer.model.ignore_merges == (split in WHOLE)


def test_an_unknown_split_is_refused(tmp_path):
    with pytest.raises(ValueError, match="splits text as 'strange', and read are gpt-2, llama-bpe"):
        load_tokenizer(tmp_path / "it.gguf", "gpt2", "strange")
