"""What `pipespec plan HOSTS.yaml` makes of figures that were measured."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from pipespec.cli.main import main
from pipespec.extras.commands import plan_hosts
from pipespec.placement.host_figures import Figures

SIZES = {
    "dtype": "float32",
    "layer_bytes": [8] * 4,
    "embedding_bytes": 8,
    "head_bytes": 8,
    "tied": False,
    "hidden_size": 4,
    "context": 64,
    "has_kv": [True] * 4,
    "state_bytes": [0] * 4,
    "node_bytes": [0] * 4,
    "kinds": [0] * 4,
    "divisible": True,
}
STAGE = {"layer_ms": 5.0, "head_ms": 20.0, "embedding_ms": 0.0, "kv_slot_bytes": 1}
DRAFT = {"round_ms": 2.0, "weight_bytes": 8, "kv_slot_bytes": 1}
BOTH = {"stage": STAGE, "draft": DRAFT}
WHOLE = {"divisible": False}
NOTHING: Mapping[str, Any] = {}


@pytest.fixture
def partition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command on a host `a` with these devices, of which this was measured."""

    def run(
        *arguments: str,
        devices: str,
        of_devices: list[dict[str, Any]],
        more: str = "",
        target: Mapping[str, Any] = NOTHING,
        draft: Mapping[str, Any] = NOTHING,
    ) -> int:
        host = f"{{name: a, address: 127.0.0.1, ssh: local, devices: {devices}}}"
        (tmp_path / "hosts.yaml").write_text(f"hosts: [{host}]\n{more}")
        device = {"model": "x", "memory_bytes": 2**40, "sum_ms": 0.5}
        members = {f"a/{i}": device | each for i, each in enumerate(of_devices)}
        of_models: list[Any] = [{**SIZES, **target}, {**SIZES, **draft}]
        figures = Figures(8, "float32", *of_models, cast(Any, members), [])
        monkeypatch.setattr(plan_hosts, "measure_hosts", lambda *_, **__: figures)
        return main(["plan", str(tmp_path / "hosts.yaml"), "policy.width=8", *arguments])

    return run


def divisions(text: str) -> list[dict[str, Any]]:
    return json.loads(text)["divisions"]


@pytest.mark.parametrize("more", ["draft: a/0", "spares: 1"])
def test_a_worker_needs_figures_of_what_it_may_become_alone(more, partition):
    first = {"draft: a/0": {"draft": DRAFT}, "spares: 1": BOTH}[more]
    of_devices = [first, BOTH, {"stage": STAGE}]
    assert partition(devices="[cpu, cpu, cpu]", of_devices=of_devices, more=more) == 0


def test_a_division_has_the_time_of_one_round_and_of_its_slowest_stage(partition, capsys):
    of_all = {"devices": "[cpu, cpu, cpu]", "of_devices": [BOTH] * 3}
    assert partition("--groups", "--tokens", "20", "--json", "proposer.rounds=3", **of_all) == 0
    found = divisions(capsys.readouterr().out)
    (pipeline,) = (each for each in found if each["stages"] == 2)
    assert pipeline["draft_ms"] == 2.0
    assert pipeline["stage_ms"] == 5 + 20  # three layers take the first one 15


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "draft", "sizes"),
    [
        ({}, {}, {(1, 1), (1, 2), (2, 1)}),
        (WHOLE, {}, {(1, 1), (2, 1)}),
        ({}, WHOLE, {(1, 1), (1, 2)}),
        (WHOLE, WHOLE, {(1, 1)}),
    ],
)
def test_models_that_cannot_be_divided_get_no_group(target, draft, sizes, partition, capsys):
    of_all = {"devices": "[cpu, cpu, cpu]", "of_devices": [BOTH] * 3}
    asked = {**of_all, "target": target, "draft": draft}
    assert partition("--groups", "--tokens", "20", "--json", **asked) == 0
    found = divisions(capsys.readouterr().out)
    assert {(each["draft"], each["members"]) for each in found} == sizes
    assert partition("--groups", "--tokens", "20", **asked) == 0
    said = capsys.readouterr().out
    assert ("cannot compute the target" in said) == bool(target)
    assert ("the draft together" in said) == bool(draft)


def test_what_the_hosts_file_says_is_not_divided_anew(partition, capsys):
    asked = {"devices": "[cpu, cpu]", "of_devices": [BOTH] * 2, "more": "draft: a/1"}
    assert partition("--groups", "--tokens", "20", **asked) == 2
    assert "says already (draft)" in capsys.readouterr().err
