"""Hosts that get their weights from the hub, from the launcher and from one another.

The hosts are processes of this machine, each with a cache of its own and without the hub's token.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from gguf import GGMLQuantizationType
from huggingface_hub import constants
from transformers import AutoTokenizer

from pipespec.cli.main import main
from pipespec.client.local_cluster import running
from pipespec.cluster.decide import decide
from pipespec.config.compose import compose
from pipespec.controller.log_records import Accepted
from pipespec.core import SamplingParams
from pipespec.engine.checkpoint.parts import parts_file
from pipespec.engine.checkpoint.parts.folder import Repository
from pipespec.engine.checkpoint.parts.parts_file import PartsFile, blocks_of
from pipespec.engine.inspection.inspection import inspect
from pipespec.system.folders import resource_dir
from tests.helpers.hub import COMMIT, Hub, serving
from tests.helpers.shards import shard
from tools.rig.cluster import reference
from tools.rig.gguf_files import write

ROOT = Path(__file__).parents[2]
DEMO = resource_dir("demo")
NAMES = ("alpha", "beta", "gamma", "delta")
PROMPT, LENGTH = "Once upon a time", 8
ASK = [
    *("--json", "--prompt", PROMPT, f"decode.max_new_tokens={LENGTH}"),
    *("model.context=64", "model.dtype=float32"),
]
TOKEN = "the-token"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's target in several files."""
    return shard(DEMO / "target", tmp_path_factory.mktemp("models") / "m", 20)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    found: list[int] = AutoTokenizer.from_pretrained(DEMO / "target").encode(PROMPT)
    return found


@pytest.fixture(scope="module")
def expected(prompt: list[int]) -> list[int]:
    """What the target says, by Hugging Face."""
    (found,) = reference(DEMO / "target", [prompt], LENGTH)
    return found


