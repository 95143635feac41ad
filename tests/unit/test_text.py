"""Streaming text: what is shown is final, complete and cut where a stop string begins."""

import time
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pipespec.engine.checkpoint.tokenizer import BackendTokenizer
from pipespec.engine.formats.gguf_tokenizer import load_tokenizer
from pipespec.text import (
    Detokenizer,
    FinalText,
    StopStrings,
    TokenOffsets,
    decode,
    special_markers,
    token_bytes,
    token_text,
)

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
EOS = "<|eos|>"


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """A byte-level BPE like Llama 3's or GPT-2's: any bytes, some merged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat, the hat", "naïve café — 日本語 日本"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)


@cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """A SentencePiece-like BPE as of Llama 2: words begin with "▁", rare characters are bytes."""
    tokens = [EOS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁cat", "a", "日", "."]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, fuse_unk=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([EOS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)


TOKENIZERS = pytest.mark.parametrize("make", [byte_level, byte_fallback])


def whole(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def chunks(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    borders = data.draw(st.lists(st.integers(0, len(ids)), max_size=6).map(sorted))
    return [ids[a:b] for a, b in zip([0, *borders], [*borders, len(ids)], strict=True)]


@given(text=st.text(st.characters(codec="utf-8", exclude_characters=REPLACEMENT)))
def test_no_piece_holds_a_broken_character(text):
    tokenizer = byte_level()
    stream = Detokenizer(tokenizer)
    pieces = [stream.push(token) for token in tokenizer.encode(text)]
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert "".join(pieces) == text, "nothing is left to flush once the last character is whole"


@TOKENIZERS
@given(data=st.data())
def test_any_tokens_give_what_decode_gives(make, data):
    """Also ids beyond the tokenizer's, as a padded vocabulary has them."""
    tokenizer = make()
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 8), max_size=40))
    stream = Detokenizer(tokenizer)
    text = "".join(map(stream.push, ids)) + stream.pending
    assert text == decode(tokenizer, ids)
    assert REPLACEMENT in whole(tokenizer, ids) or text == whole(tokenizer, ids)


def fallback_ids(text: str | bytes) -> list[int]:
    raw = text.encode() if isinstance(text, str) else text
    return byte_fallback().convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in raw])


@given(st.lists(st.one_of(st.binary(max_size=4), st.text(max_size=2).map(str.encode)), max_size=8))
def test_a_broken_character_of_raw_bytes_breaks_no_other(parts):
    raw = b"".join(parts)
    tokenizer, ids = byte_fallback(), fallback_ids(b"." + raw)
    stream = Detokenizer(tokenizer)
    text = "".join(map(stream.push, ids)) + stream.pending
    assert text == decode(tokenizer, ids) == "." + raw.decode(errors="replace")


@pytest.mark.parametrize(
    ("prompt", "answer", "text"),
    [
        ("สวัสดี", "ครับผม", "ครับผม"),
        ("สวัสดี", "ครับผม".encode()[:-1], "ครับผ" + REPLACEMENT),
        ("日本語" * 9, "日 a", "日 a"),
        *(("😀".encode()[:cut], "😀abcd".encode()[cut:], "😀abcd") for cut in range(4)),
        *(("😀".encode()[:cut], "abcd", "abcd") for cut in range(4)),
        (b"\xff", "é", "é"),
        ("😀".encode()[:2], "😀".encode()[2:3] + b"abcd", REPLACEMENT + "abcd"),
    ],
)
@pytest.mark.parametrize("kind", ["bytes of fallback", "bytes as letters"])
def test_text_after_a_prompt_whose_end_is_within_a_character(kind, prompt, answer, text):
    tokenizer, ids_of = byte_fallback(), fallback_ids
    if kind == "bytes as letters":
        tokenizer, ids_of = byte_level(), letter_ids
    for before in ([], tokenizer.all_special_ids * 9, fallback_ids("")):
        stream = FinalText(tokenizer, [*ids_of("x"), *before, *ids_of(prompt)])
        pieces = [stream.push([token]) for token in ids_of(answer)]
        assert "".join(pieces) + stream.flush() == text
        assert not any(piece.endswith(REPLACEMENT) for piece in pieces)
    if isinstance(answer, str):
        assert sum(map(bool, pieces)) == len(text), "each character is shown once it is whole"


def letter_ids(text: str | bytes) -> list[int]:
    raw = text.encode() if isinstance(text, str) else text
    letters = {token_bytes(byte_level(), id_): id_ for id_ in byte_level().get_vocab().values()}
    return [letters[bytes([byte])] for byte in raw]


