"""What the dashboard's page is told of figures and steps."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from pipespec.cluster.rank_assignment import RankAssignment
from pipespec.controller.keys import Keys
from pipespec.controller.overview import Overview, Unfinished, unfinished, unfinished_questions
from pipespec.head.watching import STEP, ShownStep, ShownTree
from pipespec.server.app import make_loading_app
from pipespec.server.dashboard import Fields, steps_of
from pipespec.server.metrics import Metrics
from pipespec.server.options import ServerOptions
from tests.unit.server.test_metrics import COMPUTING, COUNTS, LABELS, PAST, STATE

ASSIGNED = RankAssignment(("a/0", "a/1", "b/0"), (range(4), range(4, 6)), "10.0.0.1").encode()
SEEN = Overview(5, 3, 4, 2, 9, None, STATE, COUNTS, PAST, COMPUTING, ASSIGNED)


@pytest.mark.parametrize("seen", [SEEN, None])
def test_the_figures_of_the_page_are_those_of_metrics(seen: Overview | None) -> None:
    metrics = Metrics("m")
    told = json.loads(json.dumps(metrics.figures(seen)))
    found = {
        (name, *sorted(labels.items())): value
        for name, samples in told.items()
        for labels, value in samples
    }
    prefix = "pipespec_"
    expected = {
        (
            sample.name.removeprefix(prefix),
            *sorted(sample.labels.items() - LABELS.items()),
        ): sample.value
        for family in text_string_to_metric_families(metrics.show(seen).decode())
        for sample in family.samples
        if sample.name.startswith(prefix)
    }
    assert found == expected
    assert found["cluster_up",] == (seen is not None)


def test_where_each_rank_is_stands_among_them() -> None:
    places = [labels for labels, _ in Metrics("m").figures(SEEN)["rank_place_info"]]
    assert [(each["rank"], each["host"], each["layers"]) for each in places] == [
        ("0", "a", ""),
        ("1", "a", "0-3"),
        ("2", "b", "4-5"),
    ]


def test_unfinished_requests_are_those_that_the_head_has_then_those_that_wait() -> None:
    assert len(unfinished_questions(Keys("n"), 10)) == 4
    replies = [[b"7", b"30", b"20"], [b"8", b"5", b"5", b"3", b"9", None]]
    assert unfinished(replies) == [
        Unfinished(7, True, 30, 20),
        Unfinished(8, False, 5, 5),
        Unfinished(3, False, 9, None),
    ]


def fields(epoch: int, step: ShownStep, **trees: ShownTree) -> Fields:
    told = {request.strip("_"): tree.pack() for request, tree in trees.items()}
    told |= {STEP: step.pack(), "epoch": str(epoch).encode()}
    return {name.encode(): payload for name, payload in told.items()}


def tree(accepted: Sequence[int], tokens: Sequence[int]) -> ShownTree:
    numbers = np.arange(len(tokens))
    return ShownTree(
        *(40, 99, tuple(accepted), numbers + 10, np.maximum(numbers - 1, 0)),
        *(np.array(tokens), numbers % 2, -numbers / 4),
    )


def test_of_steps_that_come_together_the_newest_tree_is_told_and_all_that_was_accepted() -> None:
    came = [
        fields(2, ShownStep(7, 1, 15, 0), _5=tree([1], [3, 4])),
        fields(2, ShownStep(8, 0, 16, 0), _5=tree([2, 3], [4, 6, 7]), _6=tree([9], [9])),
        fields(2, ShownStep(9, 0, 4, 12)),
    ]
    told = steps_of(came, 5, lambda token: f"<{token}>")
    assert told["steps"] == [[2, 7, 1, 15, 0], [2, 8, 0, 16, 0], [2, 9, 0, 4, 12]]
    assert json.loads(json.dumps(told["tree"])) == {
        "epoch": 2,
        "step": 8,
        "request": 5,
        "length": 40,
        "size": 99,
        "id": [10, 11, 12],
        "parent": [0, 0, 1],
        "token": [4, 6, 7],
        "fed": [0, 1, 0],
        "logp": [0, -0.25, -0.5],
        "texts": ["<4>", "<6>", "<7>"],
        "accepted": [1, 2, 3],
        "accepted_texts": ["<1>", "<2>", "<3>"],
    }
    assert steps_of(came, None, str)["tree"] is None


def test_while_the_cluster_loads_the_page_is_there_and_its_events_are_not() -> None:
    http = TestClient(make_loading_app(ServerOptions(("demo",), api_keys=("key",))))
    assert "/page/main.js" in http.get("/").text
    assert http.get("/page/main.js").status_code == 200
    assert http.get("/events").status_code == 401
    assert http.get("/events", headers={"X-Api-Key": "key"}).status_code == 503