@pytest.fixture(scope="module")
def known(served: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds what Transformers says of the models: a command that has to ask it
    imports it, for seconds."""
    cache = tmp_path_factory.mktemp("known")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        decide(compose([f"model.target={served}", f"model.draft={DEMO / 'draft'}"]))
    assert list(cache.glob("pipespec/fits/*"))
    return cache


@pytest.fixture
def hub(
    served: Path, known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hub]:
    hub = Hub({"org/model": served})
    shutil.copytree(known, tmp_path / "alpha")
    hub.token = TOKEN
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'tests' / 'helpers' / 'small_blocks'}:{ROOT}")
    monkeypatch.setattr(parts_file, "BLOCK_BYTES", 2**14)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "alpha"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with serving(hub) as endpoint:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        yield hub


def size_of(model: Path) -> int:
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


def hosts_file(
    folder: Path, split: list[int], *, spares: int = 0, **changes: dict[str, Any]
) -> str:
    """A stage on each of so many hosts, but for spares; alpha is this process's and has the draft
    too."""
    hosts = []
    for index, name in enumerate(NAMES[: len(split)]):
        env = {"XDG_CACHE_HOME": str(folder / name), "HF_HOME": str(folder / name), "HF_TOKEN": ""}
        host = {"name": name, "address": f"127.0.0.{index + 1}", "devices": ["cpu"], "env": env}
        hosts.append(host | changes.get(name, {}))
    hosts[0] |= {"devices": ["cpu", "cpu"], "draft": str(DEMO / "draft"), "env": {}}
    file = folder / "hosts.yaml"
    content = {"defaults": {"ssh": "local"}, "hosts": hosts, "draft": "alpha/0"}
    content |= {"split": split[: len(split) - spares], "spares": spares}
    file.write_text(yaml.safe_dump(content))
    return f"cluster={file}"


def fetched(capsys: pytest.CaptureFixture[str], *settings: str) -> dict[str, dict[str, int]]:
    assert main(["cache", "fetch", "--json", *settings]) == 0
    found: dict[str, dict[str, int]] = json.loads(capsys.readouterr().out)["hosts"]
    return found


def here(cache: Path) -> dict[str, PartsFile]:
    files = cache.glob("pipespec/weights/*/*/*.safetensors")
    return {file.name: PartsFile(file) for file in files}


def tensors(cache: Path) -> set[str]:
    return {name for file in here(cache).values() for name in file.tensors}


@pytest.mark.parametrize(
    "split",
    [
        [4, 4, 4, 4],
        *(pytest.param(split, marks=pytest.mark.long) for split in ([16], [8, 8], [4, 8, 4])),
    ],
    ids=len,
)
def test_the_hub_sends_every_byte_once_however_many_hosts(
    split: list[int], hub: Hub, served: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [hosts_file(tmp_path, split), "model.target=org/model"]
    found = fetched(capsys, *settings)
    assert found.keys() <= set(NAMES)
    assert hub.weight_bytes <= 1.02 * size_of(served)
    assert hub.tokens_at_cdn == []
    first = 0
    for name, count in zip(NAMES, split, strict=False):
        layers = {
            int(each.split(".")[2]) for each in tensors(tmp_path / name) if ".layers." in each
        }
        assert layers >= set(range(first, first + count))
        assert len(layers) < 16 or len(split) == 1
        first += count
    # The embedding is the output head too, so it is on the first and on the last host.
    for name in (NAMES[0], NAMES[len(split) - 1]):
        assert "model.embed_tokens.weight" in tensors(tmp_path / name)
    sent = hub.weight_bytes
    assert fetched(capsys, *settings) == {}
    assert hub.weight_bytes == sent


@pytest.mark.long
def test_of_hosts_that_share_a_file_system_one_fetches_for_all(
    hub: Hub, served: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """beta and gamma; a host that waited for what another one fetches would wait for good."""
    shared = {"env": {"XDG_CACHE_HOME": str(tmp_path / "beta"), "HF_TOKEN": ""}}
    settings = [
        hosts_file(tmp_path, [4, 4, 8], beta=shared, gamma=shared),
        "model.target=org/model",
    ]
    found = fetched(capsys, *settings)
    assert len(found.keys() & {"beta", "gamma"}) == 1
    assert hub.weight_bytes <= 1.02 * size_of(served)
    layers = {f"model.layers.{number}.mlp.up_proj.weight" for number in range(4, 16)}
    assert tensors(tmp_path / "beta") >= layers | {"model.embed_tokens.weight"}
    assert fetched(capsys, *settings) == {}


@pytest.mark.long
def test_a_launcher_that_is_no_host_fetches_for_a_host_with_its_cache(
    hub: Hub, served: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An entry with variables is a host of its own. In the second layout the launcher reads for it
    from beta, though nobody reads from the launcher at an address."""
    for split in ([8, 8], [12, 4]):
        setting = hosts_file(tmp_path, split)
        file = Path(setting.partition("=")[2])
        content = yaml.safe_load(file.read_text())
        content["hosts"][0]["env"] = {"OMP_NUM_THREADS": "1"}
        file.write_text(yaml.safe_dump(content))
        fetched(capsys, setting, "model.target=org/model")
        assert hub.weight_bytes <= 1.02 * size_of(served)
        assert f"model.layers.{split[0] - 1}.mlp.up_proj.weight" in tensors(tmp_path / "alpha")


@pytest.mark.long
def test_two_starts_at_once_fetch_every_byte_once(hub: Hub, served: Path, tmp_path: Path) -> None:
    """The second one waits for the first."""
    settings = [hosts_file(tmp_path, [4, 8, 4]), "model.target=org/model"]
    line = [sys.executable, "-m", "pipespec", "cache", "fetch", "--json", *settings]
    starts = [subprocess.Popen(line, stdout=-1, stderr=-1, text=True) for _ in range(2)]
    found = [start.communicate(timeout=120) for start in starts]
    assert [start.returncode for start in starts] == [0, 0], found
    assert sorted(len(json.loads(out)["hosts"]) for out, _ in found) == [0, 3]
    assert hub.weight_bytes <= 1.02 * size_of(served)


@pytest.mark.slow
def test_a_cluster_starts_with_nothing_on_its_hosts_and_decodes_the_same_text(
    hub: Hub,
    served: Path,
    expected: list[int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = [hosts_file(tmp_path, [5, 6, 5]), "model.target=org/model"]
    assert main(["generate", *ASK, *settings]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == expected
    assert hub.weight_bytes <= 1.02 * size_of(served)


@pytest.mark.slow
def test_a_launcher_that_is_killed_leaves_no_process_and_the_next_one_goes_on(
    hub: Hub, served: Path, long: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [hosts_file(tmp_path, [4, 12]), "model.target=org/model"]
    kills, headers = 0, len(list(served.glob("*.safetensors")))
    for moment in (1, 3, 5) if long else (3,):
        command = [sys.executable, "-m", "pipespec", "cache", "fetch", *settings]
        seen: list[int] = []
        with subprocess.Popen(command, stdout=-1, stderr=-1) as process:
            children: list[psutil.Process] = []

            def kill(
                moment: int = moment + (0 if kills else headers),
                seen: list[int] = seen,
                process: subprocess.Popen[bytes] = process,
                children: list[psutil.Process] = children,
            ) -> None:
                seen.append(1)
                if len(seen) == moment:
                    with suppress(psutil.NoSuchProcess):
                        children += psutil.Process(process.pid).children(recursive=True)
                        os.kill(process.pid, signal.SIGKILL)

            hub.on_range = kill
            process.communicate(timeout=60)
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive
        kills += process.returncode == -signal.SIGKILL
    assert kills
    hub.on_range = lambda: None
    fetched(capsys, *settings)
    assert "model.layers.15.mlp.up_proj.weight" in tensors(tmp_path / "beta")
    again = sum(hub.ranges.count(each) - 1 for each in set(hub.ranges))
    assert again <= 16 * kills


def in_view(folder: Path, path: Path, python: str = sys.executable, *, hide: bool = True) -> str:
    """A Python that finds a folder empty, as on a host that does not have it, or that finds it
    although its parent process does not."""
    file = folder / f"python-{'hidden' if hide else 'seen'}"
    change = f"mount -t tmpfs none {path}" if hide else f"umount {path}"
    file.write_text(
        f'#!/bin/sh\nexec unshare -m sh -c \'{change} && exec {python} "$@"\' sh "$@"\n'
    )
    file.chmod(0o755)
    return str(file)


needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root to hide a folder"
)


@needs_root
@pytest.mark.slow
def test_a_folder_that_only_the_launcher_has_is_enough(
    hub: Hub,
    served: Path,
    expected: list[int],
    long: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = Path(shutil.copytree(served, tmp_path / "only" / "model"))
    python = {"python": in_view(tmp_path, tmp_path / "only")}
    hosts = hosts_file(tmp_path, [5, 6, 5], beta=python, gamma=python)
    settings = [hosts, f"model.target={model}"]
    found = fetched(capsys, *settings)
    assert found.keys() == {"beta", "gamma"}
    own = sum(each["fetched_bytes"] for each in found.values())
    assert own < 0.9 * size_of(served)  # not alpha's layers
    assert not hub.requests
    if not long:  # a cluster that loses a host (below) decodes from such a folder
        return
    assert main(["generate", *ASK, *settings]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == expected


@needs_root
@pytest.mark.long
@pytest.mark.parametrize("named", ["the host's entry", "model.target", "a GGUF file"])
def test_a_folder_that_only_another_host_has_is_enough(
    named: str, hub: Hub, served: Path, expected: list[int], tmp_path: Path
) -> None:
    only = tmp_path / "only"
    model = Path(shutil.copytree(served, only / "model"))
    if named.startswith("a GGUF"):
        model = only / "m.gguf"
        kinds = {"tokenizer": DEMO / "target"}
        write(DEMO / "target", model, "llama", lambda _: GGMLQuantizationType.F16, **kinds)
    beta: dict[str, Any] = {"python": in_view(tmp_path, only, hide=False)}
    name = str(model)
    if named.startswith("the host's"):
        beta["target"], name = name, "/models/nowhere"
    launcher = in_view(tmp_path, only, hide=True)
    settings = [hosts_file(tmp_path, [5, 6, 5], beta=beta), f"model.target={name}"]

    def pipespec(*arguments: str) -> dict[str, Any]:
        line = [launcher, "-m", "pipespec", *arguments, "--json", *settings]
        done = subprocess.run(line, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    found = pipespec("cache", "fetch")["hosts"]
    assert found.keys() == {"alpha", "gamma"}
    size = model.stat().st_size if model.suffix else size_of(model)
    # Of a file of a few blocks, each has those that hold its own layers and not the others.
    assert all(each["fetched_bytes"] < 0.8 * size for each in found.values())
    assert not list((tmp_path / "beta").glob("pipespec/weights/*"))
    assert pipespec("cache", "fetch")["hosts"] == {}
    assert not hub.requests
    if not named.startswith("model.target"):
        return
    assert pipespec("generate", *ASK[1:])["token_ids"] == expected


@needs_root
@pytest.mark.slow
@pytest.mark.usefixtures("hub")
def test_a_folder_of_another_host_that_lacks_files_is_named(served: Path, tmp_path: Path) -> None:
    only = tmp_path / "only"
    model = Path(shutil.copytree(served, only / "model"))
    gone = sorted(model.glob("*.safetensors"))[1]
    gone.unlink()
    beta = {"python": in_view(tmp_path, only, hide=False)}
    launcher = in_view(tmp_path, only, hide=True)
    settings = [hosts_file(tmp_path, [8, 8], beta=beta), f"model.target={model}"]
    line = [launcher, "-m", "pipespec", "cache", "fetch", *settings]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr == (
        f"pipespec: beta: {model} lacks {gone.name}, so other hosts cannot get their layers from "
        "here; copy it there, or give each host its files\n"
    )


@needs_root
@pytest.mark.slow
@pytest.mark.usefixtures("hub")
def test_a_folder_that_no_host_has_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [hosts_file(tmp_path, [8, 8]), "model.target=/models/nowhere"]
    assert main(["cache", "fetch", *settings]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pipespec: there is no model folder /models/nowhere; give an existing")


def processes_of(cache: Path) -> list[psutil.Process]:
    """The processes of a host, which its cache identifies."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if each.environ().get("XDG_CACHE_HOME") == str(cache):
                found.append(each)
    return found


@needs_root
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("hub")
def test_a_spare_gets_the_layers_of_a_host_that_stays_away(served: Path, tmp_path: Path) -> None:
    """From the launcher, which alone has the folder; the text goes on."""
    model = Path(shutil.copytree(served, tmp_path / "only" / "model"))
    python, away = tmp_path / "python-beta", tmp_path / "away"
    python.write_text(
        f'#!/bin/sh\n[ -e {away} ] && exit 7\nexec {in_view(tmp_path, tmp_path / "only")} "$@"\n'
    )
    python.chmod(0o755)
    others = {"beta": {"python": str(python)}, "gamma": {"python": str(tmp_path / "python-hidden")}}
    hosts = hosts_file(tmp_path, [8, 8, 0], spares=1, **others)
    settings = ["cluster.patience_s=3", "model.context=256", "policy=root", "proposer=suffix"]
    deployment = decide(compose([hosts, f"model.target={model}", *settings]))
    with running(deployment) as (cluster, client):
        ids = client.served.encode("Once upon a time")
        assert "model.layers.9.mlp.up_proj.weight" not in tensors(tmp_path / "gamma")
        request = client.submit(ids, SamplingParams(), max_new_tokens=100)
        tokens: list[int] = []
        for event in client.events(request):
            if isinstance(event, Accepted):
                tokens += event.tokens
                if len(tokens) > 5 and not away.exists():
                    away.touch()
                    for process in processes_of(tmp_path / "beta"):
                        with suppress(psutil.NoSuchProcess):
                            process.kill()
        assert cluster.state.assignment.workers == ("alpha/0", "alpha/1", "gamma/0")
    assert "model.layers.9.mlp.up_proj.weight" in tensors(tmp_path / "gamma")
    (expected,) = reference(DEMO / "target", [ids], 100)
    assert tokens and tokens == expected[: len(tokens)]


def test_a_new_layout_moves_layers_between_hosts_and_asks_the_hub_for_nothing(
    hub: Hub, served: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetched(capsys, hosts_file(tmp_path, [4, 8, 4]), "model.target=org/model")
    sent = hub.weight_bytes
    found = fetched(capsys, hosts_file(tmp_path, [4, 4, 8]), "model.target=org/model")
    assert found.keys() == {"gamma"}  # beta has had layers 8 to 11
    assert hub.weight_bytes == sent <= 1.02 * size_of(served)
    assert "model.layers.9.mlp.up_proj.weight" in tensors(tmp_path / "gamma")


def test_a_host_that_sends_wrong_bytes_is_named_and_left_out(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetched(capsys, hosts_file(tmp_path, [4, 8, 4]), "model.target=org/model")
    wrong = "model.layers.9.mlp.up_proj.weight"
    (file,) = (each for each in here(tmp_path / "beta").values() if wrong in each.tensors)
    with file.path.open("r+b") as stream:
        stream.seek(file.ranges[wrong][0])
        stream.write(b"wrong")
    sent = hub.weight_bytes
    assert main(["cache", "fetch", hosts_file(tmp_path, [4, 4, 8]), "model.target=org/model"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("beta sends wrong bytes of the target (to gamma), so it is left out;")
    assert "gamma: fetched" in out
    assert hub.weight_bytes > sent  # that tensor is the hub's again
    own = here(tmp_path / "gamma")[file.path.name]
    for each in blocks_of([own.ranges[wrong]]):
        assert own.hash(own.place(each)) == own.digest(each) == file.digest(each)
    for each in (f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(8, 16)):
        assert each in tensors(tmp_path / "gamma")
    assert fetched(capsys, hosts_file(tmp_path, [4, 4, 8]), "model.target=org/model") == {}


@pytest.mark.parametrize(
    "why", ["a mirror that sends files to the token alone", "no hub from there"]
)
def test_the_launcher_passes_on_what_a_host_cannot_get_from_the_hub(
    why: str, hub: Hub, served: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {}
    if why.startswith("no hub"):
        env = {"XDG_CACHE_HOME": str(tmp_path / "beta"), "HF_HUB_OFFLINE": "1"}
        changes["beta"] = {"env": env}
    else:
        hub.signs = False
    fetched(capsys, hosts_file(tmp_path, [8, 8], **changes), "model.target=org/model")
    assert "model.layers.9.mlp.up_proj.weight" in tensors(tmp_path / "beta")
    assert hub.weight_bytes <= 1.02 * size_of(served)


def test_a_host_that_cannot_write_its_cache_is_named(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hub.token
    (tmp_path / "beta").touch()
    assert main(["cache", "fetch", hosts_file(tmp_path, [8, 8]), "model.target=org/model"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pipespec: beta: ")
    assert "cannot be written (Not a directory); make room or set XDG_CACHE_HOME" in line


@pytest.mark.long
def test_a_host_that_is_killed_while_it_fetches_goes_on_at_the_next_start(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed at several moments; nothing is fetched twice but what was under way."""
    settings = [hosts_file(tmp_path, [4, 12]), "model.target=org/model"]
    assert inspect("org/model").path == Repository("org/model", COMMIT).folder
    kills = 0
    for moment in (1, 3, 5):
        seen: list[int] = []

        def kill(moment: int = moment, seen: list[int] = seen) -> None:
            seen.append(1)
            if len(seen) == moment:
                for process in processes_of(tmp_path / "beta"):
                    with suppress(psutil.NoSuchProcess):
                        os.kill(process.pid, signal.SIGKILL)

        hub.on_range = kill
        code = main(["cache", "fetch", *settings])
        err = capsys.readouterr().err
        if code == 0:
            break
        kills += 1
        assert len(err.splitlines()) == 1, err
        assert err.startswith("pipespec: beta: ") and "signal 9" in err
    assert kills
    hub.on_range = lambda: None
    fetched(capsys, *settings)
    assert "model.layers.15.mlp.up_proj.weight" in tensors(tmp_path / "beta")
    again = sum(hub.ranges.count(each) - 1 for each in set(hub.ranges))
    assert again <= 8 * kills


@pytest.mark.usefixtures("hub")
def test_what_was_fetched_is_listed_and_removed(
    served: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetched(capsys, hosts_file(tmp_path, [16]), "model.target=org/model")
    assert main(["cache", "list", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["model"], entry["commit"], entry["current"]) == ("org/model", COMMIT, True)
    assert size_of(served) <= entry["whole_bytes"] <= entry["disk_bytes"]
    assert main(["cache", "prune"]) == 0  # it is in use
    assert capsys.readouterr().out == "Removed 0 folders, 0.0 MiB.\n"
    old = Path(entry["folder"]).with_name("f" * 40)
    shutil.copytree(entry["folder"], old)
    assert main(["cache", "prune"]) == 0
    assert capsys.readouterr().out.startswith("Removed 1 folder, ")
    assert not old.exists()
    assert main(["cache", "prune", "org/other"]) == 2
    assert "holds no model 'org/other'" in capsys.readouterr().err
    assert main(["cache", "prune", "org/model"]) == 0
    assert not Path(entry["folder"]).parent.exists()
