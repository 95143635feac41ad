"""A box whose members somebody starts by hand, with launch/torchrun.sh."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pipespec import cards
from pipespec.control.members import Membership
from pipespec.resources import resource_dir
from tests import cluster

ROOT = Path(__file__).parents[2]
HOSTS = """
name: hand
hosts:
  - {name: here, address: 127.0.0.1, ssh: local, devices: [cpu, cpu]}
  - {name: there, address: 127.0.0.1, ssh: none, devices: [cpu, cpu]}
"""
PROMPT = "Once upon a time there was a king who had three sons and"
NUM_TOKENS = 32
LENGTH = (f"decode.max_new_tokens={NUM_TOKENS}",)
PATIENCE = 120


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


@pytest.fixture
def environment(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def pipespec(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pipespec", *arguments]


def answer(*arguments: str) -> list[int]:
    done = subprocess.run(
        pipespec("generate", "--json", "--prompt", PROMPT, *LENGTH, *arguments),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["token_ids"]


@pytest.mark.long
def test_a_box_joins_by_hand_and_is_started_again_by_torchrun(environment):
    hosts = environment / "hosts.yaml"
    hosts.write_text(HOSTS)
    invitation = cards.folder() / "hand.invitation"
    log = (environment / "log").open("wb")
    up = subprocess.Popen(pipespec("up", f"cluster={hosts}"), stdout=log, stderr=log)
    try:
        until(lambda: invitation.exists() and invitation.stat().st_size)
        assert invitation.stat().st_mode & 0o077 == 0
        there = subprocess.Popen(
            [str(ROOT / "launch" / "torchrun.sh"), str(hosts), "there", str(invitation)],
            stdout=log,
            stderr=log,
        )
        try:
            until(lambda: (entry := cards.held("hand")) is not None and entry.card)
            before = answer("--on", "hand")
            assert before == answer("cluster.stages=3")
            card = cards.find("hand")
            with Membership(card.url, card.namespace) as shared:
                pid = shared.alive(["there/1"])["there/1"]
                os.kill(pid, signal.SIGKILL)
                assert answer("--on", "hand") == before
                assert shared.alive(["there/1"])["there/1"] != pid
        finally:
            there.terminate()
            there.wait(PATIENCE)
    finally:
        up.send_signal(signal.SIGINT)
        assert up.wait(PATIENCE) == 0
    assert not invitation.exists()


def test_an_unknown_box_and_a_file_that_is_no_invitation_are_refused(environment):
    hosts = environment / "hosts.yaml"
    hosts.write_text(HOSTS)
    other = environment / "other.json"
    other.write_text('{"password": "s3cret"}')

    def complaint(*arguments: str) -> str:
        run = subprocess.run(
            [sys.executable, "-m", "pipespec.join", *arguments], capture_output=True, text=True
        )
        assert run.returncode == 2
        return run.stderr

    assert "has no box 'elsewhere'; it has here, there" in complaint(
        str(hosts), "elsewhere", str(other)
    )
    said = complaint(str(hosts), "there", str(other))
    assert "is no invitation" in said
    assert "s3cret" not in said


def test_launch_shows_what_the_members_say_until_ctrl_c(environment):
    hosts = environment / "hosts.yaml"
    hosts.write_text(HOSTS.replace("ssh: none, devices: [cpu, cpu]", "ssh: local, devices: [cpu]"))
    folder = resource_dir("demo") / "target"
    prompt = AutoTokenizer.from_pretrained(folder).encode(PROMPT)
    (expected,) = cluster.reference(folder, [prompt], NUM_TOKENS)
    log = environment / "log"
    with log.open("wb") as file:
        launched = subprocess.Popen(pipespec("launch", str(hosts)), stdout=file, stderr=file)
    try:
        until(lambda: (entry := cards.held("hand")) is not None and entry.card)
        assert answer("--on", "hand") == expected
    finally:
        launched.send_signal(signal.SIGINT)
        assert launched.wait(PATIENCE) == 0
    said = log.read_text()
    assert "here/1 rank 1: epoch 1" in said
    assert "there/0 rank 2: epoch 1" in said
    assert cards.held("hand") is None
