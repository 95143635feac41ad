"""A host joins a cluster of another one and leaves it, in the middle of requests.

Two network namespaces; host b does not see the models, and has a cache of its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipespec.client import registry
from pipespec.client.sync_client import Client, connected
from pipespec.config.compose import compose
from pipespec.controller.cluster_status import ClusterStatus, read_status
from pipespec.controller.log_records import Accepted
from pipespec.engine.parts.parts_file import PartsFile
from pipespec.system.folders import resource_dir
from tests.helpers.waiting import until
from tools.rig import relay
from tools.rig.cluster import reference
from tools.rig.testbed import Testbed, missing

if (lacking := missing(with_ssh=False)) is not None:
    pytest.skip(lacking, allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
PIPESPEC = (sys.executable, "-m", "pipespec")
ROOT = Path(__file__).parents[2]
PROMPT = "Once upon a time there was a king who had three sons and"
# Of requests that are open at once, so that one is in its middle whenever an epoch begins.
LENGTHS = (40, 56, 72)
GREEDY = compose(["sampling.temperature=0"]).sampling.params(0)
PATIENCE_S = 180.0


class Command:
    """`pipespec ...` on a host, whose lines are kept."""

    def __init__(self, bed: Testbed, host: str, *arguments: str, before: tuple[str, ...] = ()):
        self.lines: list[str] = []
        folder = bed.folder / f"home-{host}"
        self.process = bed.popen(
            host,
            [*before, *PIPESPEC, *arguments],
            env={
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
                **{f"XDG_{kind}_HOME": str(folder / kind) for kind in ("STATE", "CACHE")},
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def has_said(self, *words: str) -> bool:
        """Whether a line has all of these. Fails once it has ended without."""
        found = any(all(word in line for word in words) for line in self.lines)
        assert found or self.process.poll() is None, self.lines
        return found

    def end(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Its exit code, once it has ended and all lines are there."""
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code


class Cluster:
    """A cluster of host a, which host b may join."""

    def __init__(self, bed: Testbed, models: Path) -> None:
        self.bed, self.models = bed, models
        self.up = Command(
            bed,
            "a",
            "up",
            "--invite",
            "--at",
            bed.address("a"),
            f"model.target={models / 'target'}",
            f"model.draft={models / 'draft'}",
            "cluster.stages=2",
            "cluster.devices=[cpu]",
            "cluster.patience_s=3",
            "model.context=256",
        )
        until(lambda: self.up.has_said("pipespec join p"), PATIENCE_S)

    def token(self) -> str:
        """A new token."""
        command = Command(self.bed, "a", "invite", "--json")
        assert command.wait() == 0, command.lines
        return str(json.loads(command.lines[0])["token"])

    def join(self, token: str) -> Command:
        """Host b joins; the models are hidden from it."""
        hidden = ("unshare", "-m", "sh", "-c", f'mount -t tmpfs none {self.models} && exec "$@"')
        arguments = ("join", token, "--name", "b", "--devices", "cpu")
        return Command(self.bed, "b", *arguments, before=(*hidden, "sh"))

    def fetched(self) -> set[str]:
        """The tensors of the target that host b has."""
        found: set[str] = set()
        cache = self.bed.folder / "home-b" / "CACHE"
        for file in cache.glob("pipespec/parts/*target*/*/*.safetensors"):
            found |= {name for name in PartsFile(file).hashes if name}
        return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    models = tmp_path_factory.mktemp("models")
    for name in ("target", "draft"):
        shutil.copytree(resource_dir("demo") / name, models / name)
    with Testbed(hosts=2, with_ssh=False) as bed:
        cluster = Cluster(bed, models)
        yield cluster
        assert cluster.up.end() == 0, cluster.up.lines


@pytest.fixture(scope="module")
def running(cluster: Cluster) -> registry.RunningCluster:
    """How the cluster is reached from host a."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(cluster.bed.folder / "home-a" / "STATE"))
        return registry.find("default")


@pytest.fixture(scope="module")
def client(cluster: Cluster, running: registry.RunningCluster) -> Iterator[Client]:
    """A client on host a, where this process is meanwhile."""
    with relay.entered(cluster.bed.namespaces["a"]), connected(running, PATIENCE_S) as client:
        yield client


@pytest.fixture(scope="module")
def expected(client: Client, cluster: Cluster) -> list[int]:
    prompt = client.served.encode(PROMPT)
    return reference(cluster.models / "target", [prompt], max(LENGTHS))[0]


def ask_until(client: Client, expected: list[int], done: Callable[[], bool]) -> int:
    """Ask with several requests at once until something is `done`, and to their ends; how many
    there were. Every text is what Hugging Face decodes."""
    prompt = client.served.encode(PROMPT)
    count = 0
    waiting: deque[tuple[int, int]] = deque()
    while (over := done()) is False or waiting:
        while len(waiting) < len(LENGTHS) and not over:
            length = LENGTHS[count % len(LENGTHS)]
            waiting.append((client.submit(prompt, GREEDY, max_new_tokens=length), length))
            count += 1
        if waiting:
            number, length = waiting.popleft()
            tokens: list[int] = []
            for event in client.events(number):
                if isinstance(event, Accepted):
                    assert event.base == len(prompt) + len(tokens)
                    tokens += event.tokens
            assert tokens == expected[:length]
    return count


def status_of(running: registry.RunningCluster) -> ClusterStatus:
    status = read_status(running.url, running.namespace)
    assert status is not None
    return status


def test_texts_stay_the_same_while_a_host_joins_and_leaves(
    cluster: Cluster, client: Client, running: registry.RunningCluster, expected: list[int]
) -> None:
    token = cluster.token()
    host = cluster.join(token)
    until(lambda: host.has_said("It gets the weights"), PATIENCE_S)
    assert ask_until(client, expected, lambda: host.has_said("It computes layer")) > 0
    assert status_of(running).epoch == 2
    # It has its own layers, and the one with which it was measured, and not those of others.
    (line,) = [line for line in host.lines if line.startswith("It computes layer")]
    first, last = (int(word) for word in re.findall(r"\d+", line.partition("(")[0] * 2)[:2])
    layers = {int(name.split(".")[2]) for name in cluster.fetched() if ".layers." in name}
    assert set(range(first, last + 1)) <= layers
    assert len(layers) <= last + 1 - first + 1
    # The token was used.
    again = cluster.join(token)
    assert again.wait() == 1
    assert "this invitation was used already" in again.lines[-1]

    host.process.send_signal(signal.SIGINT)
    assert ask_until(client, expected, lambda: host.has_said("has left the cluster")) > 0
    assert host.wait() == 0
    status = status_of(running)
    assert (status.epoch, status.joined, status.faults) == (3, 3, {})


@pytest.mark.long
def test_texts_stay_the_same_when_a_host_that_has_joined_is_killed(
    cluster: Cluster, client: Client, running: registry.RunningCluster, expected: list[int]
) -> None:
    host = cluster.join(cluster.token())
    until(lambda: host.has_said("It computes layer"), PATIENCE_S)
    epoch = status_of(running).epoch

    def without_it() -> bool:
        assigned = status_of(running).assignment or ""
        return '"b/0"' not in assigned.partition('"joined"')[0]

    host.process.kill()
    assert ask_until(client, expected, without_it) > 0
    assert status_of(running).epoch > epoch
    # Another one may take its place, with the weights that it has got.
    before = cluster.fetched()
    host = cluster.join(cluster.token())
    assert ask_until(client, expected, lambda: host.has_said("It computes layer")) > 0
    assert cluster.fetched() >= before
    assert host.end() == 0
