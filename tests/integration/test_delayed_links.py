"""Links with a real delay and bandwidth, as `benchmarks.peers.links` uses them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmarks.peers.delayed_links import (
    TCP_SETTINGS,
    LinkCheck,
    check,
    delayed_links,
    round_trip_ms,
)
from benchmarks.peers.link_engines import pipespec
from benchmarks.peers.python_engines import Job, PeerFailed
from pipespec.config.hosts import load_hosts
from pipespec.extras.bench.dataset import Sample
from pipespec.system.folders import resource_dir
from tools.rig import cluster, relay
from tools.rig.testbed import Testbed, missing

DELAY_MS = 8.0
GBIT = 0.2
PROMPT = "Once upon a time there was a king who had three sons and"

if (lacking := missing()) is not None:
    pytest.skip(lacking, allow_module_level=True)


@pytest.fixture(scope="module")
def bed() -> Iterator[Testbed]:
    with delayed_links(3, DELAY_MS, GBIT) as made:
        yield made


def test_links_without_delay_still_carry_packets() -> None:
    with delayed_links(2, 0.0, GBIT) as near:
        assert round_trip_ms(near, "a", "b", 64) < DELAY_MS


def test_every_host_has_the_stated_settings_of_tcp(bed: Testbed) -> None:
    for host in bed.hosts:
        for name, value in TCP_SETTINGS.items():
            read = bed.run(host, ["cat", f"/proc/sys/net/ipv4/{name}"])
            assert read.stdout.split() == value.split()


def test_check_refuses_links_that_are_slower_than_stated(
    bed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = check(bed, megabytes=1)
    assert 2 * DELAY_MS <= found.ping_ms <= found.small_ms + 1
    assert found.large_ms >= found.least_large_ms * 0.95
    assert isinstance(found, LinkCheck)

    monkeypatch.setattr(bed, "delay_ms", DELAY_MS - 4)
    with pytest.raises(PeerFailed, match=rf"links of {DELAY_MS - 4:g} ms took "):
        check(bed, megabytes=1)


def test_thread_inside_a_host_returns_to_its_own_network(bed: Testbed) -> None:
    own = Path(relay.OWN_NAMESPACE).readlink()
    with relay.entered(bed.namespaces["b"]):
        assert Path(relay.OWN_NAMESPACE).readlink() != own

    assert Path(relay.OWN_NAMESPACE).readlink() == own


def test_relay_goes_before_every_other_process(bed: Testbed) -> None:
    assert os.getpriority(os.PRIO_PROCESS, bed.relay_pid) == relay.PRIORITY
    autogroup = Path(f"/proc/{bed.relay_pid}/autogroup")
    if autogroup.exists():  # sessions are weighed, and priorities only within one
        assert autogroup.read_text().split()[-1] == str(relay.PRIORITY)


def test_hosts_file_without_ssh_leaves_other_hosts_to_be_started_by_hand(bed: Testbed) -> None:
    hosts_file = load_hosts(bed.hosts_file())

    assert [host.local for host in hosts_file.hosts] == [True, False, False]
    assert hosts_file.by_hand == ("b", "c")
    assert hosts_file.num_stages == 2


@pytest.mark.long
def test_pipespec_over_delayed_links_gives_the_tokens_of_hugging_face(bed: Testbed) -> None:
    target = resource_dir("demo") / "target"
    tokenizer = AutoTokenizer.from_pretrained(target)
    samples = [Sample(str(index), "none", PROMPT) for index in range(2)]
    prompts = [tokenizer.encode(sample.prompt) for sample in samples]
    tokens = 12
    job = Job(target, resource_dir("demo") / "draft", samples, prompts, 64, tokens, [0], "float32")

    run = pipespec(bed, job, ["cluster.threads=1", "cluster.groups=2"])

    (expected,) = cluster.reference(target, prompts[:1], tokens)
    assert [answer.tokens for answer in run.answers] == [expected, expected]
    # A token that was not drafted passes all links: three hops, the last with the verdict.
    assert run.answers[1].first_ms >= 3 * DELAY_MS
    assert run.tokens_per_step is not None and run.tokens_per_step > 0
    assert all(len(bed.processes(host)) == 0 for host in bed.hosts)
