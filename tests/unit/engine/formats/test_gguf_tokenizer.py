"""How text becomes tokens with the tokenizers in GGUF files; llama.cpp itself is the oracle."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from pipespec.engine.formats import gguf_tokenizer
from pipespec.engine.formats.gguf_splits import SPLITS
from pipespec.engine.formats.gguf_tokenizer import ends, load_tokenizer, refusal
from tests.helpers import llama_cpp
from tests.helpers.mixed_text import mixed_text

NUM_TEXTS, NUM_TEXTS_LONG, NUM_LEARNT, NUM_APART = 60, 10_000, 1500, 150
# The first name of each split gets all texts, and its other names a share.
FIRST_NAMES = {split: name for name, split in reversed(SPLITS.items())}
OTHERS_SHARE = 10
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIAL = ["<s>", "<x>", "<unk>", "<|user|>", "<think>"]
TYPES = [3, 3, 2, 3, 4]


def learn(*, raw: bool) -> dict[str, Any]:
    """The metadata of a vocabulary whose merges reach over what any split cuts, so that other
    pieces are other tokens. A tenth of the merges is left out: their tokens are found only by
    those that look for whole pieces."""
    dice = random.Random(1)
    texts = [mixed_text(dice) for _ in range(NUM_LEARNT)]
    found = Tokenizer(BPE())
    if raw:
        texts = [text.replace(" ", "\u2581") for text in texts]
    else:
        found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = BpeTrainer(
        vocab_size=6000,
        special_tokens=[*SPECIAL, *(BYTES if raw else ())],
        initial_alphabet=[] if raw else pre_tokenizers.ByteLevel.alphabet(),
        limit_alphabet=3000,
        max_token_length=8,
        show_progress=False,
    )
    found.train_from_iterator(texts, trainer)
    model = json.loads(found.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    num_bytes = 256 * raw
    return {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": [*TYPES, *[6] * num_bytes, *[1] * (len(tokens) - len(TYPES) - num_bytes)],
        "merges": [" ".join(pair) for pair in model["merges"] if dice.random() > 0.1],
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


@pytest.fixture(scope="module")
def learnt() -> dict[bool, dict[str, Any]]:
    pytest.importorskip("xllamacpp")
    return {raw: learn(raw=raw) for raw in (False, True)}


@pytest.fixture(scope="module")
def texts(long) -> list[str]:
    dice = random.Random(2)
    found = [mixed_text(dice) for _ in range(NUM_TEXTS_LONG if long else NUM_TEXTS)]
    for number, text in enumerate(found):
        if number % 20 == 0:
            found[number] = "<|user|>".join((text, text)) + " <think>"
    return found


def as_field(fields: Mapping[str, Any]) -> gguf_tokenizer.Field:
    return {name if "." in name else f"tokenizer.ggml.{name}": fields[name] for name in fields}.get


def agree(path: Path, fields: Mapping[str, Any], texts: list[str]) -> None:
    """Assert that texts are the same tokens for llama.cpp."""
    vocabulary = llama_cpp.Vocabulary(llama_cpp.write(path / "it.gguf", fields))
    backend, _, _ = load_tokenizer(as_field(fields))
    found = [each.ids for each in backend.encode_batch(texts)]
    for text, ids in zip(texts, found, strict=True):
        assert ids == vocabulary.encode(text), text
    vocabulary.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLITS)
def test_text_becomes_the_tokens_of_llama_cpp(tmp_path, learnt, texts, name):
    split = SPLITS[name]
    some = texts[:: 1 if FIRST_NAMES[split] == name else OTHERS_SHARE]
    agree(tmp_path, learnt[split.raw] | {"pre": name}, some)


@pytest.mark.slow
def test_the_texts_tell_all_splits_apart(learnt):
    dice = random.Random(2)
    joined = "\n".join(mixed_text(dice) for _ in range(NUM_APART))
    found: dict[tuple[int, ...], set[Any]] = {}
    for split in SPLITS.values():
        fields = learnt[split.raw]
        ids = gguf_tokenizer.of_pairs(fields["tokens"], fields["merges"], split).encode(joined).ids
        found.setdefault(tuple(ids), set()).add((split.expressions, split.whole))
    assert [alike for alike in found.values() if len(alike) > 1] == []


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"add_space_prefix": False},
        {"add_bos_token": False, "add_eos_token": True},
        {"general.name": "Phi-3 mini"},
    ],
)
def test_tokens_with_scores_are_joined_as_by_llama_cpp(tmp_path, learnt, texts, more):
    fields = {**learnt[True], "model": "llama"}
    del fields["merges"]
    count = len(fields["tokens"])
    fields["tokens"] = ["<s>", "</s>", "<unk>", "<|endoftext|>", *fields["tokens"][4:]]
    fields["scores"] = [0.0] * 261 + [-float(each) for each in range(count - 261)]
    agree(tmp_path, fields | more, [*texts, "</s> \n a", "<think> a", "<|endoftext|> \n a"])


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"pre": "glm4"},
        {"pre": "llama-bpe", "add_bos_token": False},
        {"pre": "qwen2", "add_bos_token": True, "add_eos_token": True},
    ],
)
def test_a_text_begins_and_ends_as_for_llama_cpp(tmp_path, learnt, more):
    fields = learnt[False] | {"pre": "llama-bpe"} | more
    agree(tmp_path, fields, ["a text", "", "<s>", "<|user|>"])


CHAT = ["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "[EOT]"]
HARMONY = ["<|return|>", "<|call|>", "<|end|>", "<|start|>"]


@pytest.mark.parametrize(
    ("tokens", "named", "expected"),
    [
        (CHAT, {}, CHAT),
        (["<a>", "<b>"], {"eos": "<a>", "eot": "<b>"}, ["<a>", "<b>"]),
        (["<a>", "<b>", "<c>"], {"eom": "<c>", "fim_pad": "<b>"}, ["<b>", "<c>"]),
        (HARMONY, {"eos": "<|return|>"}, ["<|return|>", "<|call|>"]),
        (HARMONY[1:], {}, ["<|call|>", "<|end|>"]),
        (["<|flush|>", "<|calls|>", "<|end|>"], {}, ["<|flush|>", "<|calls|>"]),
        (["</s>", "<|tool_response>", "<turn|>"], {}, ["<|tool_response>", "<turn|>"]),
        (["</s>", "<turn|>"], {}, ["</s>", "<turn|>"]),
        (["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_middle|>"], {}, None),
        (["<fim_prefix>", "<fim_suffix>", "<reponame>"], {}, ["<reponame>"]),
        (["<|ifm|im_end|>", "<|plamo:file_separator|>", "<|plamo:eos|>"], {}, None),
    ],
)
@pytest.mark.parametrize("kind", [1, 3])
def test_texts_end_at_the_tokens_of_llama_cpp(tmp_path, learnt, tokens, named, expected, kind):
    fields = learnt[False] | {"pre": "qwen2", "eos_token_id": 0}
    first = len(fields["tokens"])
    fields["tokens"] = [*fields["tokens"], *tokens]
    fields["token_type"] = [*fields["token_type"], *[kind] * len(tokens)]
    for name, token in named.items():
        fields[f"{name}_token_id"] = first + tokens.index(token)
    found = ends(as_field(fields))
    expected = tokens[:-1] if expected is None else expected
    assert {fields["tokens"][each] for each in found} - {"<s>"} == set(expected)
    assert found == llama_cpp.Vocabulary(llama_cpp.write(tmp_path / "it.gguf", fields)).ends
    # Those that are known by their texts are tokens wherever they are, of whatever type.
    agree(tmp_path, fields, [f"a{token} b" for token in tokens])


def test_special_tokens_keep_their_ids():
    """Also where they are not spelled in GPT-2's alphabet, and some of the user are none."""
    tokens = ["a", "b", "ab", "Ġ", "<｜begin▁of▁text｜>", "<think>", "<｜User｜>"]
    fields = {"model": "gpt2", "pre": "deepseek-v3", "tokens": tokens, "merges": ["a b"]}
    found, _, _ = load_tokenizer(as_field(fields | {"token_type": [1, 1, 1, 1, 3, 4, 3]}))
    assert found.get_vocab_size() == len(tokens)
    ids = found.encode("<｜begin▁of▁text｜>ab<think><｜User｜> a").ids
    assert ids == [4, 2, 5, 6, 3, 0]
    assert found.decode(ids, skip_special_tokens=True) == "ab<think> a"


