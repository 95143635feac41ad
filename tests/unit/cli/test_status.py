"""What `pipespec status` makes of what a cluster says."""

import pytest

from pipespec.cli.status import process_table, processes, versions, work
from pipespec.cluster.deployment.rank_assignment import RankAssignment
from pipespec.console.terminal import show
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


def test_lone_layer_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    processes = [{"host": "a", "layers": [6, 6]}, {"host": "b", "layers": [7, 9]}]
    show(process_table(processes))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["a", "-", "-", "6", "-"] in [row[:5] for row in rows]
    assert ["b", "-", "-", "7", "to", "9"] in [row[:6] for row in rows]


def test_line_of_figures_calls_rows_as_the_glossary_does() -> None:
    counts = {"steps": 4, "tokens": 6, "root_rows": 3, "prompt_rows": 2, "draft_rows": 8}
    counts |= {"draft_hits": 2, "draft_hits_expected": 1, "rounds": 4, "kv_slots": 9}
    rest = ("kv_slots_held", "kv_slots_retained", "cache_hits", "cache_queries", "preemptions")
    line = work(counts | dict.fromkeys(rest, 0), {})
    assert "1.50 tokens per step; rows per step: 0.75 decided, 0.50 of prompts" in line
