"""Checkpoints without their tensors, as another host describes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipespec.engine.checkpoint.parts.blueprint import Blueprint
from pipespec.engine.checkpoint.parts.folder import entries
from pipespec.errors import ModelError
from pipespec.system.folders import resource_dir

TARGET = resource_dir("demo") / "target"


@pytest.fixture
def described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return Blueprint.of(TARGET, as_folder=True).as_json()


def test_a_described_checkpoint_is_built_in_the_parts_cache(
    described: dict[str, Any], tmp_path: Path
) -> None:
    plan = Blueprint.of_other_host(described, "beta")
    path = plan.build()
    assert path == plan.repository.folder
    assert path.is_relative_to(tmp_path / "pipespec" / "weights" / "folders--target")
    assert (path / "config.json").read_bytes() == (TARGET / "config.json").read_bytes()
    assert plan.repository.path == str(TARGET.absolute())
    (entry,) = entries()
    assert (entry.folder, entry.model, entry.current) == (path, "target", True)


@pytest.mark.parametrize(
    "change",
    [
        {"file": "../m.gguf"},
        {"small": {"../config.json": ""}},
        {"small": {"..": ""}},
        {"small": {".parts": ""}},
        {"headers": {"/tmp/m.safetensors": ""}},
        {"headers": {}},
    ],
    ids=str,
)
def test_a_description_that_leads_out_of_its_folder_is_refused(
    change: dict[str, Any], described: dict[str, Any]
) -> None:
    with pytest.raises(ModelError, match="is no folder of one checkpoint"):
        Blueprint.of_other_host(described | change, "beta")


@pytest.mark.parametrize(
    "change",
    [
        {"commit": "../" * 13 + "x"},
        {"repo": "org/target"},
        {"repo": "../../elsewhere"},
        {"path": None},  # a commit of the hub
        {"weights": {"../../x/m.safetensors": [1, None]}},
    ],
    ids=str,
)
def test_a_repository_of_another_kind_is_refused(
    change: dict[str, Any], described: dict[str, Any]
) -> None:
    described["repository"] |= change
    with pytest.raises(ModelError, match="is no folder of one checkpoint"):
        Blueprint.of_other_host(described, "beta")


@pytest.mark.parametrize(
    "described",
    [
        None,
        [],
        {},
        {"small": 1},
        {"file": None, "small": {}, "headers": {}, "repository": {"weights": 3}},
    ],
    ids=str,
)
def test_what_is_no_description_is_one_sentence(described: Any) -> None:
    with pytest.raises(ModelError, match="what it says about its checkpoint is of no use"):
        Blueprint.of_other_host(described, "beta")
