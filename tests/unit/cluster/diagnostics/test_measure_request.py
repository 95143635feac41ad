"""With how many threads a host is measured: as many as its stages will have."""

from __future__ import annotations

import pytest

from pipespec.cluster.diagnostics import measure_request
from pipespec.cluster.diagnostics.measure_request import MeasureRequest

STAGE, EITHER, DRAFT = ("stage",), ("stage", "draft"), ("draft",)


def threads(*workers: tuple[str, ...], device: str = "cpu", **settings: object) -> int:
    devices = (device,) * len(workers)
    return MeasureRequest("t", "d", devices, workers, 8, 64, 4, "float32", **settings).num_threads()


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_request, "num_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS")


@pytest.mark.parametrize(
    ("workers", "expected"),
    [([STAGE], 8), ([EITHER], 8), ([STAGE] * 2, 4), ([DRAFT, STAGE], 7), ([EITHER] * 3, 3)],
)
def test_stages_of_a_host_share_its_cores(workers: list[tuple[str, ...]], expected: int) -> None:
    assert threads(*workers) == expected


def test_settings_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads(STAGE) == 3
    assert threads(STAGE, threads=2) == 2
