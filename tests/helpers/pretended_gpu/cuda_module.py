"""What stands in for parts of `torch.cuda` and for Triton's kernels on the pretended GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from tests.helpers.pretended_gpu.findings import Kind

if TYPE_CHECKING:
    from tests.helpers.pretended_gpu.gpu import PretendedGpu

MEMORY_BYTES = 80 << 30


def patches(gpu: PretendedGpu) -> Iterator[AbstractContextManager[Any]]:
    """To be entered."""

    class Event:
        def record(self) -> None: ...

        def synchronize(self) -> None:
            gpu.report(Kind.WAIT, "Event.synchronize")

    class Stream:
        def synchronize(self) -> None:
            gpu.report(Kind.WAIT, "Stream.synchronize")

    def synchronize(*_: Any) -> None:
        gpu.report(Kind.WAIT, "torch.cuda.synchronize")

    values = {
        "_lazy_init": None,
        "current_device": 0,
        "current_stream": Stream(),
        "get_device_capability": gpu.capability,
        "mem_get_info": (MEMORY_BYTES, MEMORY_BYTES),
        "set_sync_debug_mode": None,  # every wait is reported
    }
    for name, value in values.items():
        yield mock.patch.object(torch.cuda, name, return_value=value)
    yield mock.patch.object(torch.cuda, "Event", Event)
    yield mock.patch.object(torch.cuda, "synchronize", synchronize)
    yield mock.patch.object(torch, "Generator", return_value=torch.Generator())
    # Modes hold for one thread.
    yield mock.patch.dict(os.environ, HF_DEACTIVATE_ASYNC_LOAD="1")
    if find_spec("triton") is not None:
        from pipespec.engine.attention import kernels
        from tests.helpers.pretended_gpu.triton_launches import NAMES, Launches

        launches = Launches(gpu)
        for name in NAMES:
            yield mock.patch.object(kernels, name, launches.kernel(name))
