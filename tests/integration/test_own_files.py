"""A cluster of which each host has only the files of its own layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from pipespec.cli.main import main
from pipespec.cluster.diagnostics.measure_devices import measure
from pipespec.cluster.diagnostics.measure_hosts import MeasureRequest
from pipespec.system.folders import resource_dir
from tests.helpers.shards import own_files, shard

DEMO = resource_dir("demo")
NUM_LAYERS = 16
ASK = ["--json", "--prompt", "Once upon a time", "decode.max_new_tokens=8", "model.context=64"]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shard(DEMO / "target", tmp_path_factory.mktemp("models") / "sharded")


def hosts_file(tmp_path: Path, sharded: Path, layers: dict[str, range]) -> Path:
    """Hosts that are processes of this machine; the first one is the head too."""
    hosts = []
    for index, (name, own) in enumerate(layers.items(), 1):
        folder = own_files(sharded, tmp_path / name, own, NUM_LAYERS, tied=True)
        devices = ["cpu"] * (1 + (index == 1))
        hosts.append(
            {"name": name, "address": f"127.0.0.{index}", "target": str(folder), "devices": devices}
        )
    file = tmp_path / "hosts.yaml"
    content = {"defaults": {"ssh": "local"}, "hosts": hosts, "draft": "alpha/0", "split": [9, 7]}
    file.write_text(yaml.safe_dump(content))
    return file


def settings(tmp_path: Path, file: Path) -> list[str]:
    return [f"cluster={file}", f"model.target={tmp_path / 'alpha'}"]


@pytest.mark.long
@pytest.mark.slow
def test_hosts_with_their_own_files_alone_decode_the_same_text(
    sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = hosts_file(tmp_path, sharded, {"alpha": range(9), "beta": range(9, 16)})
    assert main(["generate", *ASK, *settings(tmp_path, file)]) == 0
    found = json.loads(capsys.readouterr().out)["token_ids"]
    assert main(["generate", *ASK, f"model.target={DEMO / 'target'}"]) == 0
    assert found == json.loads(capsys.readouterr().out)["token_ids"]
    assert main(["doctor", "--json", str(file), f"model.target={tmp_path / 'alpha'}"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []


def test_a_host_without_its_files_is_named_before_anything_starts(
    sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = hosts_file(tmp_path, sharded, {"alpha": range(9), "beta": range(10, 16)})
    assert main(["generate", *ASK, *settings(tmp_path, file)]) == 2
    _, line = capsys.readouterr().err.splitlines()  # after what was chosen
    assert f"The target {tmp_path / 'beta'} lacks layer 9 (in model-" in line
    assert main(["doctor", "--json", str(file), f"model.target={tmp_path / 'alpha'}"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"The target {tmp_path / 'beta'} on beta lacks model-" in line
    assert "of its layers (layer 9)" in line


@pytest.mark.slow
@pytest.mark.parametrize("own", [range(3), range(13, 16)])
def test_a_host_with_its_own_files_alone_is_measured(
    own: range, sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = own_files(sharded, tmp_path / "own", own, NUM_LAYERS, tied=True)
    request = MeasureRequest(
        str(folder), str(DEMO / "draft"), ("cpu",), (("stage",),), 8, 64, 4, "float32"
    )
    found = measure(request)
    assert found["devices"][0]["stage"]["layer_ms"] > 0
    assert found["devices"][0]["stage"]["head_ms"] > 0
    assert len(found["target"]["layer_bytes"]) == NUM_LAYERS
