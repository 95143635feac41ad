"""What `pipespec status` makes of what a cluster says."""

from __future__ import annotations

from typing import Any

import pytest

from pipespec.cli.status import computing, processes, versions
from pipespec.cluster.deployment.rank_assignment import RankAssignment
from pipespec.controller.cluster_status import ClusterStatus


def how(attention: str = "sdpa", *graph_rows: int, **changes: Any) -> dict[str, Any]:
    return {
        "devices": 1,
        "attention": attention,
        "graph_rows": list(graph_rows),
        "compiled": False,
        "refused": [],
        **changes,
    }


WRONG = "attention=triton is not used: it is wrong."


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (
            [
                how(),
                how("triton", 16),
                how("static", 64, compiled=True, refused=[WRONG]),
                how("triton", 16),
            ],
            (
                "attention: sdpa (rank 0); triton, graphs of 16 rows (ranks 1, 3); "
                f"static, graphs of 64 rows, compiled (rank 2). rank 2: {WRONG}"
            ),
        ),
        (
            [how(), how("sdpa", 16, 64), how(devices=4)],
            (
                "attention: sdpa (rank 0); sdpa, graphs of 16 and 64 rows (rank 1); "
                "sdpa, 4 devices together (rank 2)."
            ),
        ),
    ],
)
def test_ranks_that_compute_alike_share_a_line(ranks: list[dict[str, Any]], said: str) -> None:
    assert computing(dict(enumerate(ranks))) == said


def test_usual_values_are_not_shown() -> None:
    assert computing({}) is None
    assert computing({0: how(), 1: how()}) is None
    assert computing({0: how(), 1: how(refused=["It is old."])}) is not None


def test_every_process_is_listed_with_what_it_does() -> None:
    assigned = RankAssignment(
        ("local/0", "b/0", "b/1", "c/0", "d/0"),
        (range(4), range(4, 6), range(6, 7), range(7, 8)),
        followers=((), ("b/2",), (), (), ()),
        others=("e/0", "f/0"),
    )
    status = ClusterStatus(
        *(2, 3, 1, 0, 0, None),
        counts={"active_ns/1": 100, "busy_ns/1": 40, "receive_ns/1": 50},
        computing={1: {"version": "1"}, 2: {"version": "2"}},
        pids={0: 10, 1: 11, 2: 12},
        followers={"b/2": 13},
    )
    seen = RankAssignment.decode(assigned.encode())
    found = processes(status, seen, {"local/0", "b/0", "b/2", "c/0", "e/0"}, "here", "auto")
    names = ("host", "rank", "pid", "state", "link", "layers")
    assert [tuple(each.get(name) for name in names) for each in found] == [
        ("here", 0, 10, "computes", None, None),
        ("b", 1, 11, "computes", "sealed", [0, 3]),
        ("b", 1, 13, "computes", "sealed", [0, 3]),
        ("b", 2, 12, "silent", "local", [4, 5]),
        ("c", 3, None, "starts", "sealed", [6, 6]),
        ("d", 4, None, "lost", "sealed", [7, 7]),
        ("e", None, None, "spare", None, None),
        ("f", None, None, "gone", None, None),
    ]
    assert (found[1]["busy"], found[1]["waits"], found[3]["busy"]) == (0.4, 0.5, None)
    assert versions(found) == "version: 1 on b; 2 on b"
