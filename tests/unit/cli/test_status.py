"""What `pipespec status` makes of what a cluster says."""

from __future__ import annotations

from pipespec.cli.status import processes, versions
from pipespec.cluster.deployment.rank_assignment import RankAssignment
from pipespec.controller.cluster_status import ClusterStatus


def test_every_process_is_listed_with_what_it_does() -> None:
    assigned = RankAssignment(
        ("a/0", "b/0", "b/1", "c/0", "d/0"),
        (range(4), range(4, 6), range(6, 7), range(7, 8)),
        followers=((), ("b/2",), (), (), ()),
        others=("e/0", "f/0"),
    )
    status = ClusterStatus(
        *(2, 3, 1, 0, 0, None),
        counts={"active_ns/1": 100, "busy_ns/1": 40, "receive_ns/1": 50},
        computing={1: {"version": "1", "attention": "sdpa"}, 2: {"version": "2"}},
        pids={0: 10, 1: 11, 2: 12},
        followers={"b/2": 13},
    )
    seen = RankAssignment.decode(assigned.encode())
    found = processes(status, seen, {"a/0", "b/0", "b/2", "c/0", "e/0"}, "auto")
    names = ("host", "rank", "pid", "state", "link", "layers", "attention")
    assert [tuple(each.get(name) for name in names) for each in found] == [
        ("a", 0, 10, "computes", None, None, None),
        ("b", 1, 11, "computes", "sealed", [0, 3], "sdpa"),
        ("b", 1, 13, "computes", "sealed", [0, 3], "sdpa"),
        ("b", 2, 12, "silent", "local", [4, 5], None),
        ("c", 3, None, "starts", "sealed", [6, 6], None),
        ("d", 4, None, "lost", "sealed", [7, 7], None),
        ("e", None, None, "spare", None, None, None),
        ("f", None, None, "gone", None, None, None),
    ]
    assert (found[1]["busy"], found[1]["waits"], found[3]["busy"]) == (0.4, 0.5, None)
    assert versions(found) == "version: 1 on b; 2 on b"
