"""`auto` among the settings: caches and hosts are read, models chosen, and a cluster started."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from transformers import AutoTokenizer

from pipespec.engine.checkpoint.cached_models import cached_models
from pipespec.engine.checkpoint.inspection import inspect
from pipespec.engine.checkpoint.slice_tensors import parts_of
from pipespec.engine.checkpoint_parts.from_hub import fetch_parts
from pipespec.errors import ConfigError
from pipespec.instruments.model_choice.choose_for_hosts import choose_settings
from pipespec.system.folders import resource_dir
from tests.helpers.hub import COMMIT, Hub, serving
from tools.rig import cluster

DEMO = resource_dir("demo")
PROMPT = "Once upon a time there was a king who"
NUM_TOKENS = 8


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Empty caches; the folder of that of huggingface_hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "gguf"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "hub"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub({})
    with serving(hub) as endpoint:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub


def download(caches: Path, name: str, folder: Path) -> Path:
    """Lay a model into the cache as `hf download` does."""
    root = caches / f"models--{name.replace('/', '--')}"
    snapshot = root / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(COMMIT)
    for file in folder.iterdir():
        if file.is_file():
            shutil.copy(file, snapshot)
    return snapshot


@pytest.mark.long
def test_auto_decodes_with_the_models_that_it_chose_for_two_hosts(
    caches: Path, tmp_path: Path
) -> None:
    for name in ("target", "draft"):
        download(caches, f"demo/{name}", DEMO / name)
    file = tmp_path / "lab.yaml"
    file.write_text(
        "hosts:\n- {name: a, address: 127.0.0.1, ssh: local, devices: [cpu, cpu]}\n"
        "- {name: b, address: 127.0.0.2, ssh: local, devices: [cpu], memory_gib: 2}\n"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pipespec", "generate", "--json", "--prompt", PROMPT, "auto"),
            *(f"cluster={file}", f"decode.max_new_tokens={NUM_TOKENS}", "decode.ignore_eos=true"),
        ],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    prompt = AutoTokenizer.from_pretrained(DEMO / "target").encode(PROMPT)
    (expected,) = cluster.reference(DEMO / "target", [prompt], NUM_TOKENS)
    assert json.loads(done.stdout)["token_ids"] == expected
    said = done.stderr.splitlines()
    assert said[0].startswith("Free: cpu of a ")
    assert "; cpu of b 2.00 GiB. 2 models here can be decoded." in said[0]
    assert said[1].startswith("Target demo/target, the largest in the caches that fits")
    assert said[2].startswith("Draft demo/draft, which has the target's vocabulary")
    assert said[3] == (
        "Without auto: pipespec generate model.target=demo/target model.draft=demo/draft "
        f"model.context=2048 cluster={file} decode.max_new_tokens={NUM_TOKENS} "
        "decode.ignore_eos=true"
    )


def test_models_of_all_caches_are_found(hub: Hub, caches: Path, tmp_path: Path) -> None:
    download(caches, "org/whole", DEMO / "draft")
    hub.folders["org/parts"] = DEMO / "target"
    info = inspect("org/parts")
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "small.gguf").write_bytes(b"GGUF")
    found = {each.name: each.whole for each in cached_models()}
    assert found == {"org/whole": True, "org/parts": False, f"{tmp_path}/gguf/small.gguf": True}
    fetch_parts(info.path, parts_of(range(info.num_layers), info.num_layers, tied=info.tied))
    assert {each.name: each.whole for each in cached_models()}["org/parts"]


@pytest.mark.usefixtures("caches")
def test_what_fits_is_proposed_from_the_hub_where_the_caches_hold_nothing(hub: Hub) -> None:
    hub.folders["Qwen/Qwen3-4B"] = DEMO / "target"
    hub.folders["Qwen/Qwen3-0.6B"] = DEMO / "draft"
    with pytest.raises(ConfigError) as problem:
        choose_settings(["policy.width=8"], "serve")
    assert str(problem.value) == (
        "The caches of this machine hold no model that can be decoded; name a folder or hub id as "
        "model.target. From the hub Qwen/Qwen3-4B with the draft Qwen/Qwen3-0.6B would fit: "
        "`pipespec serve model.target=Qwen/Qwen3-4B model.draft=Qwen/Qwen3-0.6B model.context=2048 "
        "cluster.stages=1 policy.width=8` fetches 8.2 MiB."
    )
    assert hub.weight_bytes < 2**16, "only headers"


@pytest.mark.usefixtures("caches")
def test_without_models_and_hub_one_sentence_says_what_to_do() -> None:
    with pytest.raises(ConfigError) as problem:
        choose_settings([], "up")
    assert str(problem.value) == (
        "The caches of this machine hold no model that can be decoded; name a folder or hub id as "
        "model.target."
    )


def test_model_that_does_not_fit_is_named_with_what_is_missing(
    caches: Path, tmp_path: Path
) -> None:
    download(caches, "org/model", DEMO / "draft")
    file = tmp_path / "lab.yaml"
    host = "{address: 127.0.0.1, ssh: local, devices: [cpu, cpu], memory_gib: 0.52}"
    file.write_text(f"hosts: [{host}]")
    with pytest.raises(ConfigError) as problem:
        choose_settings([f"cluster={file}"], "up")
    assert str(problem.value).startswith("None of the 1 models in the caches fits; for org/model ")
    assert "MiB are missing on cpu of 127.0.0.1; free memory there" in str(problem.value)
