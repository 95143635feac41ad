"""The chaos benchmark: its schedule, judgements, refused options, and short runs."""

import json
import sys
from argparse import Namespace
from collections import Counter
from functools import partial

import pytest

from benchmarks.faults import chaos, fault_injector
from tools.rig import clock, testbed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--kinds", "kill,cut"], "--kinds names 'cut', which needs several hosts; add --hosts 3."),
        (["--kinds", "flood"], "--kinds names 'flood', which is none of kill, hang, term"),
        (["--hosts", "9"], "--hosts is 9, but must be from 2 to 4, the number of ranks."),
        (["--faults", "0"], "--faults, --in-flight and --stages must be 1 or more"),
        (["--in-flight", "0"], "--faults, --in-flight and --stages must be 1 or more"),
    ],
)
def test_contradicting_options_are_refused(options, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["chaos", *options])
    with pytest.raises(SystemExit):
        chaos.parse()
    assert said in " ".join(capsys.readouterr().err.split())


def test_in_flight_schedule_has_every_kind_equally_often_and_some_faults_at_rest():
    many = partial(fault_injector.schedule, num_ranks=3, hosts=("a", "b"))
    faults = many(1, 10 * len(fault_injector.KINDS), kinds=fault_injector.KINDS)
    assert faults == many(1, 10 * len(fault_injector.KINDS), kinds=fault_injector.KINDS)
    assert Counter(fault.kind for fault in faults) == dict.fromkeys(fault_injector.KINDS, 10)
    idle = sum(not fault.at for fault in faults)
    assert 0.1 < idle / len(faults) < 0.3
    assert {fault.target for fault in faults if fault.kind == "cut"} == {"a-b"}
    assert {fault.target for fault in faults if fault.kind == "host"} == {"b"}
    assert all((fault.cut_s > 0) == (fault.kind == "cut") for fault in faults)
    assert {f.target for f in faults if f.kind in fault_injector.RANK_SIGNALS} == {"0", "1", "2"}


def test_errors_of_requests_in_flight_are_reported():
    run = chaos.ChaosRun([])
    assert not run.wrong
    run.counts.differ, run.counts.failures = 2, ["http greedy: Failed 500"]
    run.leftovers = {"processes": [], "network namespaces": ["pipespec-1-0-a"]}
    assert run.wrong == (
        "Texts that differ: 2. Requests lost: 1. The first lost request: http greedy: "
        "Failed 500. Left behind: 1 network namespaces, such as 'pipespec-1-0-a'."
    )


def test_faults_that_cannot_be_caused_here_are_named_with_the_reason(monkeypatch):
    monkeypatch.setattr(clock, "missing", lambda: "there is no compiler")
    options = Namespace(kinds=None, hosts=0)
    kinds, skipped = chaos.kinds_here(options)
    assert skipped == {
        "clock": "there is no compiler",
        **dict.fromkeys(fault_injector.BETWEEN_HOSTS, "it needs several hosts (--hosts 2)"),
    }
    assert {*kinds} == {*fault_injector.KINDS} - {*skipped}


# What does not import torch anew, so that a run takes seconds.
QUICK = ("kill", "term", "hup", "segv", "redis", "client_kill", "script_flush", "clock")


@pytest.mark.long
@pytest.mark.timeout(400)
def test_requests_in_flight_survive_each_quick_kind_of_fault(monkeypatch, tmp_path):
    file = tmp_path / "chaos.json"
    kinds = [kind for kind in QUICK if kind != "clock" or clock.missing() is None]
    size = ["--in-flight", "6", "--stages", "1", "--tokens", "16", "--faults", str(len(kinds))]
    size += ["--kinds", ",".join(kinds), "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["chaos", *size])
    chaos.main()
    result = json.loads(file.read_text())
    for name in ("texts_differ", "requests_lost", "tokens_lost", "tokens_doubled"):
        assert result[name] == 0
    assert not any(result["left_behind"].values())
    assert {fault["kind"] for fault in result["faults"]} == {*kinds}
    assert {kind.split()[0] for kind in result["finished_by_kind"]} == {"http", "log"}
    assert result["held_after"]["processes"] == result["held_before"]["processes"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_requests_in_flight_survive_each_kind_of_fault_between_hosts(monkeypatch, tmp_path):
    if (lacking := testbed.missing()) is not None:
        pytest.skip(lacking)
    file = tmp_path / "chaos.json"
    size = ["--in-flight", "16", "--hosts", "2", "--stages", "3", "--tokens", "32"]
    size += ["--faults", str(len(fault_injector.KINDS)), "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["chaos", *size])
    chaos.main()
    result = json.loads(file.read_text())
    assert result["texts_differ"] == result["requests_lost"] == 0
    assert not any(result["left_behind"].values())
