"""Reading GGUF files, and headers that claim more than the file holds."""

import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFEndian, GGUFReader, GGUFValueType, GGUFWriter

from pipespec.engine.formats.gguf_file import MOST_ELEMENTS, GgufFile
from pipespec.engine.inspection.inspection import inspect
from pipespec.errors import ModelError
from tests.helpers.models import shared
from tools.rig import gguf_files as rig

CLAIM = 2**61
TEXTS = [f"token{i}" for i in range(50)]


def write(path: Path, endian: GGUFEndian = GGUFEndian.LITTLE) -> Path:
    """A small file with metadata of every kind."""
    writer = GGUFWriter(path, "llama", endianess=endian)
    writer.add_block_count(1)
    writer.add_array("tokenizer.ggml.tokens", TEXTS)
    writer.add_array("tokenizer.ggml.scores", [0.5] * len(TEXTS))
    writer.add_bool("some.flag", True)
    writer.add_float64("some.double", 0.5)
    writer.add_tensor("token_embd.weight", np.zeros((50, 8), np.float32))
    writer.add_tensor("output.weight", np.zeros((50, 8), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_and_tensors_are_those_of_the_package(tmp_path):
    path = write(tmp_path / "model.gguf")
    theirs, ours = GGUFReader(path), GgufFile(path)
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            assert ours.metadata(name) == field.contents(), name
    assert ours.metadata("some.other") is None
    assert [*ours.tensors] == [each.name for each in theirs.tensors]
    for each in theirs.tensors:
        assert np.array_equal(ours.data(each.name), each.data), each.name


def test_texts_of_a_tokenizer_take_no_memory_until_they_are_read(tmp_path):
    path, texts = tmp_path / "model.gguf", [f"token{i:060}" for i in range(20_000)]
    writer = GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", texts)
    for write in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{write}_to_file")()
    writer.close()
    tracemalloc.start()
    try:
        found = GgufFile(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20  # 20,000 texts of 65 bytes take 2.4 MB
    finally:
        tracemalloc.stop()
    assert found.metadata("tokenizer.ggml.tokens") == texts


def test_a_text_that_is_no_utf_8_is_refused_when_it_is_read(tmp_path):
    path = write(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace(b"token7", b"token\xff"))
    found = GgufFile(path)
    with pytest.raises(ModelError, match="holds a text that is not UTF-8"):
        found.metadata("tokenizer.ggml.tokens")


def test_a_file_of_the_other_byte_order_is_refused(tmp_path):
    with pytest.raises(ModelError, match="for machines of the other byte order"):
        GgufFile(write(tmp_path / "model.gguf", GGUFEndian.BIG))


def test_every_file_that_was_cut_short_is_refused(tmp_path):
    data = write(tmp_path / "model.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    last = len(data) - len(data.rstrip(b"\0")) + 50 * 8 * 2  # zeros of the last tensor and padding
    for length in range(0, len(data) - last, 7):
        cut.write_bytes(data[:length])
        with pytest.raises(ModelError, match="is not a whole GGUF file"):
            GgufFile(cut)


@pytest.mark.parametrize(
    ("after", "skip", "form", "value", "why"),
    [
        (b"GGUF", 4, "Q", CLAIM, f"claims {CLAIM} tensors"),
        (b"GGUF", 12, "Q", CLAIM, f"claims {CLAIM} metadata fields"),
        (b"GGUF", 20, "Q", CLAIM, f"claims {CLAIM} bytes of a text"),
        (b"general.architecture", 4, "Q", CLAIM, f"claims {CLAIM} bytes of a text"),
        (b"tokenizer.ggml.tokens", 8, "Q", CLAIM, f"claims {CLAIM} elements of an array"),
        (b"tokenizer.ggml.scores", 8, "Q", CLAIM, f"claims {CLAIM} elements of an array"),
        (b"tokenizer.ggml.scores", 4, "I", 99, "values of the unknown type 99"),
        (b"some.flag", 0, "I", 99, "a value of the unknown type 99"),
        (b"token_embd.weight", 0, "I", 2**31, "has 2147483648 dimensions, of at most 4"),
        (b"token_embd.weight", 4, "Q", CLAIM, "token_embd.weight claims"),
        (b"token_embd.weight", 12, "Q", CLAIM, "token_embd.weight claims"),
        (b"token_embd.weight", 24, "Q", CLAIM, "token_embd.weight claims"),
    ],
)
def test_a_claim_beyond_the_files_size_is_refused_at_once(tmp_path, after, skip, form, value, why):
    path = write(tmp_path / "model.gguf")
    data = bytearray(path.read_bytes())
    struct.pack_into("<" + form, data, data.index(after) + len(after) + skip, value)
    path.write_bytes(data)
    with pytest.raises(ModelError):
        inspect(tmp_path / "model.gguf")  # whatever is imported for the first time
    tracemalloc.start()
    begun = time.process_time()
    try:
        with pytest.raises(ModelError, match=why) as caught:
            inspect(path)
        assert time.process_time() - begun < 2
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("fetch it again")


def array_of(kind: GGUFValueType, count: int) -> bytes:
    return struct.pack("<IIQ", GGUFValueType.ARRAY, kind, count)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        # The file does hold them: a header that is mostly zeros.
        (
            array_of(GGUFValueType.UINT8, MOST_ELEMENTS + 1) + bytes(MOST_ELEMENTS + 1),
            f"more than {MOST_ELEMENTS} elements",
        ),
        (array_of(GGUFValueType.ARRAY, 1) * 5000, "values of the unknown type 9"),
    ],
    ids=["too many elements", "arrays within arrays"],
)
def test_metadata_that_would_take_too_long_are_refused(tmp_path, value, why):
    path = write(tmp_path / "model.gguf")
    data = bytearray(path.read_bytes())
    struct.pack_into("<Q", data, 16, struct.unpack_from("<Q", data, 16)[0] + 1)
    data[24:24] = struct.pack("<Q", 1) + b"x" + value
    path.write_bytes(data)
    with pytest.raises(ModelError, match=f"is not a whole GGUF file .*{why}"):
        GgufFile(path)


@pytest.mark.parametrize(
    ("name", "form", "value"),
    [
        ("llama.block_count", "I", 0),
        ("llama.block_count", "I", 9),
        ("llama.block_count", "I", 2**31),
        ("llama.embedding_length", "I", 0),
        ("llama.embedding_length", "I", 96),
        ("llama.feed_forward_length", "I", 7),
        ("llama.attention.head_count", "I", 0),
        ("llama.attention.head_count", "I", 5),
        ("llama.attention.head_count_kv", "I", 1),
        ("llama.attention.key_length", "I", 8),
        ("llama.context_length", "I", 0),
        ("llama.rope.freq_base", "f", -1.0),
        ("llama.attention.layer_norm_rms_epsilon", "f", float("nan")),
    ],
)
def test_a_size_that_the_tensors_do_not_have_is_refused(tmp_path, name, form, value):
    path = rig.write(
        shared("llama"), tmp_path / "m.gguf", "llama", lambda _: GGMLQuantizationType.F16
    )
    data = bytearray(path.read_bytes())
    struct.pack_into("<" + form, data, data.index(name.encode()) + len(name) + 4, value)
    path.write_bytes(data)
    with pytest.raises(ModelError) as caught:
        inspect(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
