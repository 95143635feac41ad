"""How many connections are admitted, and which addresses count as one."""

from __future__ import annotations

import pytest

from pipespec.server.http_protocol import ConnectionCount, network_of


def test_connections_are_admitted_up_to_a_number_in_all_and_of_each_address() -> None:
    connections = ConnectionCount(most=3, most_per_address=2)
    came = ["10.0.0.1", "10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert [connections.admit(each) for each in came] == [True, True, False, True, False]
    connections.remove("10.0.0.1")
    assert [connections.admit(each) for each in ("10.0.0.3", "10.0.0.1")] == [True, False]


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_ipv6_network_counts_as_one_address(host: str, network: str) -> None:
    assert network_of(host) == network
