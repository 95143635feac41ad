import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from pipespec.cluster.deployment.rank_assignment import RankAssignment
from pipespec.controller.cluster_status import ClusterStatus
from pipespec.extras.pages.routes import Dashboard, StepEntry, history_event, steps_event
from pipespec.head.tree_telemetry import STEP, StepSnapshot, TreeSnapshot
from pipespec.server.app import make_loading_app
from pipespec.server.metrics import Metrics
from pipespec.server.openai_serving import Moment
from pipespec.server.options import ServerOptions
from pipespec.server.response_stream import RequestOrigin
from tests.unit.server.test_metrics import COMPUTING, COUNTS, LABELS, PAST, STATE

ASSIGNED = RankAssignment(("a/0", "a/1", "b/0"), (range(4), range(4, 6))).encode()
SEEN = ClusterStatus(5, 3, 4, 2, 9, None, STATE, COUNTS, PAST, COMPUTING, ASSIGNED)


@pytest.mark.parametrize("seen", [SEEN, None])
def test_dashboard_figures_equal_metrics(seen: ClusterStatus | None) -> None:
    metrics = Metrics("m")
    result = json.loads(json.dumps(metrics.samples_by_name(seen)))
    found = {
        (name, *sorted(labels.items())): value
        for name, samples in result.items()
        for labels, value in samples
    }
    prefix = "pipespec_"
    expected = {
        (
            sample.name.removeprefix(prefix),
            *sorted(sample.labels.items() - LABELS.items()),
        ): sample.value
        for family in text_string_to_metric_families(metrics.prometheus_text(seen).decode())
        for sample in family.samples
        if sample.name.startswith(prefix)
    }
    assert found == expected
    assert found["cluster_up",] == (seen is not None)


def test_dashboard_figures_have_host_and_layers_of_each_rank() -> None:
    places = [labels for labels, _ in Metrics("m").samples_by_name(SEEN)["rank_place_info"]]
    assert [(each["rank"], each["host"], each["layers"]) for each in places] == [
        ("0", "a", ""),
        ("1", "a", "0-3"),
        ("2", "b", "4-5"),
    ]


def fields(epoch: int, step: StepSnapshot, **trees: TreeSnapshot) -> StepEntry:
    result = {request.strip("_"): tree.pack() for request, tree in trees.items()}
    result |= {STEP: step.pack(), "epoch": str(epoch).encode()}
    return {name.encode(): payload for name, payload in result.items()}


def tree(accepted: Sequence[int], tokens: Sequence[int]) -> TreeSnapshot:
    numbers = np.arange(len(tokens))
    return TreeSnapshot(
        *(40, 99, tuple(accepted), numbers + 10, np.maximum(numbers - 1, 0)),
        *(np.array(tokens), numbers % 2, -numbers / 4),
    )


def test_steps_event_has_the_newest_tree_and_all_accepted_tokens() -> None:
    came = [
        fields(2, StepSnapshot(7, 1, 15, 0), _5=tree([1], [3, 4])),
        fields(2, StepSnapshot(8, 0, 16, 0), _5=tree([2, 3], [4, 6, 7]), _6=tree([9], [9])),
        fields(2, StepSnapshot(9, 0, 4, 12)),
    ]
    result = steps_event(came, 5, lambda token: f"<{token}>")
    assert result["steps"] == [[2, 7, 1, 15, 0], [2, 8, 0, 16, 0], [2, 9, 0, 4, 12]]
    assert json.loads(json.dumps(result["tree"])) == {
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
    assert steps_event(came, None, str)["tree"] is None


def test_history_event_has_a_fault_once() -> None:
    faulty = (9, 3, 2, "x")
    moments = [Moment(1.0, 4, 2, 1), Moment(6.0), Moment(11.0, *faulty), Moment(16.0, *faulty)]
    assert json.loads(json.dumps(history_event(moments, 17.5))) == {
        "at": 17.5,
        "moments": [
            [1.0, 4, 2, 1, None],
            [6.0, None, None, None, None],
            [11.0, 9, 3, 2, "x"],
            [16.0, 9, 3, 2, None],
        ],
    }


def stream(digest: bytes, *numbers: int, agent: str = "") -> SimpleNamespace:
    """A reply with answers of these numbers, to a request with an API key of this digest."""
    origin = RequestOrigin("10.0.0.7", agent, "Hello", digest)
    return SimpleNamespace(origin=origin, numbers=numbers)


def test_origin_is_shown_to_the_key_of_its_request_alone() -> None:
    mine, others = stream(b"a", 1, 2, agent="tool/1"), stream(b"b", 3)
    requests = Dashboard(cast(Any, SimpleNamespace(client=None, open=[mine, others])))
    shown = {"client": "10.0.0.7", "agent": "tool/1", "preview": "Hello"}
    assert requests.origins(b"a") == {1: shown, 2: shown}
    assert [*requests.origins(b"b")] == [3]
    assert requests.origins(b"") == {}
    watched = [requests.may_watch(number, key) for key in (b"a", b"") for number in (1, 3, 4)]
    assert watched == [True, False, False, True, True, True]


def test_loading_server_serves_the_page_without_events() -> None:
    http = TestClient(make_loading_app(ServerOptions(("demo",), api_keys=("key",))))
    assert "/page/main.js" in http.get("/").text
    assert http.get("/page/main.js").status_code == 200
    assert "/page/chat.js" in http.get("/chat").text
    assert http.get("/events").status_code == 401
    assert http.get("/events", headers={"X-Api-Key": "key"}).status_code == 503
