"""What `pipespec plan HOSTS.yaml` makes of figures that were measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pipespec.cli.main import main

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
def partition(tmp_path: Path) -> Any:
    """Runs the command on a host `a` with these devices, of which this was measured."""

    def run(
        *arguments: str,
        devices: str,
        of_devices: list[dict[str, Any]],
        more: str = "",
        target: Mapping[str, Any] = NOTHING,
        draft: Mapping[str, Any] = NOTHING,
        changed: Mapping[str, Any] = NOTHING,
    ) -> int:
        host = f"{{name: a, address: 127.0.0.1, ssh: local, devices: {devices}}}"
        (tmp_path / "hosts.yaml").write_text(f"hosts: [{host}]\n{more}")
        device = {"model": "x", "memory_bytes": 2**40, "sum_ms": 0.5}
        figures = {
            "rows": 8,
            "length": 8,
            "dtype": "float32",
            "quantization": [None, None],
            "target": {**SIZES, **target},
            "draft": {**SIZES, **draft},
            "links": [],
            "members": {f"a/{i}": device | each for i, each in enumerate(of_devices)},
        }
        for member in figures["members"].values():
            if member["sum_ms"] is None:
                del member["sum_ms"]
        (tmp_path / "figures.json").write_text(json.dumps({"figures": {**figures, **changed}}))
        files = [str(tmp_path / "hosts.yaml"), "--profile", str(tmp_path / "figures.json")]
        return main(["plan", *files, "policy.width=8", *arguments])

    return run


def divisions(text: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(text)["divisions"]
    return found


@pytest.mark.parametrize(
    ("of_devices", "more", "part"),
    [
        ([{"draft": DRAFT}, *[{"stage": STAGE}] * 2], "", "a/0 may be a stage"),
        ([{"draft": DRAFT}, *[{"stage": STAGE}] * 2], "draft: a/1", "a/0 may be a stage"),
        ([BOTH, {"stage": STAGE}, BOTH], "", "a/1 may be the head"),
        ([BOTH, {"stage": STAGE}, BOTH], "draft: a/1", "a/1 may be the head"),
    ],
)
def test_figures_that_lack_what_a_worker_may_become_are_refused(
    of_devices: list[dict[str, Any]],
    more: str,
    part: str,
    partition: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert partition(devices="[cpu, cpu, cpu]", of_devices=of_devices, more=more) == 2
    said = capsys.readouterr().err
    assert f"figures are not complete ({part}" in said and said.count("\n") == 1


@pytest.mark.parametrize("more", ["draft: a/0", "spares: 1"])
def test_figures_of_what_each_worker_may_become_are_enough(more: str, partition: Any) -> None:
    first = {"draft: a/0": {"draft": DRAFT}, "spares: 1": BOTH}[more]
    of_devices = [first, BOTH, {"stage": STAGE}]
    assert partition(devices="[cpu, cpu, cpu]", of_devices=of_devices, more=more) == 0


def test_a_division_has_the_time_of_one_round_and_of_its_slowest_stage(
    partition: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    of_all = {"devices": "[cpu, cpu, cpu]", "of_devices": [BOTH] * 3}
    assert partition("--groups", "--tokens", "20", "--json", "proposer.rounds=3", **of_all) == 0
    found = divisions(capsys.readouterr().out)
    (pipeline,) = (each for each in found if each["stages"] == 2)
    assert pipeline["draft_ms"] == 2.0
    assert pipeline["stage_ms"] == 5 + 20  # three layers take the first one 15


@pytest.mark.parametrize(
    ("target", "draft", "sizes"),
    [
        ({}, {}, {(1, 1), (1, 2), (2, 1)}),
        (WHOLE, {}, {(1, 1), (2, 1)}),
        ({}, WHOLE, {(1, 1), (1, 2)}),
        (WHOLE, WHOLE, {(1, 1)}),
    ],
)
def test_models_that_cannot_be_divided_get_no_group(
    target: dict[str, Any],
    draft: dict[str, Any],
    sizes: set[tuple[int, int]],
    partition: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    of_all = {"devices": "[cpu, cpu, cpu]", "of_devices": [BOTH] * 3}
    asked = {**of_all, "target": target, "draft": draft}
    assert partition("--groups", "--tokens", "20", "--json", **asked) == 0
    found = divisions(capsys.readouterr().out)
    assert {(each["draft"], each["members"]) for each in found} == sizes
    assert partition("--groups", "--tokens", "20", **asked) == 0
    said = capsys.readouterr().out
    assert ("cannot compute the target" in said) == bool(target)
    assert ("the draft together" in said) == bool(draft)


@pytest.mark.parametrize(
    ("of_devices", "more", "settings", "said"),
    [
        ([BOTH] * 2, "draft: a/1", [], "says already (draft)"),
        ([BOTH] * 3, "", ["policy.width=9"], "rows a batch, but 9"),
        ([BOTH | {"sum_ms": None}] * 3, "", [], "measured without --groups"),
    ],
)
def test_divisions_that_cannot_be_planned_are_refused(
    of_devices: list[dict[str, Any]],
    more: str,
    settings: list[str],
    said: str,
    partition: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = {"devices": f"[{', '.join(['cpu'] * len(of_devices))}]", "of_devices": of_devices}
    assert partition("--groups", "--tokens", "20", *settings, **asked, more=more) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "changed",
    [
        {"rows": "8"},
        {"rows": 10**30},
        {"quantization": [None]},
        {"members": {"a/0": {"model": "x"}}},
        {"members": {"a/0": {"model": "x", "memory_bytes": -1}}},
        {"members": {"a/0": {"model": "x", "memory_bytes": float("inf")}}},
        {"links": [{"source": "a", "to": "b", "rtt_ms": 1, "gbit_s": 0}]},
        {"target": {}},
        {"target": 10**30},
        {"target": SIZES | {"kinds": [0, 3, 0, 0]}},
        {"target": SIZES | {"kinds": [0]}},
    ],
)
def test_figures_of_wrong_types_are_refused(
    changed: dict[str, Any], partition: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    of_each = BOTH | {"stage": STAGE | {"kind_ms": [1, 2]}}
    asked = {"devices": "[cpu, cpu]", "of_devices": [of_each] * 2, "target": {"kinds": [1, 0] * 2}}
    assert partition(**asked) == 0
    capsys.readouterr()
    assert partition(**asked, changed=changed) == 2
    said = capsys.readouterr().err
    assert "measure again" in said and said.count("\n") == 1
