"""The chaos benchmark: its schedules, judgements, refused options, and a short run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from functools import partial

import pytest

from benchmarks.faults import chaos, chaos_in_flight, chaos_streams, fault_injector
from benchmarks.faults.single_faults import (
    KINDS,
    LOCAL_KINDS,
    Fault,
    FaultResult,
    compare,
    prompt_cases,
    recovery_s,
    table,
)
from benchmarks.faults.single_faults import schedule as draw
from pipespec.config.compose import compose
from pipespec.instruments.bench.dataset import Sample
from tools.rig import clock, testbed

KILL, CUT = Fault("kill", "1", 4, 0.0, 0), Fault("cut", "a-b", 4, 2.0, 0)


def schedule(seed: int, count: int = 50) -> list[Fault]:
    hosts = ("a", "b", "c")
    return draw(seed, count, kinds=KINDS, ranks=5, hosts=hosts, tokens=96, num_cases=4)


def answer(*events: tuple[float, int, list[int], int]) -> dict:
    """The driver's message about events (seconds, base, tokens, epoch)."""
    return {
        "tokens": [token for _, _, tokens, _ in events for token in tokens],
        "events": [[at, base, len(tokens), epoch] for at, base, tokens, epoch in events],
    }


def test_equal_seeds_give_equal_schedules():
    assert schedule(1) == schedule(1)
    assert schedule(1) != schedule(2)


def test_every_kind_of_fault_is_scheduled_equally_often_and_during_an_answer():
    faults = schedule(1)
    assert Counter(fault.kind for fault in faults) == dict.fromkeys(KINDS, 10)
    assert all(1 <= fault.at <= 72 for fault in faults)
    assert {fault.target for fault in faults if fault.kind == "agent"} <= {"a", "b", "c"}
    assert {fault.target for fault in faults if fault.kind == "cut"} <= {"a-b", "a-c", "b-c"}
    assert all((fault.cut_s > 0) == (fault.kind == "cut") for fault in faults)


def test_identical_answer_counts_no_error():
    assert compare(answer((0, 0, [5, 6], 1), (1, 2, [7], 2)), [5, 6, 7]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        (answer((0, 0, [5, 6], 1), (1, 2, [8], 2)), (1, 0, 0)),  # another token
        (answer((0, 0, [5], 1), (1, 2, [7], 2)), (2, 1, 0)),  # one is lost
        (answer((0, 0, [5, 6], 1), (1, 1, [6, 7], 2)), (2, 0, 1)),  # one comes twice
        (answer((0, 0, [5, 6], 1)), (1, 0, 0)),  # it ends early
    ],
)
def test_each_kind_of_error_is_counted(given, wrong):
    assert compare(given, [5, 6, 7]) == wrong


def test_recovery_ends_with_the_first_token_of_a_later_epoch():
    told = answer((1.0, 0, [5], 1), (2.5, 1, [6], 1), (4.0, 2, [7], 2), (5.0, 3, [8], 2))
    assert recovery_s(KILL, told, since_s=2.0, epoch=1) == 2.0
    assert recovery_s(KILL, told, since_s=2.0, epoch=2) is None
    assert recovery_s(CUT, told, since_s=2.0, epoch=1) == 0.5


def test_faults_after_which_the_answer_needed_no_recovery_are_counted_separately():
    results = [
        FaultResult("recovered", 1.0, 1, "", 0, 0, 0),
        FaultResult("ended_first", None, 1, "", 0, 0, 0),
        FaultResult("recovered", 3.0, 2, "", 0, 0, 0),
    ]
    kill, every = table([KILL] * 3, results)
    assert (kill["times"], kill["recovered"], kill["ended_first"]) == (3, 2, 1)
    assert kill["median_s"] == 2.0
    assert every == {**kill, "fault": "all"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--kinds", "kill,cut"], "--kinds names 'cut', which needs several hosts; add --hosts 3."),
        (["--kinds", "flood"], "--kinds names 'flood', which is none of kill, hang, redis"),
        (["--hosts", "9"], "--hosts is 9, but must be from 2 to 5, the number of ranks."),
        (["--faults", "0"], "--faults, --num-prompts and --stages must be 1 or more"),
        (["--in-flight", "0"], "--in-flight is 0, but must be 1 or more."),
        (["--in-flight", "4", "--kinds", "cut"], "--kinds names 'cut', which needs several hosts"),
        (["--in-flight", "4", "--kinds", "flood"], "--kinds names 'flood', which is none of kill,"),
        (["--in-flight", "4", "--plot", "x"], "--plot draws a run with one request at a time"),
    ],
)
def test_contradicting_options_are_refused(options, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["chaos", *options])
    with pytest.raises(SystemExit):
        chaos.parse()
    assert said in " ".join(capsys.readouterr().err.split())


