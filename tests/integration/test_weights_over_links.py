"""Weights that reach four hosts over links of a known rate, in network namespaces."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from pipespec.engine.checkpoint import inspect
from pipespec.system.folders import resource_dir
from tests.helpers.models import build
from tools.rig.testbed import Testbed, missing

if (lacking := missing()) is not None:
    pytest.skip(lacking, allow_module_level=True)

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
NUM_LAYERS = 8
GBIT = 0.2
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": NUM_LAYERS}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("only") / "model"
    return build("llama", folder, max_shard_size="100MB", **SIZES)


@pytest.fixture
def bed() -> Iterator[Testbed]:
    with Testbed(hosts=4, gbit=GBIT) as bed:
        yield bed


def test_three_hosts_with_nothing_are_ready_when_the_busiest_link_is_done(
    bed: Testbed, model: Path, tmp_path: Path
) -> None:
    """Host a has the folder and computes two layers; its link sends the other six."""
    wrapper = tmp_path / "python"
    run = f'mount -t tmpfs none {model.parent} && exec {sys.executable} "$@"'
    wrapper.write_text(f"#!/bin/sh\nexec unshare -m sh -c '{run}' python \"$@\"\n")
    wrapper.chmod(0o755)
    devices = dict.fromkeys(bed.hosts, 1) | {"a": 2}
    file = bed.hosts_file(devices, draft="a/0", split=[2, 2, 2, 2])
    content = yaml.safe_load(file.read_text())
    for host in content["hosts"][1:]:
        cache = {"XDG_CACHE_HOME": str(tmp_path / host["name"])}
        host |= {"python": str(wrapper), "env": cache, "draft": "/none"}
    file.write_text(yaml.safe_dump(content))
    draft = resource_dir("demo") / "draft"
    settings = [f"cluster={file}", f"model.target={model}", f"model.draft={draft}"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    inspect(model)  # its config is cached, as after any start before
    begun = time.monotonic()
    command = [sys.executable, "-m", "pipespec", "fetch", "--json", *settings]
    with bed.popen("a", command, env=env, stdout=-1, stderr=-1) as process:
        out, err = process.communicate(timeout=300)
    took = time.monotonic() - begun
    assert process.returncode == 0, err
    sent = sum(each["fetched_bytes"] for each in json.loads(out)["hosts"].values())
    assert set(json.loads(out)["hosts"]) == {"b", "c", "d"}
    ideal = 8 * sent / (GBIT * 1e9)
    print(f"{sent / 2**20:.0f} MiB in {took:.1f} s, of which the link needs {ideal:.1f} s")
    assert took <= 1.3 * ideal
