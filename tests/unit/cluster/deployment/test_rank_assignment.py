"""The plan of an epoch travels as JSON and says who holds which rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipespec.cluster.deployment.rank_assignment import RankAssignment
from pipespec.config.hosts import JOINED, Host

names = st.text(min_size=1)
layers = st.tuples(st.integers(0, 100), st.integers(1, 100)).map(lambda at: range(at[0], sum(at)))


@pytest.mark.parametrize(
    ("seal", "sealed"), [("auto", [False, True, False]), ("yes", [True] * 3), ("no", [False] * 3)]
)
def test_links_between_hosts_are_sealed_unless_the_setting_says_otherwise(seal, sealed):
    assignment = RankAssignment(("a/0", "a/1", "b/0", "b/2"), (range(3), range(3, 8), range(8, 9)))
    links = assignment.links(seal)
    assert [link.local for link in links] == [True, False, True]
    assert [link.sealed for link in links] == sealed


def test_follower_is_a_member_of_the_rank_of_its_leader():
    workers, layers = ("a/0", "a/1", "a/3"), (range(3), range(3, 8))
    assignment = RankAssignment(workers, layers, ((), ("a/2",), ("a/4",)))
    assert RankAssignment.decode(assignment.encode()) == assignment
    assert assignment.everyone == ("a/0", "a/1", "a/3", "a/2", "a/4")
    assert [assignment.members(rank) for rank in range(3)] == [
        ("a/0",),
        ("a/1", "a/2"),
        ("a/3", "a/4"),
    ]
    places = [assignment.place_of(f"a/{number}") for number in range(6)]
    assert places == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), None]


@given(
    workers=st.lists(names, unique=True, min_size=1).map(tuple), layers=st.lists(layers).map(tuple)
)
def test_decoding_inverts_encoding(workers, layers):
    host = Host("beta", "10.0.0.2", f"{JOINED}/run/socket", devices=("cuda:0", "cuda:1"))
    assignment = RankAssignment(workers, layers, joined=(host,))
    decoded = RankAssignment.decode(assignment.encode())
    assert decoded == assignment
    assert [decoded.place_of(worker) for worker in workers] == [(i, 0) for i in range(len(workers))]