def test_the_file_names_special_tokens_and_the_template():
    tokens = ["a", "b", "<s>"]
    fields = {"model": "gpt2", "pre": "llama-bpe", "tokens": tokens, "bos_token_id": 2}
    fields |= {"token_type": [1, 1, 3], "tokenizer.chat_template": "{{ messages }}"}
    backend, *rest = load_tokenizer(as_field(fields))
    assert rest == ["{{ messages }}", {"bos_token": "<s>"}]
    assert backend.encode("ab").ids == [2, 0, 1]


@pytest.mark.parametrize("kind", ["gemma4", "llama"])
def test_tokens_of_text_and_bytes_become_text_again(kind):
    fields = {
        "model": kind,
        "tokens": ["<unk>", "<s>", "</s>", *BYTES, "\u2581", "a", "b", "\u2581a"],
        "merges": ["\u2581 a"],
        "token_type": [2, 3, 3, *[6] * 256, 1, 1, 1, 1],
        "scores": [0.0] * 259 + [-2.0, -2.0, -2.0, -1.0],
    }
    found, _, _ = load_tokenizer(as_field(fields))
    for text in ("a b\n", "é a  a"):
        ids = found.encode(text).ids
        assert found.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("kind", "split", "clause"),
    [
        ("gpt2", "strange", "it splits text as 'strange', which is not among the 90 ways"),
        ("gpt2", None, "it splits text as None, which"),
        ("bert", None, "its vocabulary is of the kind 'bert'; read are gpt2, gemma4 and llama"),
        ("llama", None, None),
    ],
)
def test_what_is_not_read_is_said_in_one_clause(kind, split, clause):
    found = refusal(kind, split)
    assert found == clause or (clause is not None and found is not None and clause in found)
    if clause is not None:
        with pytest.raises(ValueError, match=kind if kind != "gpt2" else "splits"):
            load_tokenizer(as_field({"model": kind, "pre": split}))
