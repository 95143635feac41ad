"""What commands print stands there as it is: nothing in it is markup."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipespec.cli import status
from pipespec.cli.generate import print_statistics
from pipespec.cli.main import main
from pipespec.client.single_generation import Result
from pipespec.cluster.diagnostics.examine_hosts import Report
from pipespec.cluster.diagnostics.findings import HostReport, LinkReport
from pipespec.cluster.diagnostics.probe import Reachability
from pipespec.console.terminal import show
from pipespec.extras.bench.figures import BenchResult, RequestResult
from pipespec.extras.commands import bench, doctor
from pipespec.extras.device_check.machine_check import QUANTIZE, table

NASTY = "[/red] [bold]x[/bold] :smile: [link=a]"
PLAIN = {"emulated": False, "synthetic": False, "lossy": False, "seed": None}
STATS = {"tokens_per_step": None, "steps": 1, "rows_per_step": None, "stage_busy": [0.5]}


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")


def test_a_sentence_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    show(NASTY)
    show(NASTY, stderr=True)
    assert capsys.readouterr() == (NASTY + "\n", NASTY + "\n")


def test_the_figures_of_a_benchmark_of_any_name(capsys: pytest.CaptureFixture[str]) -> None:
    stats = {**STATS, "hit_rate": 0.0, "overruns": 0}
    request = RequestResult("q", NASTY, [1], [2], "a", "length", 1.0, [1.0], stats)
    bench.print_figures(BenchResult([request], 1.0, 1, PLAIN))
    assert NASTY in capsys.readouterr().out


def test_install_command_is_shown_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    lacking = {"usable": False, "why_not": QUANTIZE}
    show(
        table(
            {
                "python": "3",
                "packages": {},
                "devices": [],
                "attention": {},
                "quantization": {"int8": lacking},
                "checkpoints": {},
                "transport": {},
                "redis": None,
                "ok": True,
            }
        )
    )
    assert "pip install 'pipespec[quantize]'" in capsys.readouterr().out


def test_the_cluster_of_a_host_of_any_name(capsys: pytest.CaptureFixture[str]) -> None:
    status.print_table([{"name": "lab", "state": "ready", "host": NASTY, "problem": NASTY}])
    assert capsys.readouterr().out.count(NASTY) == 2


def test_hosts_and_links_of_any_name(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(
        {NASTY: HostReport()}, [LinkReport(Reachability(NASTY, NASTY), None, "a", "b")], []
    )
    show(doctor.hosts_table(report), doctor.links_table(report))
    assert capsys.readouterr().out.count(NASTY) == 3


@pytest.mark.parametrize("emulated", [False, True])
def test_overruns_are_shown_only_where_times_are_emulated(
    emulated: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    label = {**PLAIN, "emulated": emulated}
    stats = {**STATS, "hit_rate": 0.0, "overruns": 0}
    print_statistics(Result("a", [1], None, 1, 1, "length", {**stats, **label}))
    request = RequestResult("q", "b", [1], [2], "a", "length", 1.0, [1.0], stats)
    bench.print_figures(BenchResult([request], 1.0, 1, label))
    out, err = capsys.readouterr()
    assert ("overruns" in out, "overruns" in err) == (emulated, emulated)


def test_statistics_that_ended_in_any_way(capsys: pytest.CaptureFixture[str]) -> None:
    print_statistics(Result("a", [1], None, 1, 1, "[/red]", {**PLAIN, "a": NASTY}))
    err = capsys.readouterr().err
    assert NASTY in err
    assert "ended by [/red]" in err


def test_a_partition_of_devices_of_any_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = {"layer_ms": 1, "head_ms": 1, "embedding_ms": 1, "kv_slot_bytes": 1}
    device = {"model": NASTY, "memory_bytes": 2**40, "stage": times}
    sizes = {"dtype": "float32", "layer_bytes": [1], "embedding_bytes": 1, "head_bytes": 1}
    sizes |= {"has_kv": [True], "state_bytes": [0], "node_bytes": [0], "kinds": [0]}
    sizes |= {"divisible": True}
    figures = {
        "rows": 8,
        "length": 8,
        "dtype": "float32",
        "quantization": [None, None],
        "target": sizes | {"tied": False, "hidden_size": 4, "context": 64},
        "draft": None,
        "members": {"a/0": device, "a/1": device},
        "links": [],
    }
    file, hosts_file = tmp_path / "figures.json", tmp_path / "[bold]two.yaml"
    hosts_file.write_text("hosts: [{name: a, address: 127.0.0.1, ssh: local, devices: [cpu, cpu]}]")
    file.write_text(json.dumps({"figures": figures}))
    settings = ["policy.width=8", "proposer=suffix", "model.draft=null"]
    assert main(["plan", "--profile", str(file), str(hosts_file), *settings]) == 0
    out = capsys.readouterr().out
    assert NASTY in out
    assert str(hosts_file) in out
