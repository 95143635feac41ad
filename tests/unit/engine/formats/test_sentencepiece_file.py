"""How text becomes tokens with a SentencePiece model alone; SentencePiece itself is the oracle."""

import io
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from pipespec.engine.checkpoint import tokenizer
from pipespec.errors import ModelError
from tests.helpers.mixed_text import mixed_text

NUM_LEARNT, NUM_TEXTS, NUM_TEXTS_LONG = 200, 300, 5000
SPACED = ("", " ", "   ", " a", "a ", "  two  spaces  ", "\n x", "\u2581", "a\u2581 ", "<0x41>")
LINES = ("Once upon a time there was", "the cat sat on the mat", "a  b   c", "été à la plage")


def trained(**options: Any) -> bytes:
    """A model of words and mixed scripts, of which most characters are in no piece."""
    dice = random.Random(1)
    found = io.BytesIO()
    texts = [*LINES * 20, *(mixed_text(dice) for _ in range(NUM_LEARNT))]
    defaults = {"byte_fallback": True, "normalization_rule_name": "identity", "vocab_size": 2600}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=found,
        character_coverage=0.98,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
        **defaults | options,
    )
    return found.getvalue()


def folder(path: Path, model: bytes, **settings: Any) -> Path:
    (path / "tokenizer.model").write_bytes(model)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False} | settings
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="module")
def texts(long) -> list[str]:
    dice = random.Random(2)
    mixed = [mixed_text(dice) for _ in range(NUM_TEXTS_LONG if long else NUM_TEXTS)]
    pairs = [f"{a}{b}" for a, b in itertools.product(SPACED, SPACED)]
    return [*mixed, *pairs, *LINES]


SYMBOLS = {"user_defined_symbols": ["<think>", "\u2581\u2581", "\n"]}
AS_LLAMA = {"remove_extra_whitespaces": False}
AS_GEMMA = AS_LLAMA | {"add_dummy_prefix": False}


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_dummy_prefix": False},
        AS_LLAMA,
        AS_GEMMA,
        AS_LLAMA | {"byte_fallback": False},
        AS_LLAMA | {"split_by_whitespace": False, "split_digits": True},
        AS_LLAMA | SYMBOLS,
        AS_GEMMA | SYMBOLS,
        SYMBOLS,
    ],
    ids=str,
)
def test_text_becomes_the_tokens_of_sentencepiece_and_text_again(tmp_path, texts, kind, options):
    model = trained(model_type=kind, **options)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
    ours = tokenizer.load(folder(tmp_path, model))
    assert len(ours.get_vocab()) == theirs.get_piece_size()
    symbols = [f"{text}<think>{text}" for text in texts[:50]] if "<think>" in str(options) else []
    for text in [*texts, *symbols]:
        ids, found = theirs.encode(text), ours.encode(text)
        # The same unigrams in another order are equally probable.
        assert found == ids or (kind == "unigram" and sorted(found) == sorted(ids)), text
        # SentencePiece writes another sign for unknown tokens, and strips pieces, not spaces.
        if theirs.unk_id() not in ids and not text.startswith("\u2581"):
            assert ours.decode(ids) == theirs.decode(ids), text


def test_special_tokens_and_the_beginning_are_those_of_the_settings(tmp_path):
    model = trained(control_symbols=["<|user|>"], **AS_LLAMA)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
    size = theirs.get_piece_size()
    added = {str(size): {"content": "<|more|>", "special": True}}
    told = {"add_bos_token": True, "add_eos_token": True, "added_tokens_decoder": added}
    ours = tokenizer.load(folder(tmp_path, model, **told, chat_template="{{ messages }}"))
    bos, eos, user = theirs.bos_id(), theirs.eos_id(), theirs.piece_to_id("<|user|>")
    a = b = theirs.encode("the cat")
    assert ours.encode("the cat<|user|><|more|>") == [bos, *a, user, size, eos]
    assert ours.chat_template == "{{ messages }}"
    assert ours.decode([bos, *a, user, eos], skip_special_tokens=True) == "the cat"
    # Only a first text begins with a space, unless the settings ask for the former rule.
    space = theirs.encode("x<|user|> the cat")[-len(b) :]
    assert ours.encode("<|user|> the cat", add_special_tokens=False) == [user, *space]
    assert ours.encode("<|user|>the cat", add_special_tokens=False) != [user, *b]
    former = tokenizer.load(folder(tmp_path, model, legacy=True))
    assert former.encode("<|user|>the cat") == [user, *b]


@pytest.mark.parametrize(
    ("options", "settings", "clause"),
    [
        ({"normalization_rule_name": "nmt_nfkc"}, {}, "normalizes characters, which is not read"),
        ({"model_type": "char"}, {}, "is of words or characters, which is not read"),
        ({"treat_whitespace_as_suffix": True}, {}, "has spaces at the ends of words"),
        (
            {},
            {"added_tokens_decoder": {"9999": {"content": "<|far|>", "special": True}}},
            "token '<|far|>' has no place at the id 9999",
        ),
    ],
)
def test_what_cannot_be_built_exactly_is_refused_in_a_sentence(tmp_path, options, settings, clause):
    with pytest.raises(ModelError) as caught:
        tokenizer.load(folder(tmp_path, trained(**options), **settings))
    assert clause in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("length", [0, 1, 9000])
def test_a_part_of_a_model_is_refused(tmp_path, length):
    with pytest.raises(ModelError, match=r"the tokenizer in .* cannot be used"):
        tokenizer.load(folder(tmp_path, trained()[:length]))
