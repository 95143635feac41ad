"""A cluster that stays up over three hosts, asked from a host that is not its head."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pipespec.client import registry
from pipespec.system.folders import resource_dir
from tools.rig import cluster
from tools.rig.testbed import Testbed, missing

if (lacking := missing()) is not None:
    pytest.skip(lacking, allow_module_level=True)

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
PIPESPEC = [sys.executable, "-m", "pipespec"]
PROMPT = "Once upon a time there was a king who"
NUM_TOKENS = 12
PATIENCE_S = 150  # a loaded machine takes its time to import torch on three hosts


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Testbed]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "a"))
    with Testbed(hosts=3) as bed:
        yield bed


def run(bed: Testbed, host: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return bed.run(host, [*PIPESPEC, *arguments], timeout=PATIENCE_S)


def test_copied_registry_entry_is_enough_to_send_requests_from_another_host(
    bed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resource_dir("demo") / "target"
    prompt = AutoTokenizer.from_pretrained(folder).encode(PROMPT)
    (expected,) = cluster.reference(folder, [prompt], NUM_TOKENS)
    hosts_file = bed.hosts_file(1, "attic.yaml")
    started = run(bed, "a", "up", "--detach", f"cluster={hosts_file}", "model.context=128")
    assert (started.returncode, started.stderr) == (0, "")
    assert started.stdout.startswith("The cluster 'attic' is ready: 3 ranks")

    here = registry.folder()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "b"))
    registry.folder().mkdir(mode=0o700, parents=True)
    told = json.loads((here / "attic.json").read_text())
    # To host b, host a's processes are those of another machine.
    told["owner"]["machine"] = "host a"
    (registry.folder() / "attic.json").write_text(json.dumps(told))
    ask = ["generate", "--on", "attic", "--json", "--prompt", PROMPT]
    answer = run(bed, "b", *ask, f"decode.max_new_tokens={NUM_TOKENS}")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert json.loads(answer.stdout)["token_ids"] == expected
    state = run(bed, "b", "status", "--json")
    (seen,) = json.loads(state.stdout)["clusters"]
    assert (seen["state"], seen["ranks"], seen["finished"]) == ("ready", 3, 1)
    refused = run(bed, "b", "down", "attic")
    assert refused.returncode == 2
    assert "run `pipespec down attic` there" in refused.stderr

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "a"))
    ended = run(bed, "a", "down")
    assert (ended.returncode, ended.stdout) == (0, "attic has ended.\n")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "b"))
    gone = run(bed, "b", "status")
    assert gone.returncode == 1
    assert "no answer" in gone.stdout
    assert told["url"].partition("@")[0] not in gone.stdout
    assert [host for host in ("b", "c") if ranks(bed, host)] == []


def ranks(bed: Testbed, host: str) -> list[int]:
    """The processes of a host that run Python: all but its sshd."""
    return [
        pid
        for pid in bed.processes(host)
        if os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith("python")
    ]
