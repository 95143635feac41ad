"""Checkpoints of several files, and which of their parts a slice needs."""

from __future__ import annotations

import pytest
import torch

from pipespec.engine.formats.slice_tensors import described, parts_of
from pipespec.engine.inspection.inspection import inspect
from pipespec.errors import ModelError
from tests.helpers.models import NUM_LAYERS, build, weights
from tests.helpers.shards import shard
from tools.rig.packing import KINDS, pack


@pytest.mark.parametrize("kind", ["awq", "gptq", "compressed"])
def test_the_parts_of_a_packed_matrix_may_be_in_several_files(kind, tmp_path):
    source = build("llama", tmp_path / "source", hidden_size=64, intermediate_size=128)
    pack(source, tmp_path / "packed", tmp_path / "plain", KINDS[kind])
    folder = shard(tmp_path / "packed", tmp_path / "sharded")
    for layers in (range(2), range(1, NUM_LAYERS)):
        found, expected = weights(folder, layers), weights(tmp_path / "plain", layers)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_is_missing_is_named(tmp_path):
    folder = build("llama", tmp_path / "whole", max_shard_size="40KB")
    (index := folder / "model.safetensors.index.json").rename(tmp_path / "index")
    with pytest.raises(ModelError, match=r"model-00001-of-\d+.safetensors and no model"):
        inspect(folder)
    (tmp_path / "index").rename(index)
    for file in folder.glob("*.safetensors"):
        file.unlink()
        with pytest.raises(ModelError, match=r"lacks \d+ of the \d+ files that its"):
            inspect(folder)


def test_parts_are_described_in_words():
    assert described({"0", "1", "2", "5", "embedding"}) == "layers 0 to 2 and 5 and embedding"
    assert described({"7"}) == "layer 7"
    assert described({"head", "embedding"}) == "embedding and head"
    assert parts_of(range(2), 4, tied=True) == {"0", "1", "embedding"}
    assert parts_of(range(2, 4), 4, tied=True) == {"2", "3", "embedding", "head"}
    assert parts_of(range(2, 4), 4, tied=False) == {"2", "3", "head"}
