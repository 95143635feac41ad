"""What is measured of a model on a device, when anew, and with how many threads."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pipespec.cluster.diagnostics import measure_hosts
from pipespec.cluster.diagnostics.measure_devices import measure
from pipespec.cluster.diagnostics.measure_hosts import MeasureRequest
from tests.helpers.models import shared


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@cache
def measured(model_type: str, **settings: Any) -> dict[str, Any]:
    model = str(shared(model_type))
    return measure(
        MeasureRequest(model, None, ("cpu",), (("stage",),), 2, 8, 4, "float32", **settings)
    )


@pytest.mark.slow
def test_figures_belong_to_the_type_of_k_and_v():
    wide, narrow = (
        each["devices"][0]["stage"]["kv_slot_bytes"]
        for each in (measured("llama"), measured("llama", kv_dtype="int8"))
    )
    assert narrow < wide


@pytest.mark.parametrize(("model_type", "divisible"), [("llama", True), ("gpt_oss", False)])
def test_whether_devices_can_compute_a_model_together_is_among_its_sizes(model_type, divisible):
    assert measured(model_type)["target"]["divisible"] is divisible


STAGE, EITHER, DRAFT = ("stage",), ("stage", "draft"), ("draft",)


def threads(*workers: tuple[str, ...], device: str = "cpu", **settings: object) -> int:
    devices = (device,) * len(workers)
    return MeasureRequest("t", "d", devices, workers, 8, 64, 4, "float32", **settings).num_threads()


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_hosts, "num_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS")


@pytest.mark.parametrize(
    ("workers", "expected"),
    [([STAGE], 8), ([EITHER], 8), ([STAGE] * 2, 4), ([DRAFT, STAGE], 7), ([EITHER] * 3, 3)],
)
def test_stages_of_a_host_share_its_cores(workers, expected):
    assert threads(*workers) == expected


def test_settings_come_first(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads(STAGE) == 3
    assert threads(STAGE, threads=2) == 2
