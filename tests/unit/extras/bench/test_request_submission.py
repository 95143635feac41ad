"""In which order a benchmark hands requests in and reads them, with a client that needs no time."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import pytest

from pipespec.client.model_info import ModelInfo
from pipespec.client.request_settings import RequestSettings
from pipespec.cluster.decide import decide
from pipespec.config.compose import compose
from pipespec.controller.log_records import Accepted, Finished
from pipespec.extras.bench import measurement as module
from pipespec.extras.bench.dataset import Load, Sample
from pipespec.extras.bench.measurement import BenchRun
from pipespec.timing.stats import PERIOD, empty_report

SECOND = 10**9
PROMPT = [5, 6]


class StoryClient:
    """Requests that take a given time each, whatever else is open; the clock jumps."""

    def __init__(self, seconds: Sequence[float], *settings: str):
        self.served = ModelInfo.of(decide(compose(settings)))
        self.now = 0
        self.came: list[float] = []  # when each was handed in, in seconds
        self.most = 0  # that were unfinished at once
        self.reported: list[tuple[int, int]] = []  # whose, and how many were unfinished
        self._seconds = seconds
        self._ends: dict[int, int] = {}

    def run(self, answered: Any) -> Any:
        """Its calls are done when they are made."""
        return answered

    def submit(self, *_: Any, **__: Any) -> int:
        number = len(self.came)
        self.came.append(self.now / SECOND)
        self._ends[number] = self.now + int(self._seconds[number] * SECOND)
        self.most = max(self.most, len(self._ends))
        return number

    @contextmanager
    def follow(self) -> Iterator[Self]:
        yield self

    def next(self, timeout: float | None) -> list[tuple[int, Accepted | Finished]]:
        first = min(self._ends, key=lambda number: self._ends[number], default=None)
        if timeout is not None:
            until = self.now + math.ceil(timeout * SECOND)
            if first is None or self._ends[first] > until:
                self.now = until
                return []
        assert first is not None, "nothing to wait for"
        self.now = self._ends.pop(first)
        return [(first, Accepted(len(PROMPT), (7,))), (first, Finished("length"))]

    def reports(self, request: int) -> list[dict[str, Any]]:
        self.reported.append((request, len(self._ends)))
        at = round((self.came[request] + self._seconds[request]) * SECOND)
        head = empty_report(0) | {"token_ns": [at]}
        head["counts"] |= {"steps": 1, "rows": 2}
        stage = {"busy_ns": 1, "elapsed_ns": 2, "attention": "sdpa"}
        return [head, empty_report(1) | stage | {"period": dict.fromkeys(PERIOD, 1)}]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    def run(client: StoryClient, **load: Any):
        monkeypatch.setattr(module, "monotonic_ns", lambda: client.now)
        samples = [Sample(str(i), "b", "x") for i in range(len(client._seconds))]
        done: list[tuple[int, int]] = []
        settings, prompts = RequestSettings.of(compose([])), [PROMPT] * len(samples)
        run = BenchRun(client, settings, samples, prompts)
        result = run.measure(Load.of(**load), lambda *of: done.append(of))
        assert [request.id for request in result.requests] == [sample.id for sample in samples]
        assert done == [(i, len(samples)) for i in range(len(samples) + 1)]
        return result

    return run


def test_the_next_comes_when_any_finishes(run) -> None:
    client = StoryClient([9, 1, 1, 1, 1, 1])
    result = run(client, concurrency=2)
    assert client.came == [0, 0, 1, 2, 3, 4], "though the oldest takes long"
    assert client.most == result.summary()["max_concurrent_requests"] == 2
    assert result.duration_s == 9


def test_at_a_rate_any_number_is_open(run) -> None:
    client = StoryClient([100] * 8)
    run(client, request_rate=2.0)
    assert client.came == sorted(client.came)
    assert client.came[-1] == pytest.approx(8 / 2)
    assert client.most == 8


def test_held_back_request_is_submitted_when_another_finishes(run) -> None:
    client = StoryClient([10] * 4)
    result = run(client, request_rate=1000.0, concurrency=2)
    assert client.most == 2
    assert client.came == pytest.approx([0, 0, 10, 10], abs=0.01)
    assert result.requests[2].ttft_ms == pytest.approx(10_000), "since it was handed in"


def test_arrivals_are_in_the_seconds_of_the_emulated_machine(run) -> None:
    client = StoryClient([1] * 4, "emulate=fixed", "emulate.stage_ms=1", "emulate.scale=4")
    result = run(client, request_rate=0.5)
    assert client.came[-1] == pytest.approx(4 * 4 / 0.5)
    assert result.requests[-1].started_ms == pytest.approx(8000)
    assert result.duration_s == pytest.approx(8 + 1 / 4)


def test_reports_are_read_when_nothing_is_to_be_handed_in(run) -> None:
    client = StoryClient([5, 1, 2])
    run(client, concurrency=3)
    assert client.reported == [(1, 0), (2, 0), (0, 0)]


def test_reports_are_read_while_the_log_keeps_them(run) -> None:
    client = StoryClient([1, 2000, 1500, 1500])
    run(client, concurrency=2)
    assert client.reported[0] == (0, 2)
