"""Hosts that get weights from one another, over links of their own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pipespec.cluster.deployment import decide
from pipespec.cluster.weight_distribution import OnProgress, distribute_weights
from pipespec.config.compose import compose
from pipespec.engine.checkpoint_parts.parts_file import PartsFile, ranges_of
from tests.helpers.models import build
from tools.rig import testbed
from tools.rig.testbed import Testbed
from tools.rig.weight_hosts import Carried, WeightHosts

SIZES = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8}
# Headers of packets and of TLS, and what is asked.
OVERHEAD = 1.06
EVEN = (2, 2, 2, 2)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(testbed.missing() is not None, reason=str(testbed.missing())),
]


@dataclass
class Hosts:
    """Four hosts, of which a has the model in a folder that the others do not see."""

    bed: Testbed
    hosts: WeightHosts
    model: Path
    sentences: list[str] = field(default_factory=list)

    def distribute(
        self,
        *order: str,
        on_progress: OnProgress = lambda host, done, total: None,
    ) -> tuple[dict[str, int], dict[str, Carried]]:
        """Bytes that each host fetched, and what its device carried meanwhile."""
        moved: dict[str, tuple[int, int]] = {}

        def note(host: str, done: int, total: int) -> None:
            moved[host] = moved.get(host, (done, 0))[0], done
            on_progress(host, done, total)

        before = self.hosts.carried()
        settings = [self.hosts.file(EVEN, order), f"model.target={self.model}"]
        with self.hosts.launcher():
            distribute_weights(decide(compose(settings)), note, self.sentences.append)
        after = self.hosts.carried()
        fetched = {host: done - first for host, (first, done) in moved.items()}
        return fetched, {host: after[host] - before[host] for host in after}

    def hashes(self, host: str) -> dict[str, str]:
        """Those of the tensors that a host has in its cache."""
        found: dict[str, str] = {}
        for file in self.hosts.cache(host).glob("pipespec/parts/*/*/*.safetensors"):
            own = PartsFile(file)
            found |= {name: own.hash(own.ranges[name]) for name in own.tensors}
        return found


@pytest.fixture
def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hosts]:
    """Links of 1 Gbit/s. The parameter are further sizes of the model."""
    sizes = SIZES | getattr(request, "param", {})
    model = build("llama", tmp_path / "only" / "model", max_shard_size="20MB", **sizes)
    with Testbed(hosts=4, gbit=1.0, with_ssh=False) as bed:
        yield Hosts(bed, WeightHosts(bed, tmp_path, hidden=tmp_path / "only"), model)


def right_hashes(model: Path) -> dict[str, str]:
    """Those of all tensors of a folder."""
    found = {}
    for file in model.glob("*.safetensors"):
        for name, part in ranges_of(file).items():
            found[name] = PartsFile.hash(_Whole(file), part)  # type: ignore[arg-type]
    return found


@dataclass
class _Whole:
    path: Path


@pytest.mark.long
def test_layers_go_from_host_to_host_each_over_the_links_of_these_two(hosts: Hosts) -> None:
    listening: list[set[str]] = []
    once = threading.Lock()

    def look(_host: str, done: int, _total: int) -> None:
        if done > 0 and once.acquire(blocking=False):
            for each in hosts.bed.hosts:
                lines = hosts.bed.run(each, ["ss", "-Hltn"]).stdout.splitlines()
                listening.append({line.split()[3].rpartition(":")[0] for line in lines})

    fetched, carried = hosts.distribute(on_progress=look)
    assert fetched.keys() == set("bcd")
    # Each host listens at its address alone.
    assert listening == [{hosts.bed.address(each)} for each in hosts.bed.hosts]
    for each in "bcd":
        assert fetched[each] <= carried[each].received <= OVERHEAD * fetched[each]
    assert sum(fetched.values()) <= carried["a"].sent <= OVERHEAD * sum(fetched.values())
    # Layers 2 and 3 move from b to a, which has a folder, 4 and 5 from c to b, and so on.
    fetched, carried = hosts.distribute("b", "c", "d", "a")
    assert fetched.keys() == set("bcd")
    for each in "bcd":
        assert fetched[each] <= carried[each].received <= OVERHEAD * fetched[each]
    assert carried["a"].sent <= OVERHEAD * sum(fetched.values()) / 2
    assert carried["b"].sent + carried["c"].sent + carried["d"].sent >= sum(fetched.values()) / 2
    right = right_hashes(hosts.model)
    for each in "bcd":
        assert hosts.hashes(each).items() <= right.items()
    assert hosts.distribute("b", "c", "d", "a")[0] == {}
    assert hosts.sentences == []
    # Nothing listens any more.
    for each in hosts.bed.hosts:
        assert hosts.bed.run(each, ["ss", "-Hltn"]).stdout == ""


@pytest.mark.parametrize(
    "hosts", [{"vocab_size": 24000, "tie_word_embeddings": True}], indirect=True
)
def test_a_host_passes_on_what_it_is_still_getting(hosts: Hosts) -> None:
    """The first and the last stage, b and d, need the embedding, which a sends once."""
    fetched, carried = hosts.distribute("b", "c", "a", "d")
    size = sum(file.stat().st_size for file in hosts.model.glob("*.safetensors"))
    assert carried["a"].sent <= OVERHEAD * size < sum(fetched.values())
    embedding = 24000 * 512 * 4
    assert carried["b"].sent + carried["d"].sent >= embedding
    names = {"model.embed_tokens.weight"}
    right = right_hashes(hosts.model)
    for each in "bd":
        assert names <= hosts.hashes(each).keys()
        assert hosts.hashes(each).items() <= right.items()


@pytest.mark.long
def test_bytes_pass_through_the_launcher_where_a_link_is_cut(hosts: Hosts) -> None:
    hosts.distribute()
    hosts.bed.cut("b", "c")
    fetched, carried = hosts.distribute("a", "c", "b", "d")
    assert fetched.keys() == set("bc")
    pairs = {("b", "c"), ("c", "b")}
    for sentence in hosts.sentences:
        reader, source = sentence[0], sentence.split()[5]
        assert (reader, source) in pairs
        pairs.discard((reader, source))
        assert sentence == (
            f"{reader} cannot read weights from {source} at {hosts.bed.address(source)} (timed "
            "out), so they pass through the launcher; let the firewall admit TCP between the hosts."
        )
    assert len(pairs) < 2
    # What the other one has came through pipes here, not over this link.
    assert min(carried["b"].received, carried["c"].received) < max(fetched.values()) * 0.8
    right = right_hashes(hosts.model)
    for each in "bcd":
        assert hosts.hashes(each).items() <= right.items()
