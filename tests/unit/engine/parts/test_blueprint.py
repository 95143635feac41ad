"""Checkpoints without their tensors, as another host describes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipespec.engine.parts.blueprint import Blueprint
from pipespec.errors import ModelError
from pipespec.system.folders import resource_dir

TARGET = resource_dir("demo") / "target"


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Blueprint:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return Blueprint.from_json(Blueprint.of(TARGET).as_json())


def test_a_described_checkpoint_is_built_in_the_parts_cache(
    plan: Blueprint, tmp_path: Path
) -> None:
    plan.check_names()
    path = plan.build()
    assert path.is_relative_to(tmp_path)
    assert (path / "config.json").read_bytes() == (TARGET / "config.json").read_bytes()
    assert plan.shared.path == str(TARGET.absolute())


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../elsewhere"},
        {"file": "../m.gguf"},
        {"small": {"../config.json": b"{}"}},
        {"small": {"..": b"{}"}},
        {"small": {".parts": b"{}"}},
        {"headers": {"/tmp/m.safetensors": b""}},
    ],
    ids=str,
)
def test_a_description_that_leads_out_of_its_folder_is_refused(
    change: dict[str, Any], plan: Blueprint
) -> None:
    with pytest.raises(ModelError, match="is no folder of one checkpoint"):
        replace(plan, **change).check_names()


def test_a_commit_that_leads_out_of_the_cache_is_refused(plan: Blueprint) -> None:
    repository = replace(plan.repository, commit="../" * 13 + "x")
    name = f"{plan.name.partition('/')[0]}/{repository.commit}"
    with pytest.raises(ModelError, match="is no folder of one checkpoint"):
        replace(plan, repository=repository, name=name).check_names()