def test_broken_characters_without_end_take_no_more_time_each():
    stream = Detokenizer(byte_fallback())
    ids = fallback_ids(b"\xff" * 4000)
    assert "".join(map(stream.push, ids)) + stream.pending == REPLACEMENT * len(ids)
    assert len(stream._ids) < 20


@given(
    context=st.lists(st.sampled_from(["▁", "▁the", "a", "日", EOS]), max_size=12),
    after=st.lists(st.sampled_from(["▁", "▁the", "▁cat", "a", "日", ".", EOS]), max_size=8),
)
def test_text_after_a_context_equals_what_decode_appends(context, after):
    tokenizer = byte_fallback()
    prompt = tokenizer.convert_tokens_to_ids(context)
    ids = tokenizer.convert_tokens_to_ids(after)
    stream = Detokenizer(tokenizer, prompt)
    text = whole(tokenizer, prompt) + "".join(map(stream.push, ids)) + stream.pending
    assert text == whole(tokenizer, prompt + ids)


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
    data=st.data(),
)
def test_first_stop_string_behind_min_tokens_ends_the_text_across_all_borders(text, stops, data):
    """Of those that end at the same place the longest."""
    free = data.draw(st.integers(0, len(text)))
    ends = [end for end in range(free + 1, len(text) + 1) if text[:end].endswith(tuple(stops))]
    stream = StopStrings(stops)
    shown = stream.pass_over(text[:free])
    for chunk in chunks(data, list(text[free:])):
        shown += stream.push("".join(chunk))
        assert text.startswith(shown)
    shown += stream.flush()
    if not ends:
        assert (shown, stream.found) == (text, None)
        return
    longest = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
    assert stream.found == longest
    assert shown == text[: max(free, ends[0] - len(longest))]


@given(
    text=st.text("abc", max_size=20),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
)
def test_only_a_possible_beginning_of_a_stop_string_is_held_back(text, stops):
    stream = StopStrings(stops)
    for end in range(1, len(text) + 1):
        stream.push(text[end - 1])
        if stream.found:
            break
        held = StopStrings(stops).push(text[:end])
        rest = text[len(held) : end]
        assert not rest or any(stop.startswith(rest) for stop in stops)


def test_stop_strings_are_ignored_before_min_tokens():
    tokenizer = byte_level()
    ids = tokenizer.encode("the cat, the hat")
    first = tokenizer.encode("the cat")
    for least, shown in ((0, ""), (1, "the cat, "), (len(first), "the cat, ")):
        text = FinalText(tokenizer, stops=["the"], min_tokens=least)
        checked = FinalText(tokenizer, stops=["the"], min_tokens=least)
        ends = [checked.completes(token) for token in ids]
        assert text.push(ids) + text.flush() == shown
        assert text.found == "the"
        assert ends.index(True) == (0 if not least else len(tokenizer.encode("the cat, the")) - 1)


@given(
    parts=st.lists(st.sampled_from(["the", " cat", "é", "🙂", ",", EOS]), max_size=8),
    stops=st.lists(st.sampled_from(["t,", "cat", "ca🙂", "ec"]), max_size=2),
    least=st.integers(0, 3),
    data=st.data(),
)
def test_marked_text_is_the_same_text_with_markers_in_their_places(parts, stops, least, data):
    tokenizer = byte_level()
    ids = [token for part in parts for token in tokenizer.encode(part)]
    plain = FinalText(tokenizer, (), stops, least)
    text = plain.push(ids) + plain.flush()
    marked = FinalText(tokenizer, (), stops, least, {tokenizer.eos_token_id: EOS})
    shown = "".join(marked.push(chunk) for chunk in chunks(data, ids)) + marked.flush()
    assert (shown.replace(EOS, ""), marked.found) == (text, plain.found)
    # Before the stop string a marker is where it was written; behind it there is none.
    assert "".join(parts).startswith(shown)
    if plain.found is None:
        assert shown == "".join(parts)


def test_a_marker_within_a_character_loses_nothing():
    tokenizer = byte_level()
    first, *rest = tokenizer.encode("🙂")
    eos = tokenizer.eos_token_id
    text = FinalText(tokenizer, (), (), 0, {eos: EOS})
    assert text.push([first, eos, *rest]) + text.flush() == f"🙂{EOS}"
    text = FinalText(tokenizer, (), (), 0, {eos: EOS})
    assert text.push([first, eos]) + text.flush() == f"{REPLACEMENT}{EOS}"


