"""Folders that hold only the files of a host's own layers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from pipespec.engine.checkpoint.partial_checkpoint import layers_here
from pipespec.engine.formats.slice_tensors import described, parts_of
from pipespec.engine.inspection.inspection import inspect
from pipespec.errors import ModelError
from tests.helpers.models import NUM_LAYERS, build, weights
from tests.helpers.shards import own_files, shard
from tools.rig.packing import KINDS, pack

PACKED = ("awq", "gptq", "compressed")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "deepseek_v3", "gpt_neox", *PACKED])
def test_a_slice_loads_from_the_files_of_its_own_layers(kind, tmp_path):
    if kind in PACKED:
        source = build("llama", tmp_path / "source", hidden_size=64, intermediate_size=128)
        reference = tmp_path / "plain"
        pack(source, tmp_path / "packed", reference, KINDS[kind])
        # The parts of some matrices are in different files.
        source = shard(tmp_path / "packed", tmp_path / "sharded")
    else:
        reference = source = build(kind, tmp_path / "whole", max_shard_size="40KB")
    whole = inspect(source)
    for layers in (range(2), range(1, 3), range(2, 4)):
        folder = own_files(
            source, tmp_path / f"{layers.start}", layers, NUM_LAYERS, tied=whole.tied
        )
        # What is predicted and checked is that of the whole checkpoint.
        assert replace(inspect(folder), path=source) == whole
        found, expected = weights(folder, layers), weights(reference, layers)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert kind in PACKED or found.keys() == expected.keys()
        assert layers_here(folder, NUM_LAYERS) == layers


def test_what_is_missing_is_named(tmp_path):
    source = build("llama", tmp_path / "whole", max_shard_size="40KB")
    folder = own_files(source, tmp_path / "first", range(2), NUM_LAYERS, tied=False)
    with pytest.raises(ModelError, match=r"first lacks layers 2 to 3 and head \(in model-.* more"):
        weights(folder, range(2, 4))
    with pytest.raises(ModelError, match=r"lacks layer 2 \(in model-"):
        weights(folder, range(1, 3))
    (index := folder / "model.safetensors.index.json").rename(tmp_path / "index")
    with pytest.raises(ModelError, match=r"model-00001-of-\d+.safetensors and no model"):
        inspect(folder)
    (tmp_path / "index").rename(index)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ModelError, match="holds none of the files that its"):
        inspect(folder)


def test_a_tensor_of_which_nothing_is_known_names_its_file(tmp_path):
    source = build("deepseek_v3", tmp_path / "whole", max_shard_size="40KB")
    folder = own_files(source, tmp_path / "first", range(1), NUM_LAYERS, tied=False)
    with pytest.raises(ModelError, match="does not show in the other files; put that file there"):
        inspect(folder)  # no layer with experts is here


def test_an_index_that_names_an_absent_file_for_a_tensor_that_is_here_is_refused(tmp_path):
    folder = build("llama", tmp_path / "whole", max_shard_size="40KB")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "model-00099-of-00099.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"names model-00099-.* 'model.norm.weight', which is in"):
        inspect(folder)


def test_parts_are_described_in_words():
    assert described({"0", "1", "2", "5", "embedding"}) == "layers 0 to 2 and 5 and embedding"
    assert described({"7"}) == "layer 7"
    assert described({"head", "embedding"}) == "embedding and head"
    assert parts_of(range(2), 4, tied=True) == {"0", "1", "embedding"}
    assert parts_of(range(2, 4), 4, tied=True) == {"2", "3", "embedding", "head"}
    assert parts_of(range(2, 4), 4, tied=False) == {"2", "3", "head"}
