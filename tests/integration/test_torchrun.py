"""Hosts whose workers launch/torchrun.sh starts: by hand, under Slurm or in pods of Kubernetes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx2
import pytest
import yaml
from transformers import AutoTokenizer

from pipespec.cli.main import main
from pipespec.client import registry
from pipespec.controller.membership import Membership
from pipespec.controller.tls_proxy import free_port
from pipespec.system.folders import resource_dir
from pipespec.system.network_interfaces import LOOPBACK
from tests.helpers.listening import assert_private, family, watched
from tests.helpers.sandbox import Sandbox
from tests.helpers.waiting import until
from tools.rig import cluster

ROOT = Path(__file__).parents[2]
HOSTS = """
name: hand
hosts:
  - {name: here, address: 127.0.0.1, ssh: local, devices: [cpu, cpu]}
  - {name: there, address: 127.0.0.2, ssh: none, devices: [cpu, cpu]}
"""
PROMPT = "Once upon a time there was a king who had three sons and"
NUM_TOKENS = 32
LENGTH = (f"decode.max_new_tokens={NUM_TOKENS}",)
PATIENCE = 120
# Programs of Slurm, pretended: a node is an address of this machine, and a step a process here.
SLURM = {
    "scontrol": "echo $3 | tr , '\\n'",
    "srun": """
