from collections.abc import Iterator

import numpy as np
import pytest
import torch

from pipespec.system.device_copy import make_current, staged, to_device, to_device_together, to_host

ARRAYS = (
    np.arange(6).reshape(2, 3),
    np.array([[True], [False], [True]]),
    np.zeros((0, 4), np.int64),
    np.array([0.5, -1.5], np.float32),
)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """A device to which the host waits for no copy."""
    found = torch.device(request.param)
    if found.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    yield found
    if found.type == "cuda":
        torch.cuda.set_sync_debug_mode("default")


def test_arrays_come_back_as_they_were_sent(device: torch.device):
    alone = [to_device(each, device) for each in ARRAYS]
    together = to_device_together(ARRAYS, device)
    assert {each.device.type for each in (*alone, *together)} == {device.type}
    for found in (alone, together):
        for back, each in zip(to_host(*found), ARRAYS, strict=True):
            assert back.dtype == each.dtype
            assert np.array_equal(back, each)
            assert back.shape == each.shape


def test_what_is_on_the_device_is_not_copied(device: torch.device):
    there = torch.ones(3, device=device)
    assert to_device(there, device) is there
    assert staged(there, device) is there
    assert to_device_together([], device) == []


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_a_process_on_a_gpu_never_attends_by_cudnn(device: str, monkeypatch: pytest.MonkeyPatch):
    current: list[str] = []
    monkeypatch.setattr("torch.cuda.set_device", current.append)
    flags = torch.backends.cuda
    before = flags.cudnn_sdp_enabled()
    try:
        flags.enable_cudnn_sdp(True)
        make_current(device)
        assert flags.cudnn_sdp_enabled() == (device == "cpu")
        assert current == [device] * (device != "cpu")
    finally:
        flags.enable_cudnn_sdp(before)
