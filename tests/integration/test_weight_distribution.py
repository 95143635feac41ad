"""Hosts that get their weights from the hub, from the launcher and from one another.

The hosts are processes of this machine, each with a cache of its own and without the hub's token.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from gguf import GGMLQuantizationType
from transformers import AutoTokenizer

from pipespec.cli.main import main
from pipespec.cluster.decide import decide
from pipespec.cluster.deployment.checks import require_fit
from pipespec.config.compose import compose
from pipespec.controller.log_records import Accepted
from pipespec.core import SamplingParams
from pipespec.engine.checkpoint.parts import parts_file
from pipespec.engine.checkpoint.parts.folder import Repository
from pipespec.engine.checkpoint.parts.parts_file import PartsFile, blocks_of, ranges_of
from pipespec.engine.inspection.inspection import inspect
from pipespec.system.folders import resource_dir
from tests.helpers.hub import COMMIT, Hub, used
from tests.helpers.shards import shard
from tools.rig.cluster import reference
from tools.rig.gguf_files import write
from tools.rig.requests import running

ROOT = Path(__file__).parents[2]
DEMO = resource_dir("demo")
NAMES = ("alpha", "beta", "gamma", "delta")
PROMPT, LENGTH = "Once upon a time", 8
ASK = [
    *("--json", "--prompt", PROMPT, f"decode.max_new_tokens={LENGTH}"),
    *("model.context=64", "model.dtype=float32"),
]
TOKEN = "the-token"
UP = "model.layers.{}.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's target in several files."""
    return shard(DEMO / "target", tmp_path_factory.mktemp("models") / "m", 20)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return AutoTokenizer.from_pretrained(DEMO / "target").encode(PROMPT)


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
        require_fit(decide(compose([f"model.target={served}", f"model.draft={DEMO / 'draft'}"])))
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
    monkeypatch.setattr(parts_file, "BLOCK_BYTES", 2**15)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "alpha"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with used(hub, tmp_path / "hub", monkeypatch):
        yield hub


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


@dataclass
class Rig:
    """Hosts that lack the hub's model. Of each, `tensors` names those that it has got."""

    hub: Hub
    served: Path
    folder: Path
    capsys: pytest.CaptureFixture[str]

    def settings(self, split: list[int], **changes: dict[str, Any]) -> list[str]:
        return [hosts_file(self.folder, split, **changes), "model.target=org/model"]

    def fetched(self, *settings: str) -> dict[str, dict[str, int]]:
        """The bytes of each host that lacked some."""
        assert main(["cache", "fetch", "--json", *settings]) == 0
        return json.loads(self.capsys.readouterr().out)["hosts"]

    def files(self, host: str) -> dict[str, PartsFile]:
        files = (self.folder / host).glob("pipespec/weights/*/*/*.safetensors")
        return {file.name: PartsFile(file) for file in files}

    def tensors(self, host: str) -> set[str]:
        return {name for file in self.files(host).values() for name in tensors_in(file)}

    @property
    def size(self) -> int:
        return sum(file.stat().st_size for file in self.served.glob("*.safetensors"))

    def require_sent_once(self) -> None:
        assert self.hub.weight_bytes <= 1.02 * self.size


def tensors_in(file: PartsFile) -> set[str]:
    return {name for name, place in ranges_of(file.path).items() if not file.absent([place])}