def test_special_markers_are_those_that_decoding_leaves_out():
    tokenizer = byte_level.__wrapped__()  # that of the other tests stays as it is
    tokenizer.add_tokens(["<tool_call>"])
    assert special_markers(tokenizer, [EOS, "<tool_call>", "the", "unknown"]) == {
        tokenizer.eos_token_id: EOS
    }


def test_a_token_alone_has_a_text_and_bytes():
    tokenizer = byte_level()
    ids = tokenizer.encode("the é😀")
    assert b"".join(token_bytes(tokenizer, token) for token in ids).decode() == "the é😀"
    assert token_text(tokenizer, ids[0]) == "the"


def test_stop_strings_a_hundred_times_as_long_cost_a_token_less_than_that():
    spent = dict[int, float]()
    for length in (2, 200):
        stops = tuple("x" * length + f"{i:03d}" for i in range(64))
        stream, began = StopStrings(stops), time.process_time()
        for _ in range(2000):
            stream.push("x and ")
        spent[length] = time.process_time() - began
        assert stream.push("x" * length + "063") == "" and stream.found == stops[63]
    assert spent[200] < 60 * spent[2]


@TOKENIZERS
def test_a_token_begins_where_its_character_does(make):
    """Special tokens, which do not show, take no place."""
    tokenizer, text = make(), "a😀b ö c"
    ids_of = fallback_ids if make is byte_fallback else letter_ids
    ids = [id_ for part in text for id_ in (*ids_of(part), *tokenizer.all_special_ids)]
    offsets = TokenOffsets(tokenizer, ids_of("x"), 3)
    found = [offsets.push(token) for token in ids]
    shown = [token for token in ids if token not in tokenizer.all_special_ids]
    places = [at for at, token in zip(found, ids, strict=True) if token in shown]
    expected = [3 + at for at, part in enumerate(text) for _ in part.encode()]
    assert places == expected


def test_offsets_after_broken_characters():
    offsets = TokenOffsets(byte_fallback(), [], 0)
    # U+FFFD for the first byte, for the next two, and for the last.
    found = [*map(offsets.push, fallback_ids(b"\xff\xf0\x9fa\xffb"))]
    assert found == [0, 1, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        (EOS, "a the cat"),
        ("cat" + EOS, "a the "),
        (EOS + " the", "a the cat"),
        (f"t{EOS} the{EOS}", "a the ca"),
        ("unknown" + EOS, "a the cat the"),
        ("cat the", "a the cat the"),
    ],
)
@pytest.mark.parametrize("shows", [False, True])
def test_stop_strings_may_name_special_tokens(stop, shown, shows):
    tokenizer = byte_level()
    eos = tokenizer.eos_token_id
    ids = [*tokenizer.encode("a the cat"), eos, *tokenizer.encode(" the"), eos]
    found = stop in f"a the cat{EOS} the{EOS}"
    if stop == "cat the":  # they are left out of the text for stop strings that do not name them
        found, shown = True, "a the "
    if shows and not found:
        shown = f"a the cat{EOS} the{EOS}"
    markers = {eos} if shows else ()
    checked = FinalText(tokenizer, (), [stop], 0, markers)
    ends = [checked.completes(token) for token in ids]
    text = FinalText(tokenizer, (), [stop], 0, markers)
    pieces = "".join(text.push([token]) for token in ids[: [*ends, True].index(True) + 1])
    assert (pieces + text.flush(), text.found) == (shown, stop if found else None)
    late = FinalText(tokenizer, (), [stop], len(ids), markers)
    assert late.push(ids).replace(EOS, "") == "a the cat the"


@pytest.mark.parametrize(("kind", "stops"), [(1, True), (3, True), (4, False)])
def test_stop_strings_may_name_the_control_tokens_of_a_gguf_file(kind, stops):
    """Those of the user (4) are text, and so end it too, but are known only by their text."""
    tokens = ["a", "b", "<|eot_id|>", "<turn>"]
    types = {"tokenizer.ggml.token_type": [1, 1, kind, 3 if stops else 4]}
    fields = types | {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2"}
    fields |= {"tokenizer.ggml.tokens": tokens, "general.name": ""}
    backend, _, special = load_tokenizer(fields.get)
    tokenizer = BackendTokenizer(backend.to_str(), None, special)
    for stop, ids in (("<|eot_id|>", [0, 2]), ("<turn>", [0, 3]), ("b<turn>", [0, 1, 3])):
        text = FinalText(tokenizer, (), [stop])
        assert (text.push([*ids, 1]) + text.flush(), text.found) == ("a", stop)
