"""What goes over the links of hosts that fetch weights: network namespaces, each with its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants

from pipespec.cli.main import main
from pipespec.engine.checkpoint.inspection import inspect
from pipespec.engine.checkpoint.slice_tensors import parts_of
from pipespec.engine.checkpoint_parts.fetching import fetch_parts
from pipespec.system.folders import resource_dir
from tests.helpers.hub import Hub, serving
from tests.helpers.models import build

ROOT = Path(__file__).parents[2]
NUM_LAYERS = 8
SIZES = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": NUM_LAYERS}
# Headers of packets, and the small files, beside a host's tensors.
OVERHEAD = 1.06


def call(*line: str) -> None:
    subprocess.run(line, check=True, capture_output=True)


@contextmanager
def namespace(index: int) -> Iterator[tuple[str, str]]:
    """A network namespace; its name, and the device through which this one sends to it."""
    name = f"pipespec-{os.getpid()}-{index}"
    device, subnet = f"ps{os.getpid() % 100000}-{index}", f"10.78.{index}"
    call("ip", "netns", "add", name)
    try:
        call("ip", "link", "add", device, "type", "veth", "peer", "name", "eth0", "netns", name)
        call("ip", "addr", "add", f"{subnet}.1/24", "dev", device)
        call("ip", "link", "set", device, "up")
        inside = ("ip", "-n", name)
        call(*inside, "link", "set", "lo", "up")
        call(*inside, "addr", "add", f"{subnet}.2/24", "dev", "eth0")
        call(*inside, "link", "set", "eth0", "up")
        call(*inside, "route", "add", "default", "via", f"{subnet}.1")
        yield name, device
    finally:
        subprocess.run(["ip", "link", "del", device], capture_output=True)
        call("ip", "netns", "del", name)


@pytest.fixture(scope="module")
def namespaces() -> Iterator[list[tuple[str, str]]]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and ip for network namespaces")
    with ExitStack() as stack:
        try:
            yield [stack.enter_context(namespace(index)) for index in (1, 2, 3)]
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.decode()}")


def sent_bytes(device: str) -> int:
    return int(Path(f"/sys/class/net/{device}/statistics/tx_bytes").read_text())


@pytest.mark.long
def test_the_link_of_a_host_carries_its_own_layers_alone(
    namespaces: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Of four hosts one has its layers; the others get theirs from the hub, each over its link."""
    model = build("llama", tmp_path / "m", max_shard_size="20MB", **SIZES)
    hosts: list[dict[str, Any]] = [
        {"name": "a", "address": "127.0.0.1", "devices": ["cpu", "cpu"]},
    ]
    for name, (inside, _) in zip("bcd", namespaces, strict=True):
        python = tmp_path / f"python-{name}"
        python.write_text(f'#!/bin/sh\nexec ip netns exec {inside} {sys.executable} "$@"\n')
        python.chmod(0o755)
        env = {"XDG_CACHE_HOME": str(tmp_path / name), "HF_HOME": str(tmp_path / name)}
        host = {"address": f"127.0.0.{len(hosts) + 1}", "python": str(python), "env": env}
        hosts.append({"name": name, "devices": ["cpu"], **host})
    hosts[0]["draft"] = str(resource_dir("demo") / "draft")
    file = tmp_path / "hosts.yaml"
    split = [2, 2, 2, 2]
    content = {"defaults": {"ssh": "local"}, "hosts": hosts, "draft": "a/0", "split": split}
    file.write_text(yaml.safe_dump(content))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    hub = Hub({"org/model": model})
    hub.signs = False
    with serving(hub, "10.78.1.1") as endpoint:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        fetch_parts(inspect("org/model").path, parts_of(range(2), NUM_LAYERS, tied=False))
        before = [sent_bytes(device) for _, device in namespaces]
        assert main(["fetch", "--json", f"cluster={file}", "model.target=org/model"]) == 0
        carried = [sent_bytes(device) for _, device in namespaces]
    fetched = {
        name: each["fetched_bytes"]
        for name, each in json.loads(capsys.readouterr().out)["hosts"].items()
    }
    assert fetched.keys() == set("bcd")
    size = sum(each.stat().st_size for each in model.glob("*.safetensors"))
    assert hub.weight_bytes <= 1.02 * size
    for name, start, stop in zip("bcd", before, carried, strict=True):
        assert fetched[name] <= stop - start <= OVERHEAD * fetched[name], name