def test_settings_of_every_prompt_are_valid_and_name_its_sampling():
    samples = [Sample(str(number), "set", "Once upon a time") for number in range(2)]
    cases = prompt_cases(samples, tokens=8)
    assert [case.verify for case in cases] == ["greedy", "sampled"] * 2
    for case in cases:
        config = compose(list(case.settings))
        assert (config.sampling.temperature > 0) == (case.verify == "sampled")
        assert config.decode.max_new_tokens == 8


def test_hosts_are_refused_without_a_testbed(monkeypatch, capsys):
    monkeypatch.setattr(testbed, "missing", lambda: "a test bed needs root")
    monkeypatch.setattr(sys, "argv", ["chaos", "--hosts", "3"])
    with pytest.raises(SystemExit):
        chaos.parse()
    assert "--hosts 3 is not possible here: a test bed needs root." in capsys.readouterr().err


# --- with many requests in flight -------------------------------------------------------------


def test_in_flight_schedule_has_every_kind_equally_often_and_some_faults_at_rest():
    many = partial(fault_injector.schedule, num_ranks=3, hosts=("a", "b"))
    faults = many(1, 10 * len(fault_injector.KINDS), kinds=fault_injector.KINDS)
    assert faults == many(1, 10 * len(fault_injector.KINDS), kinds=fault_injector.KINDS)
    assert Counter(fault.kind for fault in faults) == dict.fromkeys(fault_injector.KINDS, 10)
    idle = sum(not fault.at for fault in faults)
    assert 0.1 < idle / len(faults) < 0.3
    assert {fault.target for fault in faults if fault.kind == "cut"} == {"a-b"}
    assert all((fault.cut_s > 0) == (fault.kind == "cut") for fault in faults)
    assert {f.target for f in faults if f.kind in fault_injector.RANK_SIGNALS} == {"0", "1", "2"}


def test_errors_of_requests_in_flight_are_reported():
    run = chaos_in_flight.InFlightRun([])
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
    kinds, skipped = chaos_in_flight.kinds_here(options)
    assert skipped == {
        "clock": "there is no compiler",
        "cut": "it needs several hosts (--hosts 2)",
    }
    assert {*kinds} == {*fault_injector.KINDS} - {*skipped}


@pytest.mark.skipif(clock.missing() is not None, reason=str(clock.missing()))
def test_stepped_clock_moves_wall_clock_time_alone(tmp_path):
    stepped = clock.SteppedClock(tmp_path)
    program = "import time; input(); print(time.time(), time.monotonic()); time.sleep(0)"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **stepped.environment},
    ) as process:
        stepped.step(3600)
        wall, monotonic = map(float, process.communicate("\n")[0].split())
    assert process.returncode == 0
    assert abs(wall - time.time() - 3600) < 60
    assert abs(monotonic - time.monotonic()) < 60
    stepped.remove()
    assert not [*tmp_path.iterdir()]


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


# --- one request at a time --------------------------------------------------------------------


@pytest.mark.long
def test_short_run_finds_no_error(monkeypatch, tmp_path, capsys):
    file = tmp_path / "chaos.json"
    size = ["--faults", "4", "--stages", "2", "--num-prompts", "1", "--tokens", "48"]
    monkeypatch.setattr(sys, "argv", ["chaos", *size, "--seed", "3", "--json", str(file)])
    chaos.main()
    result = json.loads(file.read_text())
    assert result["requests_finished"] == 2 + 4
    assert result["mismatches"] == result["lost_tokens"] == result["doubled_tokens"] == 0
    assert result["processes_left"] == result["sockets_left"] == result["files_left"] == 0
    assert result["epochs_begun"] >= 4
    assert {fault["kind"] for fault in result["faults"]} == set(LOCAL_KINDS)
    assert all(fault["outcome"] != "missed" for fault in result["faults"])
    assert len(capsys.readouterr().err.splitlines()) == 4


@pytest.mark.long
@pytest.mark.timeout(600)
def test_streams_continue_after_a_whole_host_is_killed(monkeypatch, tmp_path):
    if (lacking := testbed.missing()) is not None:
        pytest.skip(lacking)
    file = tmp_path / "host.json"
    monkeypatch.setattr(sys, "argv", ["x", "--quick", "--hosts", "3", "--json", str(file)])
    chaos_streams.main()
    nothing, host = json.loads(file.read_text())["rows"]
    assert (nothing["killed"], host["killed"]) == ("nothing", "host")
    assert host["as_undisturbed"] == host["streams"] == 16
    # The host's ranks were needed.
    assert host["longest_pause_s"] > nothing["longest_pause_s"]
