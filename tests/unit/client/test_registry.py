"""Names of clusters: who holds them, what an entry tells, and what a killed process leaves."""

import json
import os
import stat
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO

import psutil
import pytest

from pipespec.cli.main import main
from pipespec.cli.status import report
from pipespec.client import registry
from pipespec.client.model_info import ModelInfo
from pipespec.client.registry import (
    Owner,
    RunningCluster,
    asked_to_end,
    claim,
    clear,
    entries,
    entry,
    find,
    held,
    left,
    noting_joined,
    publish,
    serving,
)
from pipespec.engine.checkpoint.tokenizer import BackendTokenizer
from pipespec.errors import ConfigError
from pipespec.system.process_identity import since_boot

URL = "unix:///tmp/redis.sock?password=secret"
HOLD = """import sys
from pipespec.client.registry import claim
with claim("lab"):
    print("held", flush=True)
    sys.stdin.read()
"""
ELSEWHERE = Owner(pid=1, created=0.0, machine="another kernel")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "pipespec"


def running(name: str = "lab", owner: Owner | None = None) -> RunningCluster:
    return RunningCluster(
        name=name,
        url=URL,
        namespace="pipespec",
        epoch=1,
        owner=owner or Owner.this(),
        host="alpha",
        overrides=("cluster.stages=2",),
        served=ModelInfo("/models/target", 512, 64, (1, 2), BackendTokenizer("{}")),
        num_ranks=3,
        started=100.0,
    )


