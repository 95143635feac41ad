"""Three hosts joined by links that can be cut, the real launcher between them.

The namespaces share this machine's file system and processes, so a worker is killed by its pid.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipespec.client.model_info import ModelInfo
from pipespec.system.network_interfaces import LOOPBACK
from tests.helpers.listening import Listening, assert_private, listening, visit
from tests.helpers.waiting import until
from tools.rig.cluster import reference
from tools.rig.driver import PATIENCE_S, PROMPT, Driver, leftovers
from tools.rig.testbed import Testbed, missing

if (lacking := missing()) is not None:
    pytest.skip(lacking, allow_module_level=True)

pytestmark = pytest.mark.long
TLS_ALERT = b"\x15\x03"
TOKENS = 48
AT = 8
# Eight stages over three hosts, the draft on the first.
DEVICES = {"a": 4, "b": 3, "c": 2}
ENDS = 2  # of a link
SERVER = b"-server"  # of Redis or Valkey
GREEDY = [f"decode.max_new_tokens={TOKENS}", "sampling.temperature=0"]
SAMPLED = [f"decode.max_new_tokens={TOKENS}", "sampling.temperature=1", "sampling.seed=5"]


@pytest.fixture(scope="module")
def bed() -> Iterator[Testbed]:
    with Testbed(hosts=3, delay_ms=0.1, gbit=10) as bed:
        yield bed


@pytest.fixture(scope="module")
def cluster(bed) -> Iterator[Driver]:
    driver = Driver(bed, DEVICES)
    yield driver
    assert driver.end() == 0
    # What a killed agent left ends by itself.
    until(lambda: not any(leftovers(bed, host) for host in bed.hosts))


@pytest.fixture(scope="module")
def texts(cluster) -> dict[str, list[int]]:
    return {"greedy": cluster.ask(GREEDY), "sampled": cluster.ask(SAMPLED)}


def test_eight_stages_over_three_hosts_decode_what_hugging_face_decodes(texts):
    from pipespec.cluster.decide import decide
    from pipespec.config.compose import compose

    deployment = decide(compose(["cluster.devices=[cpu]"]))
    prompt = ModelInfo.of(deployment).encode(PROMPT)
    assert texts["greedy"] == reference(Path(deployment.target.path), [prompt], TOKENS)[0]


def is_redis(pid: int) -> bool:
    line = Path(f"/proc/{pid}/cmdline").read_bytes()
    return SERVER in line or b"tls_proxy" in line


def test_unauthenticated_connections_from_the_network_are_rejected(cluster, texts, tmp_path):
    """Hosts listen at their own addresses alone, and tell a stranger nothing; the text stays."""
    bed = cluster.bed

    def ours() -> set[Listening]:
        return listening(pid for host in bed.hosts for pid in leftovers(bed, host, SERVER))

    seen = ours()
    assert_private(seen, {LOOPBACK, *map(bed.address, bed.hosts)})
    reachable = {each for each in seen if each.kind == "tcp" and each.address != LOOPBACK}
    others = {pid for host in bed.hosts for pid in leftovers(bed, host)}
    # Where the server itself cannot encrypt, a process before it does.
    of_redis = {each.port for each in reachable if is_redis(each.pid)}
    links = {each for each in reachable if each.pid in others and each.port not in of_redis}
    assert len(links) == (len(DEVICES) - 1) * ENDS, (
        "besides Redis, only what links two hosts can be reached"
    )
    ruined = tmp_path / "ruined"
    told = visit(reachable, ruined, lambda argv: bed.run("c", argv, timeout=PATIENCE_S))
    said = {bytes.fromhex(word) for words in told.values() for word in words if "Err" not in word}
    # At most an alert of TLS, from Redis; gloo has nothing to say.
    assert all(word == b"" or word.startswith(TLS_ALERT) for word in said)
    assert cluster.ask(SAMPLED) == texts["sampled"]
    assert ours() == seen, "nobody was ended, and no epoch begun"
    assert not ruined.exists()


@pytest.mark.parametrize("link", ["ab", "bc", "ac"])
def test_text_is_unchanged_when_a_link_is_cut_until_an_epoch_has_ended(cluster, texts, link):
    cluster.ask(SAMPLED, AT)
    cluster.bed.cut(*link)
    cluster.say({})
    while "ended" not in cluster.hear("log")["line"]:
        pass
    cluster.bed.mend(*link)
    assert cluster.hear("tokens")["tokens"] == texts["sampled"]
