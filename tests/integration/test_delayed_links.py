"""Links with a real delay and bandwidth, as `benchmarks.peers.links` uses them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.peers.delayed_links import (
    LARGE,
    TCP_SETTINGS,
    LinkCheck,
    check,
    delayed_links,
    round_trip_ms,
)
from benchmarks.peers.python_engines import PeerFailed
from pipespec.config.hosts import load_hosts
from tools.rig import relay
from tools.rig.testbed import BURST, Testbed, missing

DELAY_MS = 8.0
GBIT = 0.2

if (lacking := missing(with_ssh=False)) is not None:
    pytest.skip(lacking, allow_module_level=True)


@pytest.fixture(scope="module")
def bed() -> Iterator[Testbed]:
    with delayed_links(3, DELAY_MS, GBIT) as made:
        yield made


def test_small_message_takes_the_delay_each_way_between_any_two_hosts(bed: Testbed) -> None:
    for a, b in (("a", "b"), ("b", "c"), ("c", "a")):
        assert 2 * DELAY_MS <= round_trip_ms(bed, a, b, 64) < 4 * DELAY_MS


def test_large_message_also_takes_the_time_of_its_bits(bed: Testbed) -> None:
    of_bits_ms = (LARGE - BURST) * 8 / GBIT / 1e6
    assert of_bits_ms > DELAY_MS / 2

    assert round_trip_ms(bed, "a", "b", LARGE) >= 2 * (DELAY_MS + of_bits_ms) * 0.95


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
    with pytest.raises(PeerFailed, match="took 1"):
        check(bed, megabytes=1)


def test_thread_inside_a_host_returns_to_its_own_network(bed: Testbed) -> None:
    own = Path(relay.OWN_NAMESPACE).readlink()
    with relay.entered(bed.namespaces["b"]):
        assert Path(relay.OWN_NAMESPACE).readlink() != own

    assert Path(relay.OWN_NAMESPACE).readlink() == own


def test_hosts_file_without_ssh_leaves_other_hosts_to_be_started_by_hand(bed: Testbed) -> None:
    hosts_file = load_hosts(bed.hosts_file())

    assert [host.local for host in hosts_file.hosts] == [True, False, False]
    assert hosts_file.by_hand == ("b", "c")
    assert hosts_file.num_stages == 2
