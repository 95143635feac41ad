"""The chaos benchmark: what it draws, how it judges, what it refuses, and a short run."""

from __future__ import annotations

import json
import sys
from collections import Counter

import pytest

from benchmarks import chaos, chaos_streams
from benchmarks.faults import KINDS, LOCAL_KINDS, Fault, Struck, compare, recovery_s, table
from benchmarks.faults import schedule as draw
from tools.rig import testbed

KILL, CUT = Fault("kill", "1", 4, 0.0, 0), Fault("cut", "a-b", 4, 2.0, 0)


def schedule(seed: int, count: int = 50) -> list[Fault]:
    hosts = ("a", "b", "c")
    return draw(seed, count, kinds=KINDS, ranks=5, hosts=hosts, tokens=96, num_questions=4)


def answer(*events: tuple[float, int, list[int], int]) -> dict:
    """What the driver tells of events (seconds, base, tokens, epoch)."""
    return {
        "tokens": [token for _, _, tokens, _ in events for token in tokens],
        "events": [[at, base, len(tokens), epoch] for at, base, tokens, epoch in events],
    }


def test_a_seed_gives_one_schedule():
    assert schedule(1) == schedule(1)
    assert schedule(1) != schedule(2)


def test_every_kind_comes_equally_often_and_in_mid_answer():
    faults = schedule(1)
    assert Counter(fault.kind for fault in faults) == dict.fromkeys(KINDS, 10)
    assert all(1 <= fault.at <= 72 for fault in faults)
    assert {fault.target for fault in faults if fault.kind == "agent"} <= {"a", "b", "c"}
    assert {fault.target for fault in faults if fault.kind == "cut"} <= {"a-b", "a-c", "b-c"}
    assert all((fault.cut_s > 0) == (fault.kind == "cut") for fault in faults)


def test_the_same_answer_has_nothing_wrong():
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
def test_what_is_wrong_is_counted(given, wrong):
    assert compare(given, [5, 6, 7]) == wrong


def test_recovery_ends_with_the_first_token_of_a_later_epoch():
    told = answer((1.0, 0, [5], 1), (2.5, 1, [6], 1), (4.0, 2, [7], 2), (5.0, 3, [8], 2))
    assert recovery_s(KILL, told, since_s=2.0, epoch=1) == 2.0
    assert recovery_s(KILL, told, since_s=2.0, epoch=2) is None
    assert recovery_s(CUT, told, since_s=2.0, epoch=1) == 0.5


def test_what_the_answer_did_not_need_is_counted_apart():
    struck = [
        Struck("recovered", 1.0, 1, "", 0, 0, 0),
        Struck("ended_first", None, 1, "", 0, 0, 0),
        Struck("recovered", 3.0, 2, "", 0, 0, 0),
    ]
    kill, every = table([KILL] * 3, struck)
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
    ],
)
def test_options_that_cannot_be_are_refused(options, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["chaos", *options])
    with pytest.raises(SystemExit):
        chaos.parse()
    assert said in " ".join(capsys.readouterr().err.split())


def test_hosts_are_refused_where_there_can_be_none(monkeypatch, capsys):
    monkeypatch.setattr(testbed, "missing", lambda: "a test bed needs root")
    monkeypatch.setattr(sys, "argv", ["chaos", "--hosts", "3"])
    with pytest.raises(SystemExit):
        chaos.parse()
    assert "--hosts 3 cannot be had here: a test bed needs root." in capsys.readouterr().err


@pytest.mark.long
def test_a_short_run_finds_nothing_wrong(monkeypatch, tmp_path, capsys):
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
def test_streams_outlive_a_whole_host(monkeypatch, tmp_path):
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