@pytest.fixture
def rig(hub: Hub, served: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Rig:
    return Rig(hub, served, tmp_path, capsys)


@pytest.mark.parametrize(
    "split",
    [
        [4, 4, 4, 4],
        *(pytest.param(split, marks=pytest.mark.long) for split in ([16], [8, 8], [4, 8, 4])),
    ],
    ids=len,
)
def test_the_hub_sends_every_byte_once_however_many_hosts(split, rig):
    assert rig.fetched(*rig.settings(split)).keys() <= set(NAMES)
    rig.require_sent_once()
    assert rig.hub.tokens_at_cdn == []
    first = 0
    for name, layers_of in zip(NAMES, split, strict=False):
        layers = {int(each.split(".")[2]) for each in rig.tensors(name) if ".layers." in each}
        assert layers >= set(range(first, first + layers_of))
        assert len(layers) < 16 or len(split) == 1
        first += layers_of
    # The embedding is the output head too, so it is on the first and on the last host.
    for name in (NAMES[0], NAMES[len(split) - 1]):
        assert "model.embed_tokens.weight" in rig.tensors(name)
    sent = rig.hub.weight_bytes
    assert rig.fetched(*rig.settings(split)) == {}
    assert rig.hub.weight_bytes == sent


@pytest.mark.long
def test_a_launcher_that_is_no_host_fetches_for_a_host_with_its_cache(rig):
    """An entry with variables is a host of its own. In the second layout the launcher reads for it
    from beta, though nobody reads from the launcher at an address."""
    for split in ([8, 8], [12, 4]):
        setting = rig.settings(split)
        file = Path(setting[0].partition("=")[2])
        content = yaml.safe_load(file.read_text())
        content["hosts"][0]["env"] = {"OMP_NUM_THREADS": "1"}
        file.write_text(yaml.safe_dump(content))
        rig.fetched(*setting)
        rig.require_sent_once()
        assert UP.format(split[0] - 1) in rig.tensors("alpha")


@pytest.mark.long
def test_two_starts_at_once_fetch_every_byte_once(rig):
    """Each folder's fetch waits for the other's, and finds what that one has fetched."""
    line = [sys.executable, "-m", "pipespec", "cache", "fetch", "--json", *rig.settings([4, 8, 4])]
    starts = [subprocess.Popen(line, stdout=-1, stderr=-1, text=True) for _ in range(2)]
    found = [start.communicate(timeout=120) for start in starts]
    assert [start.returncode for start in starts] == [0, 0], found
    moved = [each for out, _ in found for each in json.loads(out)["hosts"].values()]
    assert sum(each["fetched_bytes"] for each in moved) <= 1.2 * rig.size, "nothing twice"
    rig.require_sent_once()


@pytest.mark.slow
def test_a_cluster_starts_with_nothing_on_its_hosts_and_decodes_the_same_text(expected, rig):
    assert main(["generate", *ASK, *rig.settings([8, 8])]) == 0
    assert json.loads(rig.capsys.readouterr().out)["token_ids"] == expected
    rig.require_sent_once()


@pytest.mark.slow
@pytest.mark.parametrize(
    "host", ["the launcher", pytest.param("beta", marks=pytest.mark.long)], ids=str
)
def test_a_process_that_is_killed_leaves_none_and_the_next_start_goes_on(host, long, rig):
    """Killed at several moments; nothing is fetched twice but what was under way."""
    assert inspect("org/model").path == Repository("org/model", COMMIT).folder
    kills, settings = 0, rig.settings([4, 12])
    for moment in (1, 3, 5) if long else (3,):
        command = [sys.executable, "-m", "pipespec", "cache", "fetch", *settings]
        with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as process:
            children: list[psutil.Process] = []

            def kill(
                process: subprocess.Popen[str] = process, children: list[psutil.Process] = children
            ) -> None:
                with suppress(psutil.NoSuchProcess):
                    children += psutil.Process(process.pid).children(recursive=True)
                    if host == "the launcher":
                        process.kill()
                kill_all(rig.folder / host)

            rig.hub.on_range = at(moment, kill)
            _, err = process.communicate(timeout=60)
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive
        if process.returncode == 0:
            break
        kills += 1
        if host == "beta":
            assert len(err.splitlines()) == 1, err
            assert err.startswith("pipespec: beta: ") and "signal 9" in err
    assert kills
    rig.hub.on_range = lambda: None
    rig.fetched(*settings)
    assert UP.format(15) in rig.tensors("beta")
    again = sum(rig.hub.ranges.count(each) - 1 for each in set(rig.hub.ranges))
    assert again <= 16 * kills


def at(moment: int, act: Callable[[], None]) -> Callable[[], None]:
    """Called again and again; acts at the moment-th time."""
    calls = count(1)
    return lambda: act() if next(calls) == moment else None


def kill_all(cache: Path) -> None:
    """Kill the processes of a host, which its cache identifies."""
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if each.environ().get("XDG_CACHE_HOME") == str(cache):
                each.kill()


def in_view(folder: Path, path: Path, *, hide: bool = True) -> str:
    """A Python that finds a folder empty, as on a host that does not have it, or that finds it
    although its parent process does not."""
    file = folder / f"python-{'hidden' if hide else 'seen'}"
    change = f"mount -t tmpfs none {path}" if hide else f"umount {path}"
    file.write_text(
        f'#!/bin/sh\nexec unshare -m sh -c \'{change} && exec {sys.executable} "$@"\' sh "$@"\n'
    )
    file.chmod(0o755)
    return str(file)


needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root to hide a folder"
)


@needs_root
@pytest.mark.slow
def test_a_folder_that_only_the_launcher_has_is_enough(rig):
    model = Path(shutil.copytree(rig.served, rig.folder / "only" / "model"))
    python = {"python": in_view(rig.folder, rig.folder / "only")}
    hosts = hosts_file(rig.folder, [5, 6, 5], beta=python, gamma=python)
    settings = [hosts, f"model.target={model}"]
    found = rig.fetched(*settings)
    assert found.keys() == {"beta", "gamma"}
    own = sum(each["fetched_bytes"] for each in found.values())
    assert own < 0.9 * rig.size  # not alpha's layers
    assert not rig.hub.requests


