"""Weights that reach hosts over links of a known rate: network namespaces, each with its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants

from pipespec.cli.main import main
from pipespec.engine.checkpoint import inspect
from pipespec.engine.parts.from_hub import fetch_parts
from pipespec.engine.slice_tensors import parts_of
from pipespec.system.folders import resource_dir
from tests.helpers.hub import Hub, serving
from tests.helpers.models import build

ROOT = Path(__file__).parents[2]
NUM_LAYERS = 8
MBIT = 40
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": NUM_LAYERS}
# A link passes on so many bytes at once, and lets so many wait.
BURST, WAITING = 2**16, 2**22


def call(*line: str) -> None:
    subprocess.run(line, check=True, capture_output=True)


@contextmanager
def namespace(index: int) -> Iterator[str]:
    """A network namespace to which this one sends at most MBIT; its name."""
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
        bucket = ("tbf", "rate", f"{MBIT}mbit", "burst", str(BURST), "limit", str(WAITING))
        call("tc", "qdisc", "add", "dev", device, "root", *bucket)
        yield name
    finally:
        subprocess.run(["ip", "link", "del", device], capture_output=True)
        call("ip", "netns", "del", name)


@pytest.fixture(scope="module")
def namespaces() -> Iterator[list[str]]:
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("needs root, ip and tc for network namespaces")
    with ExitStack() as stack:
        try:
            yield [stack.enter_context(namespace(index)) for index in (1, 2, 3)]
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.decode()}")


@pytest.mark.long
@pytest.mark.timeout(400)
def test_three_hosts_with_nothing_are_ready_when_the_busiest_link_is_done(
    namespaces: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Of four hosts one has its layers; the others get theirs from the hub, each over its link."""
    model = build("llama", tmp_path / "m", max_shard_size="100MB", **SIZES)
    hosts: list[dict[str, Any]] = [
        {"name": "a", "address": "127.0.0.1", "devices": ["cpu", "cpu"]},
    ]
    for name, inside in zip("bcd", namespaces, strict=True):
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
        begun = time.monotonic()
        assert main(["fetch", "--json", f"cluster={file}", "model.target=org/model"]) == 0
        took = time.monotonic() - begun
    fetched = {
        name: each["fetched_bytes"]
        for name, each in json.loads(capsys.readouterr().out)["hosts"].items()
    }
    assert fetched.keys() == set("bcd")
    size = sum(each.stat().st_size for each in model.glob("*.safetensors"))
    assert hub.weight_bytes <= 1.02 * size
    ideal_s = 8 * max(fetched.values()) / (MBIT * 1e6)
    with capsys.disabled():
        print(f"\n{fetched} in {took:.2f} s, the busiest link alone {ideal_s:.2f} s")
    assert took <= 1.3 * ideal_s
