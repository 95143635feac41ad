"""What `inspect` tells of a checkpoint, and how it refuses one."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from pathlib import Path

import pytest

from pipespec.engine.checkpoint.fingerprint import fingerprint
from pipespec.engine.inspection.inspection import Sizes, inspect
from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.errors import ModelError
from tests.helpers.kinds import by_kind
from tests.helpers.models import NUM_LAYERS, VOCAB_SIZE, build, build_multimodal, shared


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return build("llama", tmp_path_factory.mktemp("llama") / "model", eos_token_id=[2, 3])


@pytest.fixture
def copy(llama, tmp_path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "model"))


def _edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        inspect(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_checkpoint_is_described(llama):
    info = inspect(llama)
    assert info.path == llama
    assert info.model_type == "llama"
    assert (info.num_layers, info.hidden_size, info.vocab_size) == (NUM_LAYERS, 48, VOCAB_SIZE)
    assert info.context == 256
    assert info.eos == (2, 3)
    attention = 2 * 48 * 48 + 2 * 48 * 24
    layer = 4 * (attention + 3 * 48 * 64 + 2 * 48)
    head = 4 * (VOCAB_SIZE * 48 + 48)
    assert info.stored == Sizes((layer,) * NUM_LAYERS, 4 * VOCAB_SIZE * 48, head)
    assert info.stored.total == NUM_LAYERS * layer + 4 * VOCAB_SIZE * 48 + head
    assert (info.storage.quantization, info.dtype) == (None, None)


@pytest.mark.parametrize("model_type", by_kind())
def test_every_architecture_is_described(model_type):
    info = inspect(shared(model_type))
    assert len(info.stored.layers) == NUM_LAYERS
    assert info.vocab_size == VOCAB_SIZE
    assert info.context == 256


def test_shards_count_like_one_file(llama, tmp_path):
    sharded = build("llama", tmp_path / "model", max_shard_size="30KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert inspect(sharded).stored == inspect(llama).stored


def test_eos_of_the_generation_config_goes_first(copy):
    _edit(copy / "generation_config.json", eos_token_id=7)
    assert inspect(copy).eos == (7,)


def test_eos_of_the_config_stands_in(copy):
    (copy / "generation_config.json").unlink()
    assert inspect(copy).eos == (2, 3)
    _edit(copy / "config.json", eos_token_id=None)
    assert inspect(copy).eos == ()


def test_a_context_ends_where_rotary_frequencies_would_change(copy):
    rope = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    _edit(copy / "config.json", rope_parameters=rope)
    assert inspect(copy).context == 64


NESTED = "[" * 3000 + "]" * 3000


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f'{{"a": {NESTED}}}', "it is nested too deeply"),
        ('{"a": %s}' % ("9" * 5000), "it holds a number of too many digits"),
        ('{"a": "\udcff"}', "it is not UTF-8 text at byte 7"),
    ],
)
def test_unreadable_json_is_refused(copy, text, why):
    raw = text.encode(errors="surrogateescape")
    for name in ("config.json", "generation_config.json", "model.safetensors.index.json"):
        kept = (copy / name).read_bytes() if (copy / name).exists() else None
        (copy / name).write_bytes(raw)
        if name.endswith("index.json"):  # a file with all weights goes before it
            (copy / "model.safetensors").unlink()
        assert f"{name} cannot be read ({why}" in _refusal(copy)
        if kept is None:
            (copy / name).unlink()
        else:
            (copy / name).write_bytes(kept)
    (copy / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw)
    assert "its header cannot be read" in _refusal(copy)


@pytest.mark.parametrize("shape", [[], [4], [1, 1, 4]])
def test_an_embedding_that_is_none(copy, shape):
    shapes = {f"model.layers.{i}.a": [1] for i in range(NUM_LAYERS)}
    shapes |= {"model.embed_tokens.weight": shape, "lm_head.weight": [1]}
    header, end = {}, 0
    for name, each in shapes.items():
        size = 4 * math.prod(each)
        header[name] = {"dtype": "F32", "shape": each, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(end)
    (copy / "model.safetensors").write_bytes(data)
    assert "holds no token embedding" in _refusal(copy)


@pytest.mark.parametrize(
    "name", ["../secret", "../../../../../etc/passwd", "/etc/passwd", "sub/model", "..", "", 3]
)
def test_an_index_names_no_file_outside_its_folder(tmp_path, name):
    path = build("llama", tmp_path / "model", max_shard_size="30KB")
    shutil.copy(min(path.glob("*.safetensors")), tmp_path / "secret")
    index = path / "model.safetensors.index.json"
    shards = json.loads(index.read_text())["weight_map"]
    _edit(index, weight_map={**shards, min(shards): name})
    assert f"names the shard {name!r}, which is no file of its folder" in _refusal(path)
    assert "has no usable" in fingerprint(str(path)).problem


@pytest.mark.parametrize(
    ("index", "why"),
    [
        ({"weight_map": None}, "has no weight_map; fetch"),
        ({"weight_map": ["a"]}, "has no weight_map; fetch"),
        ([], "is not a JSON object"),
    ],
)
def test_an_index_that_maps_nothing_is_refused(copy, index, why):
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert why in _refusal(copy)


def test_an_index_that_names_a_tensor_that_no_shard_holds_is_refused(tmp_path):
    path = build("llama", tmp_path / "model", max_shard_size="30KB")
    index = path / "model.safetensors.index.json"
    shards = json.loads(index.read_text())["weight_map"]
    _edit(index, weight_map={**shards, "model.layers.1.extra.weight": min(shards.values())})
    assert "names 1 tensors that no shard holds, for example model.layers.1.extra" in _refusal(path)


def test_shards_may_be_links_as_in_the_cache_of_the_hub(llama, tmp_path):
    path = build("llama", tmp_path / "model", max_shard_size="30KB")
    (tmp_path / "blobs").mkdir()
    for shard in path.glob("*.safetensors"):
        blob = shard.rename(tmp_path / "blobs" / shard.name)
        shard.symlink_to(f"../blobs/{blob.name}")
    assert inspect(path).stored == inspect(llama).stored


def test_a_missing_shard(tmp_path):
    path = build("llama", tmp_path / "model", max_shard_size="30KB")
    shard = min(path.glob("*.safetensors"))
    shard.unlink()
    assert inspect(path)  # another host may have it
    with pytest.raises(ModelError, match=rf"lacks embedding \(in {shard.name}\)"):
        ModelSlice.load(path, range(1), num_slots=1)


def test_a_multimodal_checkpoint_that_another_library_quantised_is_refused(tmp_path):
    path = build_multimodal("mistral3", tmp_path / "model")
    quantised = {"quant_method": "bitsandbytes", "load_in_4bit": True, "_load_in_4bit": True}
    _edit(path / "config.json", quantization_config=quantised)
    assert (
        "is multimodal and quantised by bitsandbytes, which is read of models of text"
        in _refusal(path)
    )


def _header(entry: object, other: object = None, data: int = 4) -> bytes:
    text = json.dumps({"a": entry} if other is None else {"a": entry, "b": other}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def _entry(**changes: object) -> dict[str, object]:
    """Of a header; None takes a field away."""
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changes
    return {name: value for name, value in entry.items() if value is not None}


DAMAGE = {
    "cut": lambda whole: whole[:-5],
    "cut in its header": lambda whole: whole[:50],
    "empty": lambda _: b"",
    "longer": lambda whole: whole + b"12345",
    "wrong length": lambda whole: struct.pack("<Q", 1 << 40) + whole[8:],
    "broken JSON": lambda whole: whole[:8] + b"[" + whole[9:],
    "other JSON": lambda _: struct.pack("<Q", 4) + b"[42]",
    "list": lambda _: _header([]),
    "overlap": lambda _: _header(_entry(), _entry(data_offsets=[2, 6]), 6),
    "hole": lambda _: _header(_entry(), _entry(data_offsets=[8, 12]), 12),
    **{
        str(changes): lambda _, changes=changes: _header(_entry(**changes))
        for changes in (
            *({"shape": shape} for shape in ([-1], [True], [1.5], [2**62, 2**62], [2], None)),
            *({"data_offsets": each} for each in ([4, 0], [0, 2**40], None)),
            *({"dtype": dtype} for dtype in (3, "F7", None)),
            {"shape": [10**30], "data_offsets": [0, 10**30]},
        )
    },
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_weight_file_is_refused(copy, how):
    file = copy / "model.safetensors"
    file.write_bytes(DAMAGE[how](file.read_bytes()))
    assert f"{file} is not a whole safetensors file" in _refusal(copy)


def test_a_missing_or_unreadable_file_is_named(copy):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    assert "holds no model.safetensors" in _refusal(copy)
    (copy / "config.json").write_text("{")
    assert "config.json cannot be read (it is not JSON" in _refusal(copy)
    (copy / "config.json").unlink()
    assert "holds no config.json" in _refusal(copy)
    os.mkfifo(copy / "config.json")  # which is not waited for
    assert "config.json cannot be read (it is no regular file)" in _refusal(copy)