@needs_root
@pytest.mark.long
@pytest.mark.parametrize("named", ["the host's entry", "model.target", "a GGUF file"])
def test_a_folder_that_only_another_host_has_is_enough(named, expected, rig):
    only = rig.folder / "only"
    model = Path(shutil.copytree(rig.served, only / "model"))
    if named.startswith("a GGUF"):
        model = only / "m.gguf"
        kinds = {"tokenizer": DEMO / "target"}
        write(DEMO / "target", model, "llama", lambda _: GGMLQuantizationType.F16, **kinds)
    beta: dict[str, Any] = {"python": in_view(rig.folder, only, hide=False)}
    name = str(model)
    if named.startswith("the host's"):
        beta["target"], name = name, "/models/nowhere"
    launcher = in_view(rig.folder, only, hide=True)
    settings = [hosts_file(rig.folder, [5, 6, 5], beta=beta), f"model.target={name}"]

    def pipespec(*arguments: str) -> dict[str, Any]:
        line = [launcher, "-m", "pipespec", *arguments, "--json", *settings]
        done = subprocess.run(line, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    found = pipespec("cache", "fetch")["hosts"]
    assert found.keys() == {"alpha", "gamma"}
    size = model.stat().st_size if model.suffix else rig.size
    # Of a file of a few blocks, each has those that hold its own layers and not the others.
    assert all(each["fetched_bytes"] < 0.8 * size for each in found.values())
    assert not list((rig.folder / "beta").glob("pipespec/weights/*"))
    assert pipespec("cache", "fetch")["hosts"] == {}
    assert not rig.hub.requests
    if not named.startswith("model.target"):
        return
    assert pipespec("generate", *ASK[1:])["token_ids"] == expected


@needs_root
@pytest.mark.slow
def test_a_folder_of_another_host_that_lacks_files_is_named(rig):
    only = rig.folder / "only"
    model = Path(shutil.copytree(rig.served, only / "model"))
    gone = sorted(model.glob("*.safetensors"))[1]
    gone.unlink()
    beta = {"python": in_view(rig.folder, only, hide=False)}
    launcher = in_view(rig.folder, only, hide=True)
    settings = [hosts_file(rig.folder, [8, 8], beta=beta), f"model.target={model}"]
    line = [launcher, "-m", "pipespec", "cache", "fetch", *settings]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr == (
        f"pipespec: beta: {model} lacks {gone.name}, so other hosts cannot get their layers from "
        "here; copy it there\n"
    )
    settings = [hosts_file(rig.folder, [8, 8]), "model.target=/models/nowhere"]
    assert main(["cache", "fetch", *settings]) == 2
    (text,) = rig.capsys.readouterr().err.splitlines()
    assert text.startswith("pipespec: there is no model /models/nowhere; give a model folder")


@needs_root
@pytest.mark.long
@pytest.mark.slow
def test_a_spare_gets_the_layers_of_a_host_that_stays_away(rig):
    """From the launcher, which alone has the folder; the text goes on."""
    model = Path(shutil.copytree(rig.served, rig.folder / "only" / "model"))
    python, away = rig.folder / "python-beta", rig.folder / "away"
    hidden = in_view(rig.folder, rig.folder / "only")
    python.write_text(f'#!/bin/sh\n[ -e {away} ] && exit 7\nexec {hidden} "$@"\n')
    python.chmod(0o755)
    others = {
        "beta": {"python": str(python)},
        "gamma": {"python": str(rig.folder / "python-hidden")},
    }
    hosts = hosts_file(rig.folder, [8, 8, 0], spares=1, **others)
    settings = ["cluster.patience_s=3", "model.context=256", "policy=root", "proposer=suffix"]
    deployment = decide(compose([hosts, f"model.target={model}", *settings]))
    with running(deployment) as (cluster, client):
        ids = client.served.encode("Once upon a time")
        assert UP.format(9) not in rig.tensors("gamma")
        request = client.submit(ids, SamplingParams(), max_new_tokens=100)
        tokens: list[int] = []
        for event in client.events(request):
            if isinstance(event, Accepted):
                tokens += event.tokens
                if len(tokens) > 5 and not away.exists():
                    away.touch()
                    kill_all(rig.folder / "beta")
        assert cluster.state.assignment.workers == ("alpha/0", "alpha/1", "gamma/0")
    assert UP.format(9) in rig.tensors("gamma")
    (expected,) = reference(DEMO / "target", [ids], 100)
    assert tokens and tokens == expected[: len(tokens)]


def test_a_new_layout_moves_layers_between_hosts_and_asks_the_hub_for_nothing(rig):
    rig.fetched(*rig.settings([4, 8, 4]))
    sent = rig.hub.weight_bytes
    assert rig.fetched(*rig.settings([4, 4, 8])).keys() == {"gamma"}  # beta has had layers 8 to 11
    assert rig.hub.weight_bytes == sent <= 1.02 * rig.size
    assert UP.format(9) in rig.tensors("gamma")


def test_a_host_without_its_address_is_named(rig):
    settings = rig.settings([4, 8, 4], beta={"address": "192.0.2.1"})
    assert main(["cache", "fetch", *settings]) == 2
    assert rig.capsys.readouterr().err == (
        "pipespec: beta: this host cannot listen at 192.0.2.1 (Cannot assign requested address), "
        "where others read its weights; correct its address or interface in the hosts file\n"
    )


def test_a_host_whose_disk_has_changed_drops_that_block(rig, caplog):
    rig.fetched(*rig.settings([4, 8, 4]))
    wrong = UP.format(9)
    (file,) = (each for each in rig.files("beta").values() if wrong in tensors_in(each))
    right = file.path.read_bytes()
    with file.path.open("r+b") as stream:
        stream.seek(ranges_of(file.path)[wrong][0])
        stream.write(b"wrong")
    sent = rig.hub.weight_bytes
    assert main(["cache", "fetch", *rig.settings([4, 4, 8])]) == 0
    sentence = f"beta: {file.path} is not as it was fetched, so a block of it is dropped"
    assert caplog.messages == [sentence]
    assert "gamma: fetched" in rig.capsys.readouterr().out
    assert rig.hub.weight_bytes > sent  # that block is the hub's again
    assert wrong not in rig.tensors("beta")
    own = rig.files("gamma")[file.path.name]
    data = own.path.read_bytes()
    for each in blocks_of([ranges_of(own.path)[wrong]]):
        place = slice(*own.place(each))
        assert data[place] == right[place]
        assert sha256(data[place]).digest() == own.digest(each)
    for each in (f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(8, 16)):
        assert each in rig.tensors("gamma")
    assert rig.fetched(*rig.settings([4, 4, 8])) == {}


@pytest.mark.parametrize(
    "why",
    [
        "a mirror that sends files to the token alone",
        pytest.param("no hub from there", marks=pytest.mark.long),
    ],
)
def test_the_launcher_passes_on_what_a_host_cannot_get_from_the_hub(why, rig):
    changes = {}
    if why.startswith("no hub"):
        env = {"XDG_CACHE_HOME": str(rig.folder / "beta"), "HF_HUB_OFFLINE": "1"}
        changes["beta"] = {"env": env}
    else:
        rig.hub.signs = False
    rig.fetched(*rig.settings([8, 8], **changes))
    assert UP.format(9) in rig.tensors("beta")
    rig.require_sent_once()


def test_a_host_that_cannot_write_its_cache_is_named(rig):
    (rig.folder / "beta").touch()
    assert main(["cache", "fetch", *rig.settings([8, 8])]) == 2
    (line,) = rig.capsys.readouterr().err.splitlines()
    assert line.startswith("pipespec: beta: ")
    assert "cannot be written (Not a directory); make room or set XDG_CACHE_HOME" in line


def test_what_was_fetched_is_listed_and_removed(rig):
    rig.fetched(*rig.settings([16]))
    assert main(["cache", "list", "--json"]) == 0
    (entry,) = json.loads(rig.capsys.readouterr().out)
    assert (entry["model"], entry["commit"], entry["current"]) == ("org/model", COMMIT, True)
    assert rig.size <= entry["whole_bytes"] <= entry["disk_bytes"]
    assert main(["cache", "prune"]) == 0  # it is in use
    assert rig.capsys.readouterr().out == "Removed 0 folders, 0.0 MiB.\n"
    old = Path(entry["folder"]).with_name("f" * 40)
    shutil.copytree(entry["folder"], old)
    assert main(["cache", "prune"]) == 0
    assert rig.capsys.readouterr().out.startswith("Removed 1 folder, ")
    assert not old.exists()
    assert main(["cache", "prune", "org/other"]) == 2
    assert "holds no model 'org/other'" in rig.capsys.readouterr().err
    assert main(["cache", "prune", "org/model"]) == 0
    assert not Path(entry["folder"]).parent.exists()
