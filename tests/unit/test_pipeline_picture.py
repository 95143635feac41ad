"""The picture of README: rows of each stage and step, from traces."""

import json

import pytest

from pipespec.trace import Timeline, write_chrome_trace
from tools.pipeline_picture import draw, read_grid


def write_trace(path, stages):
    """A trace of stages, each a list of (committed, draft, pruned) per step."""
    ranks = []
    for rank, steps in enumerate(stages, 1):
        timeline = Timeline(record=True, clock=lambda: 0)
        for committed, draft, pruned in steps:
            timeline.add_rows(committed=committed, draft=draft, pruned=pruned)
        ranks.append((rank, f"stage {rank}", timeline.events))
    write_chrome_trace(path, ranks)
    return path


def test_later_stages_idle_until_the_first_batch_reaches_them(tmp_path):
    trace = write_trace(tmp_path / "trace.json", [[(3, 0, 0), (0, 2, 1)], [(3, 0, 0)]])
    first, second = read_grid(trace).stages
    assert [rows["committed"] for rows in first] == [3, 0]
    assert [rows["committed"] for rows in second] == [0, 3]


def test_each_row_is_drawn_once_in_its_kind(tmp_path):
    trace = write_trace(tmp_path / "trace.json", [[(3, 0, 0), (0, 2, 1)], [(3, 0, 0)]])
    picture = draw([("both stages", read_grid(trace))], steps=2)
    counts = {kind: picture.count(f'class="{kind}"') for kind in ("committed", "draft", "pruned")}
    assert counts == {"committed": 6, "draft": 2, "pruned": 1}


def test_trace_without_rows_is_refused(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": []}))
    with pytest.raises(ValueError, match="has no rows"):
        read_grid(path)