while [[ $1 == --* ]]; do [[ $1 == --nodelist=* ]] && nodes=${1#*=}; shift; done
trap 'kill $(jobs -p)' TERM
for node in ${nodes//,/ }; do SLURMD_NODENAME=$node "$@" & done
wait""",
}


def expected() -> list[int]:
    """What the target says by itself."""
    folder = resource_dir("demo") / "target"
    prompt = AutoTokenizer.from_pretrained(folder).encode(PROMPT)
    return cluster.reference(folder, [prompt], NUM_TOKENS)[0]


@pytest.fixture
def environment(tmp_path, monkeypatch):
    (tmp_path / "hosts.yaml").write_text(HOSTS)
    (tmp_path / "temporary").mkdir()  # what torchrun leaves would lie here
    for name, value in {
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "PYTHONPATH": str(ROOT),
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path / "temporary"),
    }.items():
        monkeypatch.setenv(name, value)
    return tmp_path


@contextmanager
def running(argv: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command in the foreground, ended with Ctrl-C."""
    with log.open("ab") as file:
        process = subprocess.Popen(argv, stdout=file, stderr=file)
    try:
        yield process
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE)
    finally:
        for pid in family(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def pipespec(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pipespec", *arguments]


def manual_host(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """What torchrun starts on a host."""
    return subprocess.run(
        [sys.executable, "-m", "pipespec.cluster.join.manual_host", *arguments],
        env={**os.environ, "LOCAL_RANK": "0"},
        capture_output=True,
        text=True,
    )


def answer(capfd: pytest.CaptureFixture[str], name: str) -> list[int]:
    """What the cluster of that name says to a command of this process."""
    capfd.readouterr()
    assert main(["generate", "--on", name, "--json", "--prompt", PROMPT, *LENGTH]) == 0
    return json.loads(capfd.readouterr().out)["token_ids"]


@pytest.mark.long
def test_a_host_joins_by_hand_and_is_started_again_by_torchrun(environment, capfd):
    hosts_file = environment / "hosts.yaml"
    invitation = registry.folder() / "hand.invitation"
    log = environment / "log"
    with running(pipespec("up", f"cluster={hosts_file}"), log) as up:
        until(lambda: invitation.exists() and invitation.stat().st_size)
        assert invitation.stat().st_mode & 0o077 == 0
        assert main(["status", "hand"]) == 0
        waits_for = f"there: run `launch/torchrun.sh {hosts_file} HOST {invitation}` there"
        assert f"hand: waiting for {waits_for}\n" in capfd.readouterr().out
        script = [str(ROOT / "launch" / "torchrun.sh"), str(hosts_file), "there", str(invitation)]
        with running(script, log) as there:
            with watched(lambda: [*family(up.pid), *family(there.pid)]) as seen:
                until(lambda: (entry := registry.held("hand")) is not None and entry.cluster)
                before = answer(capfd, "hand")
            assert before == expected()
            assert {each.pid for each in seen} & set(family(there.pid))
            assert_private(seen, {LOOPBACK})
            found = registry.find("hand")
            with Membership(found.url, found.namespace) as shared:
                pid = shared.alive(["there/1"])["there/1"]
                os.kill(pid, signal.SIGKILL)
                assert answer(capfd, "hand") == before
                assert shared.alive(["there/1"])["there/1"] != pid
    assert up.returncode == 0
    assert not invitation.exists()
    left = [path.name for path in (environment / "temporary").iterdir()]
    assert not [name for name in left if name.startswith(("pipespec", "torchelastic"))]


@pytest.mark.long
def test_start_that_fails_on_a_host_started_by_hand_ends_the_command_with_its_reason(environment):
    hosts_file = environment / "hosts.yaml"
    invitation = registry.folder() / "hand.invitation"
    log = environment / "log"
    with running(pipespec("up", f"cluster={hosts_file}"), log) as up:
        until(lambda: invitation.exists() and invitation.stat().st_size)
        asked = json.loads(invitation.read_text())
        # The host lacks the model.
        asked["overrides"] = [*asked["overrides"], f"model.target={environment / 'missing'}"]
        of_another_model = environment / "of_another_model.invitation"
        of_another_model.write_text(json.dumps(asked))
        of_another_model.chmod(0o600)
        there = manual_host(hosts_file, "there", of_another_model)
        failed_at = time.monotonic()
        assert there.returncode != 0
        assert up.wait(PATIENCE) != 0
        assert time.monotonic() - failed_at < 3 * max(
            1.0, os.getloadavg()[0] / (os.cpu_count() or 1)
        )
    said = log.read_text()
    assert f"there/0: {there.stderr.removeprefix('pipespec: ').strip()[:40]}" in said
    assert "missing" in said
    assert not invitation.exists()


def test_an_unknown_host_and_a_file_that_is_no_invitation_are_refused(environment):
    hosts_file = environment / "hosts.yaml"
    other = environment / "other.json"
    other.write_text('{"password": "s3cret"}')

    refused = manual_host(hosts_file, "elsewhere", other)
    assert refused.returncode == 2
    assert "has no host 'elsewhere'; it has here, there" in refused.stderr
    said = manual_host(hosts_file, "there", other).stderr
    assert "is no invitation" in said
    assert "s3cret" not in said


@pytest.mark.long
@pytest.mark.parametrize(
    ("setting", "said"), [("policy=best_first", ""), ("model.target=missing", "missing")]
)
def test_slurm_script_runs_a_command_and_leaves_nothing(tmp_path, setting, said):
    for name, text in SLURM.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    folder = tmp_path / "job"
    with Sandbox(tmp_path) as place:
        job = place.environment | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "127.0.0.1,127.0.0.2",
            "SLURM_SUBMIT_DIR": str(ROOT),
            "PIPESPEC_FOLDER": str(folder),
            "PIPESPEC_DEVICES": "cpu,cpu",
        }
        ask = pipespec("generate", "--on", "slurm", "--json", "--prompt", PROMPT, *LENGTH)
        script = ["bash", ROOT / "launch" / "slurm.sbatch"]
        ran = place.start(setting, "--", *ask, program=script, environment=job)
        out, err = ran.communicate(timeout=PATIENCE)
        assert said in err and bool(said) == bool(ran.returncode), err
        answers = [json.loads(line)["token_ids"] for line in out.splitlines() if line[0] == "{"]
        assert answers == ([] if said else [expected()])
        assert folder.exists() == bool(said), "its log says why"
        assert not list(folder.rglob("*.invitation")) and place.processes() == []


@pytest.mark.long
def test_commands_of_the_kubernetes_pods_serve_a_model(tmp_path):
    port = free_port([LOOPBACK])
    (tmp_path / "api-key").write_text("a-key")
    here = {
        "/shared": str(tmp_path),
        "/etc/pipespec": str(tmp_path),
        "/run/secrets/pipespec": str(tmp_path),
        "$(POD)": "pipespec-worker-0",
        "pipespec-head-0.pipespec-hosts": LOOPBACK,
        "pipespec-worker-0.pipespec-hosts": "127.0.0.2",
        "=8000": f"={port}",
        "=0.0.0.0": f"={LOOPBACK}",
    }

    def local(text: str) -> str:
        for there, place in here.items():
            text = text.replace(there, place)
        return text

    folder = ROOT / "launch" / "kubernetes"
    (tmp_path / "hosts.yaml").write_text(local((folder / "hosts.yaml").read_text()))
    programs = {"pipespec": pipespec(), "python": [sys.executable]}
    with Sandbox(tmp_path) as place:
        for name in ("workers", "head"):
            (pod,) = yaml.safe_load((folder / f"{name}.yaml").read_text())["spec"]["template"][
                "spec"
            ]["containers"]
            program, *arguments = map(local, pod["command"])
            place.start(*arguments, program=programs[program])
        with httpx2.Client(base_url=f"http://{LOOPBACK}:{port}", timeout=PATIENCE) as http:

            def ready() -> bool:
                with suppress(httpx2.ConnectError):
                    return http.get("/health").status_code == 200
                return False

            until(ready, PATIENCE)
            body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
            key = {"Authorization": "Bearer a-key"}
            said = http.post("/v1/completions", json=body | {"return_token_ids": True}, headers=key)
        assert said.json()["choices"][0]["token_ids"] == expected()
