"""Slices of checkpoints whose tensors came from a hub, each host's alone."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from huggingface_hub import constants
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from pipespec.engine.attention.attention_plan import causal_plan
from pipespec.engine.checkpoint.checkpoint import open_files
from pipespec.engine.checkpoint.partial_checkpoint import fetch_parts
from pipespec.engine.checkpoint.parts import sources
from pipespec.engine.checkpoint.parts.parts_file import PartsFile, ranges_of
from pipespec.engine.formats.slice_tensors import parts_of
from pipespec.engine.inspection.inspection import inspect
from pipespec.engine.slice.model_slice import ModelSlice
from pipespec.errors import ModelError
from tests.helpers.hub import COMMIT, Fault, Hub, used
from tests.helpers.models import NUM_LAYERS, build
from tests.helpers.shards import shard
from tools.rig.gguf_files import write
from tools.rig.packing import KINDS, pack

IDS = torch.arange(20, 45)
WIDE = {"hidden_size": 256, "intermediate_size": 512}
SLICES = (range(2), range(2, 3), range(3, 4))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    hub = Hub({})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("pipespec.engine.checkpoint.parts.parts_file.BLOCK_BYTES", 2**14)
    with used(hub, tmp_path / "hub", monkeypatch):
        yield hub


def plain(kind: str, **options: Any) -> Callable[[Path], tuple[Path, Path]]:
    return lambda folder: (build(kind, folder / "model", **options, **WIDE),) * 2


def packed(kind: str) -> Callable[[Path], tuple[Path, Path]]:
    def make(folder: Path) -> tuple[Path, Path]:
        source = build("llama", folder / "source", hidden_size=512, intermediate_size=1024)
        pack(source, folder / "packed", folder / "plain", KINDS[kind])
        return shard(folder / "packed", folder / "sharded", 25), folder / "plain"

    return make


def gguf(folder: Path) -> tuple[Path, Path]:
    source = build("llama", folder / "source", vocab_size=2000, **WIDE)
    (folder / "model").mkdir()
    write(source, folder / "model" / "m.gguf", "llama", lambda _: GGMLQuantizationType.Q8_0)
    return folder / "model", folder / "model" / "m.gguf"


def split_gguf(folder: Path) -> tuple[Path, Path]:
    _, reference = gguf(folder)
    (folder / "split").mkdir()
    of_type = lambda _: GGMLQuantizationType.Q8_0  # noqa: E731
    write(folder / "source", folder / "split" / "m.gguf", "llama", of_type, per_file=20)
    return folder / "split", reference


MADE = {
    "one file": plain("llama"),
    "sharded": plain("qwen3", max_shard_size="700KB"),
    "tied": plain("qwen2", max_shard_size="700KB", vocab_size=4000),
    "awq": packed("awq"),
    "gptq": packed("gptq"),
    "compressed": packed("compressed"),
    "gguf": gguf,
    "split gguf": split_gguf,
}


LONG = ("one file", "gptq", "awq", "gguf")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.long) if kind in LONG else kind for kind in MADE]
)
def test_hosts_with_their_own_tensors_alone_compute_the_logits_of_hugging_face(
    kind, hub, tmp_path, monkeypatch
):
    served, reference = MADE[kind](tmp_path)
    hub.folders["org/model"] = served
    file = next((each.name for each in sorted(served.glob("*.gguf"))), "")
    name = f"org/model/{file}".removesuffix("/")
    plan = causal_plan(np.arange(0), np.arange(len(IDS)))
    rows, whole = IDS, inspect(served / file)
    for layers in SLICES:
        # Another host, with a cache of its own.
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"host {layers.start}"))
        before = hub.weight_bytes
        info = inspect(name)
        assert replace(info, path=whole.path) == whole
        parts = parts_of(layers, NUM_LAYERS, tied=whole.tied)
        with pytest.raises(ModelError, match="lacks layer"):
            ModelSlice.load(info.path, layers, dtype=torch.float32, num_slots=64)
        fetch_parts(info.path, parts)
        own = hub.weight_bytes - before
        fetch_parts(info.path, parts)
        assert hub.weight_bytes - before == own
        assert own <= 1.12 * slice_bytes(info.path, parts), "and what shares their blocks"
        model = ModelSlice.load(info.path, layers, dtype=torch.float32, num_slots=64)
        rows = model.forward(rows, torch.from_numpy(plan.positions), plan)
    how = {"gguf_file": reference.name} if reference.suffix == ".gguf" else {}
    theirs = AutoModelForCausalLM.from_pretrained(
        reference.parent if how else reference, dtype=torch.float32, **how
    )
    with torch.inference_mode():
        expected = theirs(IDS[None]).logits[0]
    torch.testing.assert_close(model.logits(rows), expected, rtol=1e-4, atol=1e-4)


def slice_bytes(path: Path, parts: set[str]) -> int:
    """Bytes of the tensors of a slice, as they are in the files."""
    found = 0
    for file, names in open_files(path).names_by_file(parts).items():
        ranges = ranges_of(file)
        found += sum(ranges[stored][1] - ranges[stored][0] for stored in names.values())
    return found


ALL = parts_of(range(NUM_LAYERS), NUM_LAYERS, tied=False)


@pytest.fixture
def model(hub: Hub, tmp_path: Path) -> Path:
    """A checkpoint of several files that the hub serves as org/model."""
    hub.folders["org/model"] = build("llama", tmp_path / "m", max_shard_size="400KB", **WIDE)
    return hub.folders["org/model"]


def same_files(folder: Path, model: Path) -> bool:
    files = sorted(model.glob("*.safetensors"))
    return all((folder / file.name).read_bytes() == file.read_bytes() for file in files)


def test_wrong_bytes_are_found_where_a_host_has_a_whole_file(hub, model):
    info, size = inspect("org/model"), sum(f.stat().st_size for f in model.glob("*.safetensors"))
    hub.faults = [Fault(), Fault(change=lambda data: data[:-1] + bytes([data[-1] ^ 1]))]
    with pytest.raises(ModelError, match="has another SHA-256 than the hub states"):
        fetch_parts(info.path, ALL)
    assert hub.weight_bytes == size  # and no more, with headers
    fetch_parts(info.path, ALL)
    assert same_files(info.path, model)
    again = hub.weight_bytes - size
    assert 0 < again <= max(f.stat().st_size for f in model.glob("*.safetensors"))
    # Now every file is known to be right as a whole.
    for each in model.glob("*.safetensors"):
        own = PartsFile(info.path / each.name)
        assert own.digest(own.num_blocks) == sha256(own.path.read_bytes()).digest()


def test_whole_files_in_the_hubs_cache_are_used_as_they_are(hub, model, tmp_path):
    cached = tmp_path / "hub" / "models--org--model" / "snapshots" / COMMIT
    files = sorted(model.glob("*.safetensors"))
    cached.mkdir(parents=True)
    for file in files[: len(files) // 2]:
        shutil.copy(file, cached)
    info = inspect("org/model")
    fetch_parts(info.path, ALL)
    assert same_files(info.path, model)
    fetched = sum(file.stat().st_size for file in files[len(files) // 2 :])
    assert fetched <= hub.weight_bytes <= 1.02 * fetched
    # If all of it is there, nothing is asked for but the commit.
    shutil.copytree(model, cached, dirs_exist_ok=True)
    asked = hub.requests.copy()
    assert inspect("org/model").path == cached
    assert hub.requests - asked == {"GET api": 1}
    # What has left it is fetched.
    shutil.rmtree(tmp_path / "hub")
    assert inspect("org/model").path == info.path
    fetch_parts(info.path, ALL)
    assert same_files(info.path, model)


def test_a_gguf_file_does_not_stand_for_the_checkpoint_beside_it(model, tmp_path):
    source = build("llama", tmp_path / "source", vocab_size=2000, **WIDE)
    write(source, model / "m.gguf", "llama", lambda _: GGMLQuantizationType.Q8_0)
    assert inspect("org/model/m.gguf").path.name == "m.gguf"
    path = inspect("org/model").path
    fetch_parts(path, ALL)
    assert same_files(path, model)


@pytest.mark.usefixtures("model")
def test_offline_what_was_fetched_is_used_and_the_rest_is_named(hub, monkeypatch):
    first = parts_of(range(2), NUM_LAYERS, tied=False)
    fetch_parts(inspect("org/model").path, first)
    requests = hub.requests.copy()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    info = inspect("org/model")
    fetch_parts(info.path, first)
    assert hub.requests == requests
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        fetch_parts(info.path, ALL)


@pytest.mark.usefixtures("model")
def test_a_hub_that_cannot_be_reached_is_not_waited_for_where_a_copy_is(monkeypatch):
    path = inspect("org/model").path
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(sources, "FIRST_WAIT_S", 1e6)  # the test would not end
    assert inspect("org/model").path == path


@pytest.mark.usefixtures("model")
def test_a_full_disk_is_known_before_anything_is_fetched(hub, monkeypatch):
    path, before = inspect("org/model").path, hub.weight_bytes
    usage = shutil.disk_usage(path)._replace(free=sources.SPARE_BYTES + 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ModelError, match=r"needs 0.0[01] GiB for weights, but 0.25 GiB are free"):
        fetch_parts(path, ALL)
    assert hub.weight_bytes == before


def test_an_index_that_is_missing_is_one_sentence(model):
    (model / "model.safetensors.index.json").unlink()
    with pytest.raises(
        ModelError, match=r"org/model holds no model\.safetensors\.index\.json; name"
    ):
        inspect("org/model")


# Not `ru_maxrss`, which begins at that of the process that started this one.
MEASURED = """
import threading
import psutil
from pipespec.engine.inspection.inspection import inspect
from pipespec.engine.checkpoint.partial_checkpoint import fetch_parts
from pipespec.engine.checkpoint.model_path import resolve
path = resolve("org/model")
fetch_parts(path, ["0"])
ended, own = threading.Event(), psutil.Process()
found = [own.memory_info().rss]

def watch():
    while not ended.wait(0.005):
        found.append(own.memory_info().rss)

threading.Thread(target=watch, daemon=True).start()
fetch_parts(path, ["0", "1", "2", "head"])
ended.set()
print(max(found) - found[0])
"""


@pytest.mark.slow
def test_fetching_takes_little_memory(hub, tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    state = {"model.layers.0.norm.weight": torch.zeros(1)}
    state |= {f"model.layers.{i}.weight": torch.zeros(60 * 2**18) for i in (1, 2)}
    state["lm_head.weight"] = torch.zeros(90 * 2**18)
    save_file(state, tmp_path / "m" / "model.safetensors")
    hub.folders["org/model"] = tmp_path / "m"
    env = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_HUB_CACHE": str(tmp_path / "hub")}
    line = [sys.executable, "-c", MEASURED]
    done = subprocess.run(line, env=env, stdout=subprocess.PIPE, timeout=100, check=True)
    assert hub.weight_bytes > 200 * 2**20
    assert 0 < int(done.stdout) <= 64 * 2**20
