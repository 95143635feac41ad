import pytest

from pipespec.server.http_protocol import ConnectionTable, network_of


class FakeConnection:
    """A connection that records its eviction."""

    def __init__(self) -> None:
        self.evicted = False

    def evict(self) -> None:
        self.evicted = True


def test_longest_evictable_connection_is_closed_for_a_new_one() -> None:
    connections = ConnectionTable(most=3, most_per_address=3)
    first, second, third, fourth, fifth = (FakeConnection() for _ in range(5))
    for each in (first, second, third):
        assert connections.admit(each, "10.0.0.1")
    connections.mark_busy(first)
    assert connections.admit(fourth, "10.0.0.2")
    assert [each.evicted for each in (first, second, third)] == [False, True, False]
    connections.mark_evictable(first)
    assert connections.admit(fifth, "10.0.0.3")
    assert (first.evicted, third.evicted) == (False, True)


def test_busy_connections_are_not_evicted() -> None:
    connections = ConnectionTable(most=2, most_per_address=2)
    used = [FakeConnection(), FakeConnection()]
    for each in used:
        assert connections.admit(each, "10.0.0.1")
        connections.mark_busy(each)
    late = FakeConnection()
    assert not connections.admit(late, "10.0.0.2")
    assert not any(each.evicted for each in used)
    connections.remove(late)
    connections.remove(used[0])
    assert connections.admit(late, "10.0.0.2")


def test_one_address_evicts_only_its_own_connections() -> None:
    connections = ConnectionTable(most=4, most_per_address=2)
    other = FakeConnection()
    assert connections.admit(other, "10.0.0.9")
    greedy = [FakeConnection() for _ in range(5)]
    for each in greedy:
        assert connections.admit(each, "10.0.0.1")
    assert [each.evicted for each in greedy] == [True, True, True, False, False]
    assert not other.evicted


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
