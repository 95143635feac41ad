"""Three hosts joined by links that can be cut, the real launcher between them.

The namespaces share this machine's file system and processes, so a worker is killed by its pid.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pipespec.client.served import ServedModel
from pipespec.system.interfaces import LOOPBACK
from tests.helpers.listening import Listening, assert_private, listening, visit
from tests.helpers.waiting import until
from tools.rig.cluster import reference
from tools.rig.driver import PROMPT
from tools.rig.testbed import Testbed, missing

if (lacking := missing()) is not None:
    pytest.skip(lacking, allow_module_level=True)

ROOT = Path(__file__).parents[2]
TOKENS = 48
AT = 8
PATIENCE = 120
# Eight stages over three hosts, the draft on the first.
DEVICES = {"a": 4, "b": 3, "c": 2}
GREEDY = [f"decode.max_new_tokens={TOKENS}", "verify=greedy"]
SAMPLED = [f"decode.max_new_tokens={TOKENS}", "verify=sample", "verify.seed=5"]


class Driver:
    """A cluster over the hosts, started from host a."""

    def __init__(self, bed: Testbed):
        self.bed = bed
        hosts_file = bed.hosts_file(devices=DEVICES, draft="a/0")
        self.process = bed.popen(
            "a",
            [
                sys.executable,
                "-m",
                "tools.rig.driver",
                f"cluster={hosts_file}",
                "decode.ignore_eos=true",
                "model.context=256",
                "cluster.stall_s=5",
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.workers = self.hear("ready")["ready"]

    def hear(self, what: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        heard = []
        for line in self.process.stdout:
            message = json.loads(line)
            if what in message:
                return message
            heard.append(line)
        raise AssertionError("the cluster ended: " + "".join(heard[-20:]))

    def say(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def ask(self, settings: list[str], at: int = 0) -> list[int] | dict[str, Any]:
        """The answer; with `at` what is known when so many tokens have come."""
        self.say({"settings": settings, "at": at})
        return self.hear("at") if at else self.hear("tokens")["tokens"]

    def go_on(self) -> list[int]:
        self.say({})
        return self.hear("tokens")["tokens"]

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(PATIENCE)


@pytest.fixture(scope="module")
def bed() -> Iterator[Testbed]:
    with Testbed(hosts=3, delay_ms=0.1, gbit=10) as bed:
        yield bed


@pytest.fixture(scope="module")
def cluster(bed) -> Iterator[Driver]:
    driver = Driver(bed)
    yield driver
    assert driver.end() == 0
    # What a killed agent left ends by itself.
    until(lambda: not any(leftovers(bed, host) for host in bed.hosts))


def leftovers(bed: Testbed, host: str, *others: bytes) -> list[int]:
    """Processes in a host that are not its sshd's: Python's, or those of the others' names."""
    found = []
    for pid in bed.processes(host):
        with suppress(FileNotFoundError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if any(name in line for name in (b"python", *others)):
                found.append(pid)
    return found


@pytest.fixture(scope="module")
def texts(cluster) -> dict[str, list[int]]:
    return {"greedy": cluster.ask(GREEDY), "sampled": cluster.ask(SAMPLED)}


def test_eight_stages_over_three_hosts_say_what_hugging_face_says(texts):
    from pipespec.cluster.deployment import decide
    from pipespec.config.compose import compose

    deployment = decide(compose(["cluster.devices=[cpu]"]))
    prompt = ServedModel.of(deployment).encode(PROMPT)
    assert texts["greedy"] == reference(Path(deployment.target.path), [prompt], TOKENS)[0]


def test_strangers_on_the_network_get_nowhere(cluster, texts, tmp_path):
    """Hosts listen at their own addresses alone, and tell a stranger nothing; the text stays."""
    bed = cluster.bed

    def ours() -> set[Listening]:
        return listening(pid for host in bed.hosts for pid in leftovers(bed, host, b"redis-server"))

    seen = ours()
    assert_private(seen, {LOOPBACK, *map(bed.address, bed.hosts)})
    reachable = {each for each in seen if each.kind == "tcp" and each.address != LOOPBACK}
    ruined = tmp_path / "ruined"
    told = visit(reachable, ruined, lambda argv: bed.run("c", argv, timeout=PATIENCE))
    said = {bytes.fromhex(word) for words in told.values() for word in words if "Err" not in word}
    # Redis refuses by name; the meeting and gloo have nothing to say.
    assert any(word.startswith(b"-NOAUTH") for word in said)
    assert all(word == b"" or word.startswith(b"-") for word in said)
    assert cluster.ask(SAMPLED) == texts["sampled"]
    assert ours() == seen, "nobody was ended, and no epoch begun"
    assert not ruined.exists()


@pytest.mark.long
def test_each_rank_is_killed_in_turn(cluster, texts):
    for worker in cluster.workers:
        found = cluster.ask(SAMPLED, AT)
        os.kill(found["pids"][worker], signal.SIGKILL)
        assert cluster.go_on() == texts["sampled"]


@pytest.mark.long
def test_a_rank_hangs(cluster, texts):
    found = cluster.ask(SAMPLED, AT)
    os.kill(found["pids"]["c/0"], signal.SIGSTOP)
    assert cluster.go_on() == texts["sampled"]


@pytest.mark.long
def test_redis_is_killed(cluster, texts):
    found = cluster.ask(SAMPLED, AT)
    os.kill(found["redis"], signal.SIGKILL)
    assert cluster.go_on() == texts["sampled"]


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "link", [pytest.param("ab", marks=LONG), "bc", pytest.param("ac", marks=LONG)]
)
def test_a_link_is_cut_until_an_epoch_has_ended(cluster, texts, link):
    cluster.ask(SAMPLED, AT)
    cluster.bed.cut(*link)
    cluster.say({})
    while "ended" not in cluster.hear("log")["line"]:
        pass
    cluster.bed.mend(*link)
    assert cluster.hear("tokens")["tokens"] == texts["sampled"]


def test_a_host_is_lost_and_comes_back(cluster, texts):
    found = cluster.ask(SAMPLED, AT)
    agent = os.getsid(found["pids"]["b/0"])
    os.kill(agent, signal.SIGKILL)
    assert cluster.go_on() == texts["sampled"]