def held_elsewhere(stderr: int | IO[str] | None = None) -> subprocess.Popen[str]:
    """Another process that holds the name "lab" until its standard input ends."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr}
    other = subprocess.Popen([sys.executable, "-c", HOLD], **pipes, text=True)
    assert other.stdout.readline() == "held\n"
    return other


def test_entry_is_read_as_published_and_removed_with_the_name(state):
    with claim("lab"):
        assert held("lab") == registry.Entry("lab", Owner.this(), None)
        with pytest.raises(ConfigError, match="still loading"):
            find("lab")
        publish(running())
        assert find("lab") == running()
        assert [each.name for each in entries()] == ["lab"]
    assert entries() == []
    assert list(state.iterdir()) == []


def test_an_entry_is_for_this_user_alone_and_never_shows_its_url(state):
    with claim("lab"):
        file = publish(running())
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(state.stat().st_mode) == 0o700
        assert "secret" not in repr(find("lab"))


def test_a_name_is_held_once_within_a_process_and_between_processes():
    with claim("lab"), pytest.raises(ConfigError, match="'lab' is up already"), claim("lab"):
        pass
    other = held_elsewhere()
    with pytest.raises(ConfigError, match="pipespec down lab"), claim("lab"):
        pass
    assert entry("lab").owner.pid == other.pid
    with claim("other"):
        assert [each.name for each in entries()] == ["lab", "other"]
    other.communicate()
    assert other.returncode == 0
    with claim("lab"):
        assert entry("lab").owner.pid == os.getpid()


def test_what_a_killed_process_left_counts_for_nothing_and_is_replaced(state):
    killed = held_elsewhere()
    left = publish(running(owner=entry("lab").owner))
    assert find("lab").owner.pid == killed.pid
    killed.kill()
    killed.wait()
    assert (state / "lab.lock").exists()
    assert entries() == []
    with pytest.raises(ConfigError, match="No cluster named 'lab' is up"):
        find("lab")
    with claim("lab"):
        assert not left.exists()
        assert held("lab") == registry.Entry("lab", Owner.this(), None)


@pytest.mark.parametrize("where", ["here", "before the machine was started anew"])
def test_down_removes_what_a_killed_cluster_left_but_for_its_log(where, state, capsys):
    killed = held_elsewhere()
    cluster = running(owner=entry("lab").owner)
    publish(cluster)
    data = state / "lab.data"
    data.mkdir()
    for file in (data / "appendonly.aof", state / "lab.invitation", state / "lab.log"):
        file.touch()
    assert not left("lab")
    assert not asked_to_end(cluster)
    killed.kill()
    killed.wait()
    assert not asked_to_end(cluster)
    if where != "here":
        (state / "lab.lock").write_text(json.dumps(asdict(ELSEWHERE)))
        publish(running(owner=ELSEWHERE))
    assert entries() == []
    assert main(["down", "lab"]) == 0
    assert capsys.readouterr().out == "lab had ended already; its files are removed.\n"
    assert [file.name for file in state.iterdir()] == ["lab.log"]
    with serving("lab"):  # which will start it again
        assert not asked_to_end(cluster)
    assert asked_to_end(cluster)
    assert main(["down", "lab"]) == 2
    assert "No cluster named 'lab' is up" in capsys.readouterr().err


def test_data_alone_is_removed_too_and_a_copied_entry_is_not(state, capsys):
    (state / "lab.data").mkdir(parents=True)
    assert main(["down", "lab", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"name": "lab"}
    assert list(state.iterdir()) == []
    copied = publish(running(owner=ELSEWHERE))
    assert main(["down", "lab"]) == 2
    assert "was started on alpha; run `pipespec down lab` there" in capsys.readouterr().err
    assert copied.exists()


def test_what_lives_is_not_cleared(state):
    with claim("lab"):
        (state / "lab.data").mkdir()
        assert not left("lab")
        with pytest.raises(ConfigError, match="'lab' is up already"):
            clear("lab")
        assert (state / "lab.data").exists()
    assert left("lab")
    clear("lab")
    assert not left("lab")


def test_log_is_where_the_cluster_writes_it_and_is_followed_to_its_end(state, tmp_path, capsys):
    state.mkdir()
    (state / "lab.log").write_text("an earlier cluster\n")
    log = tmp_path / "mine.log"
    with log.open("w") as stream:
        cluster = held_elsewhere(stream)
    assert report(entry("lab"), 0.0)["log"] == str(log)
    log.write_text("first\n")
    command = [sys.executable, "-m", "pipespec", "logs", "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout.readline() == "first\n"
        with log.open("a") as stream:
            stream.write("last\n")
        cluster.communicate("")
        assert reader.stdout.read() == "last\n"
    assert reader.returncode == 0
    assert main(["logs"]) == main(["logs", "lab"]) == 0, "of one that is gone"
    assert capsys.readouterr().out == "an earlier cluster\n" * 2


@pytest.mark.parametrize("where", ["a pipe", "another host"])
def test_log_that_is_not_here_is_refused_with_its_place(where, state, capsys):
    state.mkdir()
    if where == "another host":
        publish(running(owner=ELSEWHERE))
        expected = "go to alpha; run `pipespec logs lab` there"
    else:
        cluster = held_elsewhere(subprocess.PIPE)
        expected = f"that started it (process {cluster.pid})"
    assert main(["logs", "lab"]) == 2
    assert expected in capsys.readouterr().err
    if where == "a pipe":
        cluster.communicate("")


def test_one_cluster_needs_no_name_and_of_several_one_must_be_named():
    with pytest.raises(ConfigError, match="No cluster is up; start one"):
        entry(None)
    with claim("a"):
        assert entry(None).name == "a"
        with claim("b"):
            with pytest.raises(ConfigError, match="Several clusters are up: a, b; name one"):
                entry(None)
            with pytest.raises(ConfigError, match="'c' is up; these are: a, b"):
                entry("c")


def test_the_log_of_a_cluster_that_is_gone_is_named(state):
    state.mkdir()
    (state / "lab.log").write_text("it fell over")
    with pytest.raises(ConfigError, match=rf"'lab' is up; .* log is {state}/lab\.log\)\.$"):
        find("lab")


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (("", ".hidden", "a/b", "../a", "a b", "ä"), "must be letters"),
        (("n" * 300,), "has 300 characters, but may have 240"),
    ],
)
def test_a_name_that_no_file_can_have_is_refused(names, why):
    for name in names:
        with pytest.raises(ConfigError, match=why), claim(name):
            pass


def wrong(**changes: object) -> str:
    """An entry's text with other values."""
    told = {**asdict(running()), **changes}
    return json.dumps({name: value for name, value in told.items() if value is not ...})


def wrong_model(**changes: object) -> str:
    return wrong(served={**asdict(running().served), **changes})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "it is not JSON"),
        ("[]", "it must be a JSON object of name, url"),
        (wrong_model(eos=3), r"served\.eos is 3, but must be a list"),
        (wrong_model(tokenizer={}), "served.tokenizer must be"),
        (wrong(owner={"pid": 1}), "owner must be a JSON object of pid, created, machine"),
        (wrong(started=10**400), "started is 1000"),
        (wrong(overrides=...), "it must be a JSON object of name, url"),
        (wrong(url=["secret"]), "url must be a text"),
    ],
)
def test_broken_entry_is_named_and_the_others_can_be_used(text, why, state, capsys):
    state.mkdir()
    (state / "bad.json").write_bytes(text.encode(errors="surrogateescape"))
    for name in ("bad", None):
        found = rf"bad\.json' cannot be read \({why}.* remove it"
        with pytest.raises(ConfigError, match=found) as refused:
            entry(name)
        assert "secret" not in str(refused.value)
    with claim("lab"):
        assert entry("lab").name == "lab", "the others can be asked"
    for argv in (["down", "bad"], ["status"], ["generate", "--on", "bad", "--prompt", "a"]):
        assert main(argv) == 2
        assert "bad.json' cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_an_entry_that_is_no_file_is_not_waited_for(kind, state):
    state.mkdir()
    (os.mkdir if kind == "folder" else os.mkfifo)(state / "bad.lock")
    with pytest.raises(ConfigError, match=r"bad\.lock' cannot be read"):
        entry("bad")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to start a process of another user")
