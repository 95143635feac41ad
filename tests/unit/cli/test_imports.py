"""Commands that compute nothing themselves import neither torch nor Transformers."""

import shutil
import socket
from pathlib import Path

import pytest

from pipespec.cli.main import main
from pipespec.client.registry import claim
from pipespec.system.folders import resource_dir
from tests.helpers.imports import run_commands

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
TAKEN = "lab"
TOO_MUCH = ["policy.capacity=1000000", "scheduler.max_num_seqs=4096"]

NO_REDIS = ["generate", "--prompt", "a", "controller.url=redis://127.0.0.1:1"]


@pytest.fixture(scope="module", autouse=True)
def known() -> None:
    """The first command that reads the demo pair's configs caches what Transformers makes of
    them."""
    assert main(NO_REDIS) == 2


COMMANDS = [
    (["--version"], 0),
    (["generate", "--help"], 0),
    (["status"], 0),
    (["down", "nobody"], 2),
    (["plan", "stages=2", "--tokens", "20", "policy.width=4"], 0),
    (["generate", "--prompt", "a", "policy.width=-1"], 2),
    (["bench", "--help"], 0),
    (["bench", "--policies", "root,level policy.width=-1"], 2),
    (["generate", "--prompt", "a", "model.target=/no/such/folder"], 2),
    (NO_REDIS, 2),
    (["up", "--name", "/"], 2),
    (["up", "--name", TAKEN], 2),
    (["up", *TOO_MUCH], 2),
    (["up", "--invite", "/no/such/folder"], 2),
    (["serve", *TOO_MUCH], 2),
    (["serve", "/no/such/folder"], 2),
    (["generate", "--prompt", "a", "NO_TOKENIZER"], 2),
    (["generate", "--prompt", "a", "UNKNOWN_FORMAT"], 2),
    (["generate", "--prompt", "a", "UNKNOWN_TOKENIZER"], 2),
]


def test_commands_are_quick_to_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another in a process, as what one imports is there for the next."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    target = resource_dir("demo") / "target"
    shutil.copytree(target, "NO_TOKENIZER", ignore=shutil.ignore_patterns("tokenizer*"))
    shutil.copytree(target, "UNKNOWN_FORMAT", ignore=shutil.ignore_patterns("*.safetensors"))
    tokenizer = Path(shutil.copytree(target, "UNKNOWN_TOKENIZER"), "tokenizer.json")
    tokenizer.write_text(tokenizer.read_text().replace('"type": "BPE"', '"type": "NEW"'))
    with claim(TAKEN):
        assert run_commands(*(argv for argv, _ in COMMANDS)) == [(code, []) for _, code in COMMANDS]


def test_taken_port_is_refused_before_anything_slow_is_imported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert run_commands(["serve", "--port", port]) == [(2, [])]


def test_doctor_leaves_looking_at_torch_to_its_probes(tmp_path: Path) -> None:
    hosts_file = tmp_path / "hosts.yaml"
    hosts_file.write_text("hosts: [{address: 127.0.0.1, ssh: local, devices: [cpu, cpu]}]\n")
    assert run_commands(["doctor", str(hosts_file)]) == [(0, [])]
