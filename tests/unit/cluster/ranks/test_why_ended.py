"""What a worker says of an epoch that has ended."""

from dataclasses import replace

from pipespec.cluster.deployment.rank_assignment import RankAssignment
from pipespec.cluster.ranks.heartbeat import why_ended
from pipespec.config.hosts import Host
from pipespec.controller.membership import Epoch
from pipespec.errors import RankFailed


def test_link_that_ends_as_a_host_joins_or_leaves_is_not_called_lost() -> None:
    error = RankFailed("Rank 1 lost its link to rank 0: Connection closed by peer")
    before = RankAssignment(("a/0", "a/1"), (range(2),))
    after = replace(before, joined=(Host("b", "10.0.0.2"),)).encode()
    assert why_ended(error, before, Epoch(2, before.encode())) == str(error)
    assert why_ended(error, before, None) == str(error)  # Redis is gone
    assert why_ended(error, before, Epoch(2, after)) == "the ranks change their layers"
    assert why_ended(error, before, Epoch(2, "")) == "the cluster ends"
