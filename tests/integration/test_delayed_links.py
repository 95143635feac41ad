"""Links with a real delay and bandwidth, as `benchmarks.peers.links` uses them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers import AutoTokenizer

from benchmarks.peers.delayed_links import (
    TCP_SETTINGS,
    check,
    delayed_links,
)
from benchmarks.peers.link_engines import pipespec
from benchmarks.peers.python_engines import Job, PeerFailed
from pipespec.extras.bench.dataset import Sample
from pipespec.system.folders import resource_dir
from tools.rig import cluster
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


def test_check_refuses_links_that_are_slower_than_stated(
    bed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    for host in bed.hosts:
        for name, value in TCP_SETTINGS.items():
            read = bed.run(host, ["cat", f"/proc/sys/net/ipv4/{name}"])
            assert read.stdout.split() == value.split(), "what the pages state"
    found = check(bed, megabytes=1)
    assert 2 * DELAY_MS <= found.ping_ms <= found.small_ms + 1
    assert found.large_ms >= found.least_large_ms * 0.95
    monkeypatch.setattr(bed, "delay_ms", DELAY_MS - 4)
    with pytest.raises(PeerFailed, match=rf"links of {DELAY_MS - 4:g} ms took "):
        check(bed, megabytes=1)


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