def test_a_process_of_another_user_is_not_signalled(state, capsys):
    state.mkdir()
    other = subprocess.Popen(["cat"], stdin=subprocess.PIPE, user=65534)
    try:
        created = since_boot(psutil.Process(other.pid))
        owner = replace(Owner.this(), pid=other.pid, created=created)
        (state / "lab.lock").write_text(json.dumps(asdict(owner)))
        assert main(["down", "lab"]) == 2
        assert "ask that user to end it" in capsys.readouterr().err
        assert other.poll() is None
    finally:
        other.communicate()
    assert other.returncode == 0  # and not by a signal


@pytest.mark.parametrize("pid", [0, -1, 2**22 + 1, 2**70, None])
def test_lock_of_no_process_or_one_that_began_at_another_time_signals_none(pid, state, capsys):
    state.mkdir()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        owner = replace(Owner.this(), pid=other.pid if pid is None else pid)
        owner = replace(owner, created=time.time() - 3600) if pid is None else owner
        (state / "bad.lock").write_text(json.dumps(asdict(owner)))
        assert owner.gone
        assert main(["down", "bad"]) == 0
        assert "bad had ended already" in capsys.readouterr().out
        other.communicate(b"\n")
    assert other.returncode == 0


def test_the_longest_name_leaves_room_for_every_ending(state):
    name = "n" * registry.LONGEST_NAME
    with claim(name):
        publish(running(name))
        assert find(name).name == name
        (state / f"{name}.log.4194304").touch()
        (state / f"{name}.invitation").touch()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="set XDG_STATE_HOME"), claim("lab"):
        pass


def test_without_xdg_the_state_lies_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert registry.folder() == tmp_path / ".local" / "state" / "pipespec"


def test_a_silent_cluster_is_reported_with_the_reason_and_without_its_password():
    silent = replace(running(), url="redis://:secret@127.0.0.1:1")
    told = report(registry.Entry("lab", silent.owner, silent), now=160.0)
    assert (told["state"], told["up_s"]) == ("no answer", 60.0)
    assert "127.0.0.1:1 refused" in told["problem"]
    assert "secret" not in json.dumps(told)
    loading = report(registry.Entry("lab", silent.owner, None), now=160.0)
    assert loading == {"name": "lab", "pid": silent.owner.pid, "state": "loading"}
    assert "secret" in json.dumps(asdict(silent))


def test_status_says_for_which_hosts_a_start_waits(capsys):
    with claim("hand") as note:
        note("b: run `x` there")
        assert main(["status"]) == 0
        found = capsys.readouterr().out
        assert " waiting " in found
        assert "hand: waiting for b: run `x` there\n" in found
        note(None)
        assert main(["status"]) == 0
        assert " loading " in capsys.readouterr().out


def test_a_host_that_has_joined_says_which_cluster_and_what_it_computes(capsys, state):
    with noting_joined("10.0.0.1:5000", "beta") as note:
        note("it computes layers 9 to 15 (rank 2)")
        said = (
            f"This host has joined the cluster of 10.0.0.1:5000 as 'beta' (process {os.getpid()}): "
            "it computes layers 9 to 15 (rank 2). `pipespec status` and `pipespec logs` on the "
            "host that started it say more."
        )
        assert main(["status"]) == 0
        assert capsys.readouterr().out == f"{said}\n"
        assert main(["status", "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)["joined"]
        assert (found["name"], found["launcher"]) == ("beta", "10.0.0.1:5000")
        for command in (["logs"], ["status", "lab"]):
            assert main(command) == 2
            assert said in capsys.readouterr().err
    assert main(["status"]) == 0
    assert capsys.readouterr().out == "No cluster is up.\n"
    with noting_joined("10.0.0.1:5000", "beta"):
        (file,) = state.glob("*.joined")
        left = json.loads(file.read_text())
        gone = {**left, "owner": {**left["owner"], "created": 0.0}}
        killed = state / "1.joined"
        killed.write_text(json.dumps(gone))
        assert len(registry.joined()) == 1
        with noting_joined("10.0.0.2:5000", "beta"):
            assert [*state.glob("*.joined")] == [file]


def test_a_host_joins_where_nothing_can_be_noted(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with noting_joined("10.0.0.1:5000", "beta") as note:
        note("it is measured")
