"""What a host says that it has: model files told apart, versions, CUDA devices."""

import json
import re
import shutil
from pathlib import Path

import pytest

from pipespec.cluster.diagnostics import inventory
from pipespec.cluster.diagnostics.inventory import take_inventory
from pipespec.engine.checkpoint.fingerprint import Fingerprint, fingerprint
from tests.helpers.models import build


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in one file, without index."""
    return build("llama", tmp_path_factory.mktemp("models") / "single")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in several files, with an index."""
    folder = tmp_path_factory.mktemp("models") / "sharded"
    return build("llama", folder, max_shard_size="60KB")


def content(model: Fingerprint) -> tuple[str | None, str | None, str | None]:
    assert model.problem is None
    return model.config, model.index, model.shards


def test_one_checkpoint_in_two_places_has_one_fingerprint(single, sharded, tmp_path):
    for model in (single, sharded):
        copy = shutil.copytree(model, tmp_path / model.name)
        assert content(fingerprint(str(copy))) == content(fingerprint(str(model)))
        assert fingerprint(str(copy)).folder == str(copy)
    assert content(fingerprint(str(single)))[1:] != content(fingerprint(str(sharded)))[1:]


def edit_config(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rope_theta": 3}))


def cut_a_shard(folder: Path) -> None:
    file = max(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])


def edit_index(folder: Path) -> None:
    file = folder / "model.safetensors.index.json"
    file.write_text(file.read_text() + "\n")


@pytest.mark.parametrize(
    ("change", "differ"), [(edit_config, "config"), (edit_index, "index"), (cut_a_shard, "shards")]
)
def test_a_change_shows_in_its_part_alone(change, differ, sharded, tmp_path):
    copy = shutil.copytree(sharded, tmp_path / "copy")
    change(copy)
    before, after = fingerprint(str(sharded)), fingerprint(str(copy))
    parts = ("config", "index", "shards")
    assert [p for p in parts if getattr(before, p) != getattr(after, p)] == [differ]


@pytest.mark.parametrize(
    ("gone", "problem"),
    [
        ("config.json", "holds no config.json"),
        ("*-of-*.safetensors", "holds no model-00001-of-"),  # and more of its files
        ("model-00002-of-*.safetensors", r"holds no model-00002-of-\d+\.safetensors$"),
        ("*.safetensors*", "holds no model.safetensors"),
    ],
)
def test_missing_files_are_named(gone, problem, sharded, tmp_path):
    copy = shutil.copytree(sharded, tmp_path / "copy")
    for file in copy.glob(gone):
        file.unlink()
    assert re.match(problem, fingerprint(str(copy)).problem or "")


def test_an_index_that_cannot_be_read(sharded, tmp_path):
    copy = shutil.copytree(sharded, tmp_path / "copy")
    for text in ("", "[]", '{"weight_map": 3}'):
        (copy / "model.safetensors.index.json").write_text(text)
        assert fingerprint(str(copy)).problem == "has no usable model.safetensors.index.json"


def test_other_weight_files_in_the_folder_do_not_count(sharded, tmp_path):
    copy = shutil.copytree(sharded, tmp_path / "copy")
    (copy / "consolidated.safetensors").write_bytes(b"x")
    assert content(fingerprint(str(copy))) == content(fingerprint(str(sharded)))


@pytest.mark.parametrize("model", ["/no/such/folder", "nobody/has-this", "../up/there", "~/nope"])
def test_what_is_not_there_is_missing_and_not_fetched(model):
    assert fingerprint(model).problem == "is missing"


def test_a_hub_id_is_found_in_the_cache(single, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--someone--tiny"
    shutil.copytree(single, cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    assert content(fingerprint("someone/tiny")) == content(fingerprint(str(single)))


def test_a_host_of_cpus_is_not_asked_for_cuda(single):
    found = take_inventory({"target": str(single)}, ["cpu", "cpu"])
    assert (found.cuda, found.cuda_problem) == (None, None)
    assert found.models == {"target": fingerprint(str(single))}
    ours = {"python", "pipespec", "code", "driver"}
    assert found.versions.keys() == {*ours, *inventory.PACKAGES, *inventory.OPTIONAL}
    assert found.versions["torch"]


def test_a_named_cuda_device_is_asked_for():
    import torch

    found = take_inventory({}, ["cuda:0"])
    assert found.cuda is not None
    assert len(found.cuda) == torch.cuda.device_count()
    assert (found.cuda_problem is None) is bool(found.cuda)


def test_driver_version_is_that_of_nvidia_smi(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert inventory.nvidia_driver() is None
    for script, driver in (("echo 570.86; echo 570.86", "570.86"), ("exit 9", None)):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        assert inventory.nvidia_driver() == driver
